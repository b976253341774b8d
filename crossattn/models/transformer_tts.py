"""Text to speech: frames of a spectrogram read letters by cross-attention.

    letters [S] ─► embed ─► convolutions ─► + a sinusoids ─► layers of self-attention ─► norm ─► m [S D] ─┐
    frame before [T M] ─► prenet ─► + b sinusoids ─► layers: masked self-attention, then ─────────────► read
        ─► norm ─┬─► linear ─► R frames [T RM] ─► + postnet ─► mel
                 └─► linear ─► stop

    prenet(x) = W3 drop(relu(W2 drop(relu(W1 x))))                half of the features, also in decoding
    postnet(x) = conv(drop(tanh(LN(conv(...)))))                  over all frames, when all are there
    y <- y + Attend(LN y, LN y, causal); y <- y + Attend(LN y, m); y <- y + MLP(LN y)

Every step gives R frames, a group, and reads the last frame of the group before; the first reads silence,
zeros. The factors a and b of the sinusoids are learnt. Dropout in the prenet keeps the decoder from
continuing its own frames without a look at the letters, so a key turns it on in decoding too. Layer norms
take the place of the paper's batch norms.

Source: Li et al. 2018, "Neural Speech Synthesis with Transformer Network"; groups, Wang et al. 2017,
"Tacotron"; prenet and postnet, Shen et al. 2018, "Natural TTS Synthesis by Conditioning WaveNet on Mel
Spectrogram Predictions".
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.nn.decoding import Autoregressive, DecoderStack
from crossattn.nn.encoded import Encoded
from crossattn.nn.examples import texts, vectors
from crossattn.nn.layers import Embedding, linear, norm
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import VectorOutput
from crossattn.nn.stack import encoder_stack, layer_weights
from crossattn.nn.states import CachedStates, check_rows
from crossattn.nn.sublayers import BlockConfig, split
from crossattn.ops import masks
from crossattn.ops.dropout import dropout
from crossattn.ops.positions.sinusoids import sinusoidal
from crossattn.types import Array, Count, Float, Int, Key, Rate

WIDTH = 5
"""Places that a convolution reads."""


@dataclass(frozen=True)
class TransformerTTSConfig:
    """The shape of a TransformerTTS.

    Attributes:
      vocab_size: letters, with padding and the end.
      block: shape of every block.
      encoder_layers, decoder_layers: depth of the encoder, and of the decoder.
      mels: bands of a frame, M.
      group: frames of a step, R.
      letter_convolutions: convolutions over letters.
      prenet_dim: size of the two layers that read a frame.
      prenet_dropout_rate: of their features, also in decoding.
      postnet_layers: convolutions over frames; 0 is no postnet.
      postnet_dim: size of those between the first and the last.
      postnet_dropout_rate: of their features.
      speaker_dim: size of the vector that tells who speaks; None is one speaker.
      scan: scan over layers instead of looping.
      remat: recompute activations in the backward pass; see ``Stack`` for policies by name.
    """

    vocab_size: int
    block: BlockConfig
    encoder_layers: Count
    decoder_layers: Count
    mels: Count = 80
    group: Count = 4
    letter_convolutions: int = 3
    prenet_dim: Count = 128
    prenet_dropout_rate: Rate = 0.5
    postnet_layers: int = 5
    postnet_dim: Count = 128
    postnet_dropout_rate: Rate = 0.1
    speaker_dim: Count | None = None
    scan: bool = False
    remat: bool | str = False


def tiny(**changes: Any) -> TransformerTTSConfig:
    """Returns a small configuration for tests."""
    block = BlockConfig.of(dim=32, num_heads=2, mlp_dim=64)
    sizes: dict[str, Any] = dict(mels=6, group=2, prenet_dim=16, postnet_layers=2, postnet_dim=16)
    small = TransformerTTSConfig(20, block, 1, 2, letter_convolutions=1, **sizes)
    return replace(small, **changes)


def example(config: TransformerTTSConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    source, source_segment_ids = texts(rows, 6, config.vocab_size, padding)
    _, target_segment_ids = texts(rows, 5, config.vocab_size, padding)
    return dict(
        source=source,
        target_in=vectors(rows, 5, config.group * config.mels, padding=padding),
        source_segment_ids=source_segment_ids,
        target_segment_ids=target_segment_ids,
    )


class Convolutions(nnx.Module):
    """Convolutions along a sequence; a norm, a nonlinearity and dropout follow each, or all but the last.

    Args:
      sizes: of the vectors before, between and after them.
      activation: the nonlinearity.
      open_end: the last has none, nor a norm.
      dropout_rate: of the features.
      dtype: computation dtype.
    """

    def __init__(
        self,
        sizes: list[int],
        activation: Any,
        *,
        open_end: bool,
        dropout_rate: float,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        axes: dict[str, Any] = dict(
            kernel_metadata={"axes": (None, None, "embed")}, bias_metadata={"axes": ("embed",)}
        )
        options: dict[str, Any] = dict(kernel_size=(WIDTH,), padding="SAME", dtype=dtype, **axes)
        pairs = list(zip(sizes[:-1], sizes[1:], strict=True))
        self.layers = nnx.List([nnx.Conv(*pair, **options, rngs=rngs) for pair in pairs])
        followed = sizes[1:-1] if open_end else sizes[1:]
        norms = [norm("layer", size, epsilon=1e-6, dtype=dtype, rngs=rngs) for size in followed]
        self.norms = nnx.List(norms)
        self.activation = activation
        self.dropout_rate = dropout_rate

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        valid: Any = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B T E"]:
        """Computes [*B T D] -> [*B T E]; padding, where ``valid`` [*B T] is False, reaches no other place."""
        keys = split(key, len(self.layers))
        for number, layer in enumerate(self.layers):
            x = layer(x if valid is None else jnp.where(valid[..., None], x, 0))
            if number < len(self.norms):
                x = self.activation(self.norms[number](x))
                x = dropout(x, self.dropout_rate, keys[number])
        return x


class Prenet(nnx.Module):
    """Two layers with much dropout between a frame and the decoder; the config is of a model of frames."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        dim, dtype = config.block.dim, config.block.dtype
        options: dict[str, Any] = dict(out_axes=("mlp",), dtype=dtype, rngs=rngs)
        self.first = linear(config.mels, config.prenet_dim, in_axes=("embed",), **options)
        self.second = linear(config.prenet_dim, config.prenet_dim, in_axes=("embed",), **options)
        self.out = linear(
            config.prenet_dim, dim, in_axes=("mlp",), out_axes=("embed",), dtype=dtype, rngs=rngs
        )
        self.rate = config.prenet_dropout_rate

    def __call__(
        self, frames: Float[Array, "*B T M"], key: Key[Array, ""] | None = None
    ) -> Float[Array, "*B T D"]:
        """Computes [*B T M] -> [*B T D]; a key turns dropout on."""
        keys = split(key, 2)
        x = dropout(jax.nn.relu(self.first(frames)), self.rate, keys[0])
        x = dropout(jax.nn.relu(self.second(x)), self.rate, keys[1])
        return self.out(x)


def speaker_layer(size: int | None, dim: int, dtype: Any, rngs: nnx.Rngs) -> Any:
    """Makes the layer that joins a vector of size ``size``, who speaks, to those of frames; None without."""
    if size is None:
        return None
    axes: dict[str, Any] = dict(in_axes=("embed",), out_axes=("mlp",))
    return linear(dim + size, dim, **axes, dtype=dtype, rngs=rngs)


class TransformerTTS(Autoregressive):
    """Letters [*B S] and groups of frames [*B T R*M] in, the next groups and the logits of a stop out."""

    def __init__(self, config: TransformerTTSConfig, *, rngs: nnx.Rngs):
        block, self.group, self.mels = config.block, config.group, config.mels
        dim, dtype = block.dim, block.dtype
        layers: dict[str, Any] = dict(scan=config.scan, remat=config.remat, rngs=rngs)
        self.letters = Embedding(config.vocab_size, dim, dtype=dtype, rngs=rngs)
        self.letter_convolutions = Convolutions(
            [dim] * (config.letter_convolutions + 1),
            jax.nn.relu,
            open_end=False,
            dropout_rate=block.dropout_rate,
            dtype=dtype,
            rngs=rngs,
        )
        self.encoder = encoder_stack(block, config.encoder_layers, **layers)
        self.encoder_norm = block.normalise(rngs) if block.norm_first else None
        self.prenet = Prenet(config, rngs=rngs)
        self.letter_position_scale = nnx.Param(jnp.ones(()), axes=())
        self.frame_position_scale = nnx.Param(jnp.ones(()), axes=())
        self.decoder = DecoderStack(
            block, config.decoder_layers, memory_dim=dim, positions="none", **layers
        )
        self.output = VectorOutput(dim, config.group * config.mels, dtype=dtype, rngs=rngs)
        sizes = [config.mels, *[config.postnet_dim] * (config.postnet_layers - 1), config.mels]
        self.postnet = (
            Convolutions(
                sizes,
                jnp.tanh,
                open_end=True,
                dropout_rate=config.postnet_dropout_rate,
                dtype=dtype,
                rngs=rngs,
            )
            if config.postnet_layers
            else None
        )
        self.speaker = speaker_layer(config.speaker_dim, dim, dtype, rngs)
        self.dropout_rate = block.dropout_rate

    @property
    def longest(self) -> tuple[int | None, int | None]:
        """The largest numbers of letters and steps; None is unlimited."""
        return None, None

    @on_any_mesh
    def encode(
        self,
        source: Int[Array, "*B S"],
        segment_ids: Int[Array, "*B S"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Encoded:
        """Encodes letters to vectors [*B S D]; ``segment_ids`` 0 is padding."""
        valid = None if segment_ids is None else segment_ids > 0
        keys = split(key, 3)
        x = self.letter_convolutions(self.letters(source), valid, keys[0])
        x = self._placed(x, jnp.arange(x.shape[-2]), self.letter_position_scale)
        mask = None if segment_ids is None else masks.segments(segment_ids)
        x, _ = self.encoder(dropout(x, self.dropout_rate, keys[1]), key=keys[2], mask=mask)
        return Encoded(x if self.encoder_norm is None else self.encoder_norm(x), valid)

    @on_any_mesh
    def hidden(
        self,
        source: Int[Array, "*B S"],
        target_in: Float[Array, "*B T G"],
        *,
        source_segment_ids: Int[Array, "*B S"] | None = None,
        target_segment_ids: Int[Array, "*B T"] | None = None,
        speaker: Float[Array, "*B E"] | None = None,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "L *B N T S"] | None]:
        """Computes the decoder's last vectors, and all cross-attention weights, or None.

        Args:
          source: letters.
          target_in: groups, G = R*M, each the one before that which is predicted; the first is silence.
          source_segment_ids, target_segment_ids: 0 for padding, 1 elsewhere.
          speaker: vectors of who speaks, for a model with a ``speaker_dim``.
          key: turns dropout on, the prenet's too.
          return_weights: return the weights [L *B N T S] of every layer's cross-attention, before dropout.
        """
        keys = split(key, 4)
        encoded = self.encode(source, source_segment_ids, keys[0])
        both = source_segment_ids is not None and target_segment_ids is not None
        if both:  # The segments of both mask padding too.
            encoded = replace(encoded, valid=None)
        states = self.decoder.read(source=encoded)
        x = self.prenet(target_in[..., -self.mels :], keys[1])
        x = self._spoken(x, jnp.arange(x.shape[-2]), speaker)
        x, states = self.decoder(
            dropout(x, self.dropout_rate, keys[2]),
            states,
            keys[3],
            segment_ids=target_segment_ids,
            source_segment_ids=source_segment_ids if both else None,
            capture=self.decoder.reading() if return_weights else (),
        )
        return x, layer_weights(states)

    @on_any_mesh
    def logits(self, hidden: Float[Array, "*B T D"]) -> Any:
        """Computes the next groups [*B T G], and the logit [*B T] that each is the last; both float32."""
        return self.output(hidden)

    @on_any_mesh
    def refine(
        self,
        groups: Float[Array, "*B T G"],
        segment_ids: Int[Array, "*B T"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B T G"]:
        """Adds the postnet of all frames; groups of padding, with segment 0, reach no others."""
        if self.postnet is None:
            return groups
        *lead, T, _ = groups.shape
        frames = groups.reshape(*lead, T * self.group, self.mels)
        valid = None if segment_ids is None else jnp.repeat(segment_ids > 0, self.group, axis=-1)
        added = self.postnet(frames, valid, key).astype(groups.dtype)
        return groups + added.reshape(groups.shape)

    def __call__(
        self,
        source: Any,
        target_in: Any,
        *,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
        **given: Any,
    ) -> Any:
        """Computes refined groups [*B T G] and logits of a stop [*B T]; the arguments of ``hidden``.

        With ``return_weights``, a pair of these two and the weights.
        """
        keys = split(key, 2)
        hidden, weights = self.hidden(
            source, target_in, key=keys[0], return_weights=return_weights, **given
        )
        groups, stop = self.logits(hidden)
        said = self.refine(groups, given.get("target_segment_ids"), keys[1]), stop
        return (said, weights) if return_weights else said

    def first(self, batch: int) -> Float[Array, "B 1 1 G"]:
        """Returns the group of silence that the first step of decoding reads."""
        return jnp.zeros((batch, 1, 1, self.group * self.mels))

    @on_any_mesh
    def prefill(
        self,
        batch: int,
        num_beams: int,
        cache_length: int,
        *,
        source: Int[Array, "B S"],
        source_segment_ids: Int[Array, "B S"] | None = None,
        speaker: Float[Array, "B E"] | None = None,
        key: Key[Array, "*#B"] | None = None,
    ) -> CachedStates:
        """Makes decoding states that have read the letters; see ``Autoregressive``.

        Args:
          source, source_segment_ids: letters; padding has segment 0.
          speaker: as in ``hidden``.
          key: turns the prenet's dropout on: one key, or one for each row [B], whose draws do not depend on
            the batch.

        Raises:
          ValueError: the letters do not have ``batch`` rows.
        """
        encoded = self.encode(source, source_segment_ids)
        check_rows("source", encoded.vectors, batch)
        if key is not None and key.ndim == 0:
            key = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(batch))
        states, context = self.decoder.read(source=encoded), {"key": key, "speaker": speaker}
        return self.decoder.prefill(states, batch, num_beams, cache_length, context=context)

    def embed(self, tokens: Any, positions: Any, context: Any = None) -> Any:
        """Computes vectors of groups [B J T G]; ``context`` has "key" and "speaker" of each row, or None."""
        frames, key, speaker = tokens[..., -self.mels :], context["key"], context["speaker"]
        if key is None:
            x = self.prenet(frames)
        else:
            begun = jnp.broadcast_to(positions, (len(frames), 1, frames.shape[2]))[:, 0, 0]
            x = jax.vmap(self.prenet)(frames, jax.vmap(jax.random.fold_in)(key, begun))
        return self._spoken(x, positions, None if speaker is None else speaker[:, None])

    def _spoken(self, x: Array, positions: Array, speaker: Array | None) -> Array:
        """Adds positions to what the prenet has read, and joins who speaks, [*B E]."""
        x = self._placed(x, positions, self.frame_position_scale)
        if self.speaker is None and speaker is not None:
            raise ValueError("speaker is given, but this model has one speaker; leave it out.")
        if self.speaker is None:
            return x
        if speaker is None:
            raise ValueError("speaker is missing; expected a vector of who speaks, [*B E].")
        size = jnp.linalg.norm(speaker, axis=-1, keepdims=True)
        unit = (speaker / jnp.maximum(size, 1e-12)).astype(x.dtype)[..., None, :]
        unit = jnp.broadcast_to(unit, (*x.shape[:-1], unit.shape[-1]))
        return jax.nn.relu(self.speaker(jnp.concatenate([x, unit], axis=-1)))

    def _placed(self, x: Array, positions: Array, scale: Any) -> Array:
        return x + scale[...].astype(x.dtype) * sinusoidal(positions, x.shape[-1]).astype(x.dtype)
