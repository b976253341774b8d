"""Checkpoints of random parameters that train in seconds: ``config.init.from = "tiny:t5"``.

They are files as ``transformers`` writes them, with tokenizers of bytes, to try without a download
whatever begins from a published checkpoint.
"""

import json
import re
from pathlib import Path
from typing import Any

import jax
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from crossattn import functional, weights

_SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "en_XX", "fr_XX")
_WHISPER = ("endoftext", "startoftranscript", "en", "translate", "transcribe", "startoflm", "startofprev",
            "nospeech", "notimestamps")  # fmt: skip
_WHISPER_TIMES = 51
_HEADS = re.compile(r"encoder\.(cls|bert\.pooler)\.")
_PAD, _BOS, _EOS = 256, 257, 258  # after the bytes
_VOCAB = 256 + len(_SPECIALS)
_IDS = dict(pad_token_id=_PAD, bos_token_id=_BOS, eos_token_id=_EOS)


def _bart(model_type: str, start: int = _PAD, **changes: Any) -> dict[str, Any]:
    return dict(
        model_type=model_type, vocab_size=_VOCAB, d_model=32, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_position_embeddings=64, activation_function="gelu", dropout=0.0,
        decoder_start_token_id=start, **_IDS,
    ) | changes  # fmt: skip


_T5 = dict(
    model_type="t5", vocab_size=_VOCAB, d_model=32, d_kv=16, d_ff=64, num_layers=1,
    num_heads=2, dropout_rate=0.0, decoder_start_token_id=_PAD, **_IDS,
)  # fmt: skip
_GPT2 = dict(
    model_type="gpt2", vocab_size=_VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=64,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **_IDS | {"bos_token_id": _EOS},
)  # fmt: skip
_BERT = dict(
    model_type="bert", vocab_size=_VOCAB, hidden_size=32, num_hidden_layers=1,
    num_attention_heads=2, intermediate_size=64, max_position_embeddings=64, type_vocab_size=2,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0, **_IDS,
)  # fmt: skip
_LLAMA = dict(
    model_type="llama", vocab_size=_VOCAB, hidden_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, intermediate_size=64, max_position_embeddings=64, **_IDS,
)  # fmt: skip
_PAIR = dict(
    model_type="encoder-decoder", encoder=_BERT,
    decoder=_BERT | dict(is_decoder=True, add_cross_attention=True), decoder_start_token_id=_BOS, **_IDS,
)  # fmt: skip
_VIT = dict(
    model_type="vit", hidden_size=48, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
    image_size=16, patch_size=4, num_channels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
_CAPTIONS = dict(
    model_type="vision-encoder-decoder", encoder=_VIT,
    decoder=_GPT2 | dict(is_decoder=True, add_cross_attention=True), decoder_start_token_id=_EOS, **_IDS,
)  # fmt: skip
_WHISPER_IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 256)
# Kind of model -> ``config.json``, and the template of a text; None is the bare text.
_FAMILIES: dict[str, tuple[dict[str, Any], str | None]] = {
    "annalog": (_bart("annalog"), "<s> $A </s>"),
    "bart": (_bart("bart", start=_EOS), "<s> $A </s>"),
    "bert": (_BERT | dict(vocab_size=_VOCAB + 1), "<s> $A </s>"),
    "encoder-decoder": (_PAIR, "<s> $A </s>"),
    "gpt2": (_GPT2, None),
    "llama": (_LLAMA, "<s> $A"),
    "marian": (_bart("marian"), "$A </s>"),
    "mbart": (_bart("mbart", start=_EOS), "$A </s> en_XX"),
    "pegasus": (_bart("pegasus"), "$A </s>"),
    "t5": (_T5, "$A </s>"),
    "vision-encoder-decoder": (_CAPTIONS, None),
    "whisper": (
        _bart("whisper", start=257, vocab_size=256 + len(_WHISPER) + _WHISPER_TIMES, num_mel_bins=16,
              max_source_positions=32, max_target_positions=32, **_WHISPER_IDS),
        None,
    ),
}  # fmt: skip


def known() -> list[str]:
    """Returns the kinds of checkpoints."""
    return list(_FAMILIES)


def write(kind: str, folder: Path) -> Path:
    """Writes a checkpoint of this kind, always the same, and returns its folder."""
    settings, template = _FAMILIES[kind]
    folder.mkdir(parents=True, exist_ok=True)
    model = weights.describe(settings)
    if kind == "encoder-decoder":  # whose encoder has no heads
        shapes = jax.eval_shape(lambda key: functional.init(model, key), jax.random.key(0))
        names = [name for name in weights.Tensors.of(model, shapes) if not _HEADS.match(name)]
        (folder / "config.json").write_text(model.text, encoding="utf-8")
        model = weights.describe_folder(folder, dict.fromkeys(names, "F32"))
    weights.save(folder, model, functional.init(model, jax.random.key(0)))
    specials = {
        "whisper": [f"<|{name}|>" for name in _WHISPER],
        "bert": [*_SPECIALS, "[MASK]"],
    }.get(kind, _SPECIALS)
    _bytes(specials, template).save(str(folder / "tokenizer.json"), pretty=False)
    if kind == "whisper":
        hints = _WHISPER_IDS | {"decoder_start_token_id": 257, "is_multilingual": False}
        (folder / "generation_config.json").write_text(json.dumps(hints) + "\n", encoding="utf-8")
    return folder


def _bytes(specials: Any, template: str | None) -> Tokenizer:
    """Returns a tokenizer of bytes, then specials; a template puts some of these around a text."""
    letters = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in specials])
    if template is not None:
        used = [word for word in template.split() if word != "$A"]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(text, backend.token_to_id(text)) for text in used]
        )
    return backend
