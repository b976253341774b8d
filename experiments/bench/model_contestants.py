"""Models for the suite of ``crossattn.testing.models``: ours, and small random ones of ``transformers``.

Those of ``transformers`` are called as its documentation says: masks for padding, positions where a model
takes them, and positions that begin anew for texts packed into a row.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from crossattn import models as architectures_of
from crossattn.testing import architectures
from crossattn.testing.models import Model, texts

V, S, T = 64, 7, 6  # vocabulary, lengths of source and target


def encoder_decoder(make: str, **config: Any) -> Model:
    """Makes the adapter of an encoder-decoder of texts."""
    import torch

    model = _lively(make, **config)

    def call(source, target, source_mask=None, target_mask=None):
        masks = dict(attention_mask=source_mask, decoder_attention_mask=target_mask)
        return model(input_ids=source, decoder_input_ids=target, **masks).logits

    def begin(source, source_mask):
        return model.get_encoder()(input_ids=source, attention_mask=source_mask), source_mask, None

    def step(target, state):
        encoded, mask, cache = state
        given = dict(attention_mask=mask, past_key_values=cache, use_cache=True)
        out = model(encoder_outputs=encoded, decoder_input_ids=target, **given)
        return out.logits, (encoded, mask, out.past_key_values)

    draw = texts(source=(S, V), target=(T, V))
    return Model(call, draw, begin, step, convert=torch.tensor)


def listener(make: str, frames: int, mels: int, **config: Any) -> Model:
    """Makes the adapter of a Whisper, whose source are frames, all of them and without a mask."""
    import numpy as np
    import torch

    model = _lively(make, num_mel_bins=mels, max_source_positions=frames // 2, **config)

    def draw(rows):
        sound = np.random.default_rng(0).normal(size=(rows, frames, mels))
        return texts(target=(T, V))(rows) | {"source": sound.astype(np.float32)}

    def call(source, target, target_mask=None, target_positions=None):
        given = dict(decoder_attention_mask=target_mask, decoder_position_ids=target_positions)
        return model(input_features=source.mT, decoder_input_ids=target, **given).logits

    def begin(source):
        return model.get_encoder()(source.mT), None

    def step(target, state):
        encoded, cache = state
        given = dict(past_key_values=cache, use_cache=True)
        out = model(encoder_outputs=encoded, decoder_input_ids=target, **given)
        return out.logits, (encoded, out.past_key_values)

    return Model(call, draw, begin, step, convert=torch.tensor)


def decoder(make: str, **config: Any) -> Model:
    """Makes the adapter of a language model."""
    import torch

    model = _lively(make, **config)

    def call(target, target_mask=None, target_segments=None, target_positions=None):
        if target_segments is not None and target_segments.max() > 1:
            target_mask = None  # where a text begins is then read from the positions
        given = dict(attention_mask=target_mask, position_ids=target_positions, use_cache=False)
        return model(input_ids=target, **given).logits

    def begin(padding=None):
        return padding, 0, None

    def step(target, state):
        padding, read, cache = state
        end, given = read + target.shape[1], {}
        if padding is not None:
            given["attention_mask"] = (torch.arange(end) >= padding[:, None]).int()
            given["position_ids"] = (torch.arange(read, end) - padding[:, None]).clamp(0)
        out = model(input_ids=target, past_key_values=cache, use_cache=True, **given)
        return out.logits, (padding, end, out.past_key_values)

    return Model(call, texts(target=(T, V)), begin, step, convert=torch.tensor)


def encoder(make: str, **config: Any) -> Model:
    """Makes the adapter of an encoder with an output for each token."""
    import torch

    model = _lively(make, **config)

    def call(target, target_mask=None, target_positions=None):
        return model(
            input_ids=target, attention_mask=target_mask, position_ids=target_positions
        ).logits

    return Model(call, texts(target=(T, V)), causal=False, convert=torch.tensor)


def _lively(make: str, **config: Any) -> Any:
    """Returns a small model whose random weights let every input be seen in the outputs."""
    import torch
    import transformers

    cls = getattr(transformers, make)
    model = cls(cls.config_class(vocab_size=V, **config)).eval().requires_grad_(False)
    fixed = {
        name for name, x in model.named_parameters() if "position" in name and "Marian" in make
    }
    generator = torch.Generator().manual_seed(0)
    for name, x in model.named_parameters():
        noise = torch.randn(x.shape, generator=generator)
        if x.ndim > 1:
            noise *= 2 / x.shape[-1] ** 0.5
        elif name.endswith("weight"):
            noise = 1 + 0.2 * noise  # of a norm
        else:
            noise *= 0.5
        if name not in fixed:
            x.copy_(noise)
    return model


_BART: dict[str, Any] = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1,
)  # fmt: skip
_LLAMA: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip

OTHERS: dict[str, Callable[[], Model]] = {
    "T5": lambda: encoder_decoder(
        "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    ),
    "BART": lambda: encoder_decoder(
        "BartForConditionalGeneration", max_position_embeddings=32, **_BART
    ),
    "Marian": lambda: encoder_decoder("MarianMTModel", max_position_embeddings=32, **_BART),
    "Whisper": lambda: listener(
        "WhisperForConditionalGeneration", 12, 8, max_target_positions=32, **_BART
    ),
    "GPT-2": lambda: decoder(
        "GPT2LMHeadModel",
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
    ),  # fmt: skip
    "Llama": lambda: decoder("LlamaForCausalLM", max_position_embeddings=32, **_LLAMA),
    "BERT": lambda: encoder(
        "BertForMaskedLM",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        pad_token_id=0,
    ),
}


def ours() -> dict[str, Callable[[], Model]]:
    """Returns makers of adapters of our models by name; of one that refines frames, before it does."""
    made = {}
    for name in architectures_of.known():
        found = architectures_of.find(name)
        method = "hidden" if hasattr(found.module, "refine") else "__call__"
        made[name] = partial(architectures.adapter, found, method)
    return made


def others() -> tuple[dict[str, Callable[[], Model]], list[str]]:
    """Returns makers of adapters of other libraries' models by name, and the missing packages."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        return {}, [str(error.name)]
    return OTHERS, []
