"""Joins two encoder-only BERTs to an encoder-decoder that begins with their weights.

    encoder: every parameter of the first
    decoder: embeddings, self-attention, feed-forward layers (and the head of masked tokens, if it has one)
             of the second; cross-attention begins afresh

Source: Rothe et al. 2020, "Leveraging Pre-trained Checkpoints for Sequence Generation Tasks", section 2.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn import functional
from crossattn.models.bert import Bert
from crossattn.types import Array, Key, Params
from crossattn.weights.formats.safetensors import WEIGHTS, CheckpointError
from crossattn.weights.formats.tensors import Layout, Tensors
from crossattn.weights.pretrained import Pretrained, describe, load

_HEADS = re.compile(r"(output|next_sentence)\b")
_UNREAD = re.compile(r"(pooler|next_sentence)\b")


def warm_start(
    encoder: str | Path,
    decoder: str | Path | None = None,
    *,
    key: Key[Array, ""],
    dtype: Any = None,
) -> tuple[Pretrained, Params, Any]:
    """Returns an ``EncoderDecoder`` of two BERTs: (model, params, tokenizer), as ``load`` does.

    It is what ``EncoderDecoderModel.from_encoder_decoder_pretrained`` of ``transformers`` makes, and ``save``
    writes it as such. The encoder has no heads, the pooler stays where its checkpoint has one. The texts of
    the decoder begin and end with the tokens that the tokenizer puts around a text.

    Args:
      encoder: the checkpoint that reads, a folder or a name on the hub.
      decoder: the one that writes; None is the encoder's.
      key: of the parameters that neither has: cross-attention, a linear layer between halves of unlike
        sizes, and the transform and bias before the output table where ``decoder`` was saved without them.
      dtype: computation dtype, None for float32.

    Raises:
      CheckpointError: one of them is no encoder-only BERT, or they have not the same tokens.
    """
    reads, given, tokenizer = _loaded(encoder, "encoder", dtype)
    writes, taken, other = reads, given, tokenizer
    if decoder is not None:
        writes, taken, other = _loaded(decoder, "decoder", dtype)
    if tokenizer.get_vocab() != other.get_vocab():
        raise CheckpointError(
            f"the tokenizers of {encoder} and {decoder} have not the same tokens; expected two checkpoints of"
            " one tokenizer, which reads the source and writes the target."
        )
    settings = _settings(reads, writes, tokenizer, str(encoder))
    model = describe(settings, dtype)
    if reads.config.pooler != model.config.encoder.pooler:
        part = replace(model.config.encoder, pooler=reads.config.pooler)
        model = replace(model, config=replace(model.config, encoder=part))
    fresh = functional.flatten(functional.init(model, key))
    own = _encoder(functional.flatten(given)) | _decoder(functional.flatten(taken))
    _refuse_lost(own, fresh, str(decoder or encoder))
    params = functional.nest({name: own.get(name, x) for name, x in fresh.items()})
    return replace(model, layout=_layout(model, params, tokenizer)), params, tokenizer


def _loaded(source: str | Path, half: str, dtype: Any) -> tuple[Pretrained, Params, Any]:
    """Loads an encoder-only BERT with a tokenizer; ``half`` is its place in messages."""
    model, params, tokenizer = load(source, dtype=dtype)
    kind = model.settings["model_type"]
    if model.module is not Bert:
        causal = " with causal attention" if kind == "bert" else ""
        raise CheckpointError(
            f"{source} holds a {kind}{causal}, which cannot be the {half} of a pair; expected an encoder-only"
            " bert."
        )
    if tokenizer is None:
        raise CheckpointError(
            f"{source} has no tokenizer; expected tokenizer.json or vocab.txt beside config.json."
        )
    return model, params, tokenizer


def _settings(reads: Pretrained, writes: Pretrained, tokenizer: Any, source: str) -> dict[str, Any]:
    """Returns ``config.json`` of the pair."""
    encoding = tokenizer.encode("a")
    real = [i for i, used in enumerate(encoding.attention_mask) if used]
    first, last = real[0], real[-1]
    if not (encoding.special_tokens_mask[first] and encoding.special_tokens_mask[last]):
        raise CheckpointError(
            f"the tokenizer of {source} puts no tokens around a text, by which a decoder begins and ends;"
            " expected those of BERT, [CLS] and [SEP]."
        )
    halves = [{**json.loads(half.text), "add_cross_attention": False} for half in (reads, writes)]
    for half in halves:
        half.pop("architectures", None)
    halves[1] |= dict(is_decoder=True, add_cross_attention=True)
    return dict(
        model_type="encoder-decoder",
        architectures=["EncoderDecoderModel"],
        is_encoder_decoder=True,
        encoder=halves[0],
        decoder=halves[1],
        decoder_start_token_id=encoding.ids[first],
        eos_token_id=encoding.ids[last],
        pad_token_id=reads.settings.get("pad_token_id", 0),
    )


def _encoder(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a BERT by their names in the encoder of the pair."""
    return {f"encoder.{name}": x for name, x in flat.items() if not _HEADS.match(name)}


def _decoder(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns copies of the parameters of a BERT by their names in the decoder of the pair.

    They are copies, so that a training step may donate those of both halves.
    """
    names = {name: re.sub(r"^encoder\.", "decoder.stack.", name) for name in flat}
    return {
        f"decoder.{names[name]}": jnp.array(x, copy=True)
        for name, x in flat.items()
        if not _UNREAD.match(name)
    }


def _refuse_lost(own: Mapping[str, Any], fresh: Mapping[str, jax.Array], source: str) -> None:
    """Refuses parameters that the pair has not, or in another shape: no weight is lost in silence."""
    wrong = [n for n, x in own.items() if n not in fresh or fresh[n].shape != np.shape(x)]
    if wrong:
        raise CheckpointError(
            f"{source} has {', '.join(sorted(wrong)[:5])}, which a decoder of its config.json has not."
        )


def _layout(model: Pretrained, params: Params, tokenizer: Any) -> Layout:
    """Returns the files of a fresh checkpoint with a tokenizer."""
    names = {name: name for name in [*Tensors.of(model, params), *model.rules.beside]}
    return Layout({WEIGHTS: names}, beside={"tokenizer.json": tokenizer.to_str().encode()})
