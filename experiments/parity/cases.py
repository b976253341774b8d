"""Small models of every family, over every option that changes results, and their inputs."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from experiments.parity.weights import EOS

VOCAB, LENGTH, TARGET, FRAMES, MELS = 40, 9, 7, 24, 6
ROWS, SEARCHED, NEW_TOKENS, BEAMS, PENALTY = 3, 20, 12, 4, 1.0
PAD, BOS, IGNORED = 1, 0, -100
IMAGE, CLASSES, SPEAKER = (7, 7, 3), 5, 8
# Prompts with pictures: length, image token, and tokens of one picture.
PROMPT, IMAGE_ID, PATCHES = 14, VOCAB - 1, 4

Kind = Literal[
    "pair", "speech", "caption", "encoder", "decoder", "picture", "latents of picture", "bytes",
    "prompt", "picture and text", "said",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
      name: family and options.
      model: class of ``transformers``.
      config: arguments of its config.
      kind: of its inputs: two texts, sound and text, a picture and text, one text, a picture, a picture or
        a text whose bytes latents read, a text with pictures in it, pictures and texts to compare, a text
        that is said.
      search: the seed of the random weights of a model that also generates, chosen so that the texts differ
        and end at different lengths; 0 is none.
      untied: names of tensors that the class ties, and this model does not.
    """

    name: str
    model: str
    config: dict[str, Any] = field(repr=False)
    kind: Kind = "pair"
    search: int = 0
    untied: tuple[str, ...] = ()

    @property
    def reads(self) -> bool:
        """Whether a decoder reads vectors from elsewhere."""
        return self.config.get("add_cross_attention", False)


Changes = dict[str, Any]
_NOTHING: Changes = {}
_IDS = dict(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
_T5 = dict(
    vocab_size=VOCAB, d_model=16, d_kv=6, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=3,
    decoder_start_token_id=PAD, **_IDS,
)  # fmt: skip
_STACKS = dict(
    vocab_size=VOCAB, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=20, decoder_start_token_id=BOS,
)  # fmt: skip
_BERT = dict(
    vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=24, max_position_embeddings=32, **_IDS,
)  # fmt: skip
_WHISPER = _STACKS | dict(
    num_mel_bins=MELS, max_source_positions=FRAMES // 2, max_target_positions=32,
    begin_suppress_tokens=None, **_IDS,
)  # fmt: skip
_GPT2 = dict(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=32, **_IDS)
_LLAMA = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, **_IDS,
)  # fmt: skip
_CLIP_VISION = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, projection_dim=12,
    image_size=IMAGE[0], patch_size=3,
)  # fmt: skip
_CLIP_TEXT = dict(
    vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20,
    max_position_embeddings=LENGTH, **_IDS,
)  # fmt: skip
_VIT = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    image_size=list(IMAGE[:2]), patch_size=[3, 2],
)  # fmt: skip
_TROCR = dict(
    vocab_size=VOCAB, d_model=16, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=20,
    max_position_embeddings=32, **_IDS,
)  # fmt: skip
_PERCEIVER = dict(
    num_latents=5, d_latents=16, d_model=24, num_blocks=2, num_self_attends_per_block=2,
    num_self_attention_heads=2, num_cross_attention_heads=2, qk_channels=16, v_channels=16,
    vocab_size=VOCAB, max_position_embeddings=LENGTH + 3, image_size=IMAGE[0], num_labels=CLASSES,
)  # fmt: skip
_SPEECHT5 = dict(
    vocab_size=VOCAB, hidden_size=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24,
    decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=20, num_mel_bins=MELS, reduction_factor=2,
    speech_decoder_prenet_units=12, speech_decoder_postnet_layers=3, speech_decoder_postnet_units=10,
    speech_decoder_postnet_kernel=5, speaker_embedding_dim=SPEAKER, encoder_max_relative_position=3,
    max_text_positions=32, max_speech_positions=64, **_IDS,
)  # fmt: skip
_READS: Changes = dict(is_decoder=True, add_cross_attention=True)
# The first tokens of texts, by the family; BOS for the others.
_STARTS = {"Bart": EOS, "Mvp": EOS, "Marian": PAD, "Pegasus": PAD}


def _family(title: str, base: dict[str, Any], kind: Kind, model: str = "") -> Callable[..., Case]:
    """Returns a function of a case's name and class, which adds changes of the family's config."""

    def build(
        name: str, model: str = model, kind: Kind = kind, search: int = 0, **changes: Any
    ) -> Case:
        return Case(f"{title}, {name}", model, base | changes, kind, search)

    return build


bert = _family("BERT", _BERT, "encoder")
whisper = _family("Whisper", _WHISPER, "speech", "WhisperForConditionalGeneration")
gpt2 = _family("GPT-2", _GPT2, "decoder", "GPT2LMHeadModel")
clip_vision = _family("CLIP", _CLIP_VISION, "picture", "CLIPVisionModel")
speecht5 = _family("SpeechT5", _SPEECHT5, "said", "SpeechT5ForTextToSpeech")
perceiver = _family("Perceiver", _PERCEIVER, "latents of picture")


def t5(name: str, search: int = 0, untied: tuple[str, ...] = (), **changes: Any) -> Case:
    """Returns a T5 or, by its name, an mT5."""
    family, name = ("MT5", name) if name.startswith("mT5") else ("T5", f"T5, {name}")
    model = f"{family}ForConditionalGeneration"
    return Case(name, model, _T5 | changes, search=search, untied=untied)


def bart(family: str, name: str, search: int = 0, model: str = "", **changes: Any) -> Case:
    """Returns a BART or a relative, by the prefix of its class."""
    own = dict(
        max_position_embeddings=32, forced_eos_token_id=None, **_IDS,
        decoder_start_token_id=_STARTS.get(family, BOS),
    )  # fmt: skip
    model = model or f"{family}ForConditionalGeneration"
    return Case(f"{family}, {name}", model, _STACKS | own | changes, search=search)


def llama(name: str, search: int = 0, family: str = "Llama", **changes: Any) -> Case:
    """Returns a Llama or a relative, by the prefix of its class."""
    model = f"{family}ForCausalLM"
    return Case(f"{family}, {name}", model, _LLAMA | changes, "decoder", search=search)


def stretched(kind: str, **rope: Any) -> dict[str, Any]:
    """Returns options of scaled rotary positions, for a model that was trained on fewer positions."""
    own = dict(rope_type=kind, rope_theta=100.0, factor=3.0)
    if kind in ("llama3", "yarn"):
        own["original_max_position_embeddings"] = 4
    return dict(max_position_embeddings=4, rope_parameters=own | rope)


def clip(name: str, **text: Any) -> Case:
    """Returns a whole CLIP, with changes of the config of texts."""
    config = dict(text_config=_CLIP_TEXT | text, vision_config=_CLIP_VISION, projection_dim=12)
    return Case(f"CLIP, {name}", "CLIPModel", config, "picture and text")


def vit(name: str, model: str, **changes: Any) -> Case:
    """Returns a ViT or a DeiT."""
    config = _VIT | (dict(num_labels=CLASSES) if "Classification" in model else {})
    return Case(name, model, config | changes, "picture")


def bert_pair(
    name: str,
    search: int = 0,
    encoder: Changes = _NOTHING,
    decoder: Changes = _NOTHING,
    **changes: Any,
) -> Case:
    """Returns a BERT that reads and one that writes, with changes of both configs and the pair's."""
    half = _BERT | dict(model_type="bert")
    config = dict(
        encoder=half | encoder, decoder=half | _READS | decoder, decoder_start_token_id=BOS, **_IDS
    )
    return Case(f"BERT pair, {name}", "EncoderDecoderModel", config | changes, search=search)


def llava(
    name: str, search: int = 0, vision: Changes = _NOTHING, text: Changes = _NOTHING, **changes: Any
) -> Case:
    """Returns a CLIP whose patches a Llama reads, with changes of both configs and the whole."""
    config = dict(
        vision_config=_CLIP_VISION | dict(model_type="clip_vision_model") | vision,
        text_config=_LLAMA | dict(model_type="llama") | text,
        image_token_index=IMAGE_ID, image_seq_length=PATCHES,
    )  # fmt: skip
    model = "LlavaForConditionalGeneration"
    return Case(f"LLaVA, {name}", model, config | changes, "prompt", search=search)


def captioner(
    name: str,
    reader: str,
    writer: str,
    search: int = 0,
    encoder: Changes = _NOTHING,
    decoder: Changes = _NOTHING,
) -> Case:
    """Returns a ViT or a DeiT that reads and a decoder that writes, with changes of both configs."""
    writers = {"bert": _BERT | _READS, "gpt2": _GPT2 | _READS, "trocr": _TROCR}
    config = dict(
        encoder=_VIT | dict(model_type=reader) | encoder,
        decoder=writers[writer] | dict(model_type=writer) | decoder,
        decoder_start_token_id=BOS,
        **_IDS,
    )
    return Case(name, "VisionEncoderDecoderModel", config, "caption", search=search)


CASES = (
    t5("tied, relu", search=23),
    t5("tied, gelu, 8 buckets", feed_forward_proj="gelu", relative_attention_num_buckets=8,
       relative_attention_max_distance=10),
    t5("v1.1: untied, gated gelu", search=12, feed_forward_proj="gated-gelu",
       tie_word_embeddings=False, untied=("lm_head.weight",)),
    t5("tied without scale, gated silu, 1+3 layers", feed_forward_proj="gated-silu",
       tie_word_embeddings=False, num_layers=1, num_decoder_layers=3),
    t5("mT5, untied", search=12, untied=("lm_head.weight",)),
    t5("mT5, tied, relu", feed_forward_proj="relu"),
    bart("Bart", "gelu", search=19),
    bart("Bart", "scaled, gelu_new", scale_embedding=True, activation_function="gelu_new"),
    bart("Bart", "untied, relu", tie_word_embeddings=False, activation_function="relu"),
    bart("MBart", "scaled", search=16, scale_embedding=True),
    bart("MBart", "untied, relu", tie_word_embeddings=False, activation_function="relu"),
    bart("Marian", "scaled, swish", search=41, model="MarianMTModel", scale_embedding=True,
         activation_function="swish"),
    bart("Marian", "two vocabularies", model="MarianMTModel", decoder_vocab_size=VOCAB - 4,
         share_encoder_decoder_embeddings=False),
    bart("Marian", "two vocabularies, untied", model="MarianMTModel", tie_word_embeddings=False,
         share_encoder_decoder_embeddings=False),
    bart("Pegasus", "scaled, relu", search=17, scale_embedding=True,
         activation_function="relu"),
    bart("PLBart", "scaled", search=16, scale_embedding=True),
    bart("Mvp", "relu", search=19, activation_function="relu"),
    bart("Blenderbot", "scaled", search=16, scale_embedding=True, encoder_no_repeat_ngram_size=0),
    bert("masked tokens", "BertForMaskedLM"),
    bert("masked tokens, untied, relu", "BertForMaskedLM", tie_word_embeddings=False,
         hidden_act="relu"),
    bert("masked tokens and next sentence", "BertForPreTraining"),
    bert("no head, gelu_new", "BertModel", hidden_act="gelu_new"),
    bert("decoder alone", "BertLMHeadModel", "decoder", is_decoder=True, search=4),
    bert("decoder with cross-attention, gelu_new", "BertLMHeadModel", "decoder", is_decoder=True,
         add_cross_attention=True, hidden_act="gelu_new", search=9),
    bert_pair("of one size", search=25),
    bert_pair("of two sizes", encoder=dict(hidden_size=24, num_attention_heads=3)),
    whisper("gelu", search=4),
    whisper("unequal halves, relu", encoder_layers=1, decoder_layers=3, activation_function="relu"),
    gpt2("gelu_new", search=7),
    gpt2("unscaled, untied, gelu, n_inner", scale_attn_weights=False, tie_word_embeddings=False,
         activation_function="gelu", n_inner=20),
    gpt2("with cross-attention", search=4, add_cross_attention=True),
    llama("grouped heads", search=3),
    llama("tied, biases, gelu, longer heads", tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
          hidden_act="gelu", head_dim=6, num_key_value_heads=4, rope_parameters=dict(rope_theta=100.0)),
    llama("linear", **stretched("linear")),
    llama("dynamic", search=3, **stretched("dynamic")),
    llama("llama3", **stretched("llama3", low_freq_factor=0.2, high_freq_factor=0.5), head_dim=12),
    llama("yarn", **stretched("yarn", beta_fast=2.0, beta_slow=0.1), head_dim=12),
    llama("window", search=3, family="Mistral", sliding_window=4),
    llama("biases of queries, keys and values", search=3, family="Qwen2"),
    clip_vision("pictures"),
    clip_vision("pictures, gelu", hidden_act="gelu", layer_norm_eps=1e-2),
    clip("pictures and texts"),
    clip("pictures and texts, an end of its own, relu", eos_token_id=9, hidden_act="relu"),
    llava("last layer but one", search=3),
    llava("last layer, class token, of another size", vision=dict(hidden_size=24), image_seq_length=5,
          vision_feature_layer=-1, vision_feature_select_strategy="full", multimodal_projector_bias=False,
          projector_hidden_act="relu"),
    vit("ViT, no head, relu", "ViTModel", hidden_act="relu"),
    vit("ViT, classes", "ViTForImageClassification", layer_norm_eps=1e-2),
    vit("ViT, classes, no biases of queries, keys and values", "ViTForImageClassification", qkv_bias=False),
    vit("DeiT, no head", "DeiTModel"),
    vit("DeiT, classes of two tokens", "DeiTForImageClassificationWithTeacher"),
    captioner("Captioner, ViT and GPT-2", "vit", "gpt2", search=3),
    captioner("Captioner, DeiT and BERT of another size", "deit", "bert", search=4,
              encoder=dict(hidden_size=24)),
    captioner("Captioner, ViT and TrOCR that reads another size", "vit", "trocr", search=3,
              encoder=dict(hidden_size=24), decoder=dict(cross_attention_hidden_size=24)),
    captioner("Captioner, ViT and TrOCR with sinusoids", "vit", "trocr", search=8,
              encoder=dict(qkv_bias=False),
              decoder=dict(use_learned_position_embeddings=False, layernorm_embedding=False,
                           scale_embedding=True)),
    perceiver("Fourier positions", "PerceiverForImageClassificationFourier"),
    perceiver("Fourier positions, keys as long as pixels, relu", "PerceiverForImageClassificationFourier",
              qk_channels=None, v_channels=None, num_cross_attention_heads=3, num_blocks=1,
              hidden_act="relu", d_latents=18),
    perceiver("learned positions", "PerceiverForImageClassificationLearned",
              self_attention_widening_factor=3),
    perceiver("masked bytes", "PerceiverForMaskedLM", "bytes", cross_attention_widening_factor=2),
    perceiver("masked bytes, latents not added", "PerceiverForMaskedLM", "bytes", use_query_residual=False,
              qk_channels=None, v_channels=None, cross_attention_shape_for_attention="q"),
    perceiver("classes of texts", "PerceiverForSequenceClassification", "bytes", v_channels=None),
    speecht5("two frames a step"),
    speecht5("a frame a step, relu, unequal halves", reduction_factor=1, hidden_act="relu", encoder_layers=1,
             speech_decoder_postnet_layers=1, encoder_max_relative_position=20, layer_norm_eps=1e-2),
)  # fmt: skip


def inputs(case: Case) -> dict[str, np.ndarray]:
    """Returns the inputs of a case: ``ROWS`` rows are compared, and ``SEARCHED`` ones generate."""
    random = np.random.RandomState(zlib.crc32(case.name.encode()))
    vocab = case.config.get("vocab_size", VOCAB)
    target_vocab = case.config.get("decoder_vocab_size", vocab)
    source = random.randint(EOS + 1, vocab, (SEARCHED, LENGTH))
    present = (np.arange(LENGTH) < random.randint(4, LENGTH + 1, (SEARCHED, 1))).astype(np.int32)
    labels = random.randint(EOS + 1, target_vocab, (ROWS, TARGET))
    labels[0, -2:] = IGNORED
    arrays: dict[str, np.ndarray] = {"labels": labels}
    if case.kind == "picture and text":
        image = random.standard_normal((ROWS, *IMAGE)).astype(np.float32)
        source[:, 5] = VOCAB if case.config["text_config"]["eos_token_id"] == EOS else 9
        return {"image": image, "source": np.minimum(source, VOCAB - 1)}
    if "picture" in case.kind:
        image = random.standard_normal((ROWS, *IMAGE)).astype(np.float32)
        return {"image": image, "labels": random.randint(0, CLASSES, ROWS)}
    if case.kind == "prompt":
        return _prompts(random, case.config["image_seq_length"])
    if case.kind == "caption":
        image = random.standard_normal((SEARCHED, *IMAGE)).astype(np.float32)
        return arrays | {"image": image}
    if case.kind == "said":
        del arrays["labels"]
        arrays["frames"] = random.standard_normal((SEARCHED, TARGET, MELS)).astype(np.float32)
        arrays["speaker"] = random.standard_normal((SEARCHED, SPEAKER)).astype(np.float32)
    if case.kind == "speech":
        arrays["frames"] = random.standard_normal((SEARCHED, FRAMES, MELS)).astype(np.float32)
    else:
        arrays |= {"source": np.where(present, source, PAD), "present": present}
    if case.kind == "bytes":
        arrays["labels"] = np.where(present, source, IGNORED)[:ROWS]
    if case.model == "PerceiverForSequenceClassification":
        arrays["labels"] = random.randint(0, CLASSES, ROWS)
    if case.kind == "encoder":
        arrays["types"] = random.randint(0, 2, (SEARCHED, LENGTH))
        arrays["labels"] = np.where(present, source, IGNORED)[:ROWS]
    if case.model == "BertForPreTraining":
        arrays["follows"] = random.randint(0, 2, ROWS)
    if case.model == "BertModel":
        del arrays["labels"]
    if case.kind == "decoder":
        arrays["prompts"] = random.randint(EOS + 1, vocab, (SEARCHED, 3))
    if case.reads:
        size = int(case.config.get("hidden_size") or case.config["n_embd"])
        arrays["memory"] = random.standard_normal((SEARCHED, LENGTH, size)).astype(np.float32)
    return arrays


def _prompts(random: np.random.RandomState, size: int) -> dict[str, np.ndarray]:
    """Returns texts with one or two pictures of ``size`` tokens each, and the lengths of the prompts."""
    tokens = random.randint(EOS + 1, IMAGE_ID, (SEARCHED, PROMPT))
    starts = np.stack([random.randint(0, 3, SEARCHED), random.randint(7, 9, SEARCHED)], axis=1)
    starts[random.rand(SEARCHED) < 0.5, 1] = -1
    for row, own in enumerate(starts):
        for start in own[own >= 0]:
            tokens[row, start : start + size] = IMAGE_ID
    lengths = random.randint(starts.max(1) + size, PROMPT + 1)
    image = random.standard_normal((SEARCHED, 2, *IMAGE)).astype(np.float32)
    return {"prompts": tokens, "starts": starts, "lengths": lengths, "image": image}


def compared(case: Case, measured: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the measurements, with 0 at padding where a class of ``transformers`` masks it by itself.

    The results of padding differ between those classes.
    """
    data = inputs(case)
    if case.kind == "encoder":
        tokens = data["present"][:ROWS]
    elif case.model == "EncoderDecoderModel":
        tokens = np.insert(data["labels"][:, :-1] != IGNORED, 0, True, axis=1)
    else:
        return measured
    chosen = dict(measured)
    for name in {"logits", "vectors"} & chosen.keys():
        chosen[name] = chosen[name] * tokens[..., None]
    if "weights" in chosen:
        chosen["weights"] = chosen["weights"] * tokens[:, None, :, None]
    return chosen


def ended(tokens: np.ndarray) -> np.ndarray:
    """Returns which rows of generated tokens [B T] end before the limit."""
    return (tokens == EOS).any(axis=1)


def chosen_gradients(shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Returns three matrices of the model; no tables, whose padding rows torch leaves out."""
    matrices = sorted(
        name
        for name, shape in shapes.items()
        if len(shape) == 2
        and min(shape) > 1
        and not any(word in name for word in ("embed", "shared", "wte", "wpe", "lm_head", "pooler"))
    )
    return [matrices[len(matrices) * k // 4] for k in (1, 2, 3)]
