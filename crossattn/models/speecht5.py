"""SpeechT5, text to speech: a ``TransformerTTS`` with post-norm layers, relative keys and a speaker's vector.

    letters [S] ─► embed, + a sinusoids ─► LN ─► layers of self-attention with relative keys ─► m [S D] ──┐
    frame before [T M] ─► prenet, + b sinusoids ─► relu(W [.; speaker]) ─► layers: masked, then read m ◄──┘
        ─┬─► linear ─► R frames [T RM] ─► + postnet ─► mel
         └─► linear ─► a stop for each of the R frames

    logits of the encoder: (q_i . k_j + q_i . r_{i-j}) / sqrt(H), one table r for all heads and layers
    x <- LN(x + Attend(x, x));          x <- LN(x + MLP(x))                                  encoder
    y <- LN(y + Attend(y, y, causal));  y <- LN(y + Attend(y, m));  y <- LN(y + MLP(y))      decoder

The postnet's batch norms use the statistics of the checkpoint, which are not trained.

Source: Ao et al. 2021, "SpeechT5: Unified-Modal Encoder-Decoder Pre-Training for Spoken Language
Processing"; relative keys, Shaw et al. 2018, "Self-Attention with Relative Position Representations".
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.functional import Constant
from crossattn.models import transformer_tts
from crossattn.models.transformer_tts import Prenet, TransformerTTS, speaker_layer
from crossattn.nn.attention import MultiHeadAttention
from crossattn.nn.decoding import DecoderStack
from crossattn.nn.encoded import Encoded
from crossattn.nn.examples import vectors
from crossattn.nn.feedforward import FeedForward
from crossattn.nn.layers import Embedding, linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.sublayers import BlockConfig, split
from crossattn.ops import masks
from crossattn.ops.dropout import dropout
from crossattn.ops.positions.sinusoids import sinusoidal
from crossattn.types import Array, Count, Float, Int, Key, Rate

_EPSILON = 1e-5  # of the batch norms


@dataclass(frozen=True)
class SpeechT5Config:
    """The shape of a SpeechT5 that speaks.

    Attributes:
      vocab_size: letters, with padding and the end.
      block: shape of the decoder's blocks.
      encoder_block: shape of the encoder's.
      encoder_layers, decoder_layers: depth of the encoder, and of the decoder.
      mels: bands of a frame, M.
      group: frames of a step, R.
      prenet_dim: size of the two layers that read a frame.
      prenet_dropout_rate: of their features, also in decoding.
      postnet_layers: convolutions over frames.
      postnet_dim: size of those between the first and the last.
      postnet_width: places that one reads.
      postnet_dropout_rate: of their features.
      speaker_dim: size of a speaker's vector.
      farthest: the largest relative distance that has a key of its own.
    """

    vocab_size: int
    block: BlockConfig
    encoder_block: BlockConfig
    encoder_layers: Count
    decoder_layers: Count
    mels: Count = 80
    group: Count = 2
    prenet_dim: Count = 256
    prenet_dropout_rate: Rate = 0.5
    postnet_layers: Count = 5
    postnet_dim: Count = 256
    postnet_width: Count = 5
    postnet_dropout_rate: Rate = 0.5
    speaker_dim: Count = 512
    farthest: Count = 160


def tiny(**changes: Any) -> SpeechT5Config:
    """Returns a small configuration for tests."""
    block = BlockConfig.of(dim=32, num_heads=2, mlp_dim=64, norm_first=False)
    sizes: dict[str, Any] = dict(mels=6, prenet_dim=16, postnet_layers=2, postnet_dim=16)
    small = SpeechT5Config(20, block, block, 2, 2, speaker_dim=8, farthest=3, **sizes)
    return replace(small, **changes)


def example(config: SpeechT5Config, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    shape: Any = transformer_tts.tiny(
        vocab_size=config.vocab_size, mels=config.mels, group=config.group
    )
    given = transformer_tts.example(shape, rows, padding)
    return given | dict(speaker=vectors(rows, config.speaker_dim))


class EncoderLayer(nnx.Module):
    """Self-attention whose keys have a part by relative distance, and a feed-forward network, post-norm."""

    def __init__(self, block: BlockConfig, *, rngs: nnx.Rngs):
        attention, mlp = vars(block.attention), block.mlp
        self.attention = MultiHeadAttention(block.dim, **attention, dtype=block.dtype, rngs=rngs)
        self.attention_norm = block.normalise(rngs)
        self.feedforward = FeedForward(
            block.dim,
            mlp.hidden or 4 * block.dim,
            mlp.activation,
            dropout_rate=mlp.dropout_rate,
            dtype=block.dtype,
            rngs=rngs,
        )
        self.feedforward_norm = block.normalise(rngs)
        self.rate = block.dropout_rate

    def __call__(
        self, x: Float[Array, "*B S D"], relative: Float[Array, "S S H"], mask: Any, key: Any
    ) -> Float[Array, "*B S D"]:
        """Computes [*B S D] -> [*B S D]; ``relative`` has the key of each query and place."""
        keys, query = split(key, 4), self.attention.query(x)
        scale = query.shape[-1] ** -0.5
        logits = dict[str, Any](preferred_element_type=jnp.promote_types(query.dtype, jnp.float32))
        bias = scale * jnp.einsum(
            "...tnh,tsh->...nts", query, relative.astype(query.dtype), **logits
        )
        read = self.attention(x, mask=mask, bias=bias, dropout_key=keys[0])
        x = self.attention_norm(x + dropout(read, self.rate, keys[1]))
        more = self.feedforward(x, keys[2])
        return self.feedforward_norm(x + dropout(more, self.rate, keys[3]))


class KnownNorm(nnx.Module):
    """A batch norm by the mean and the variance of a checkpoint, as in evaluation; they are not trained."""

    def __init__(self, size: int):
        self.scale = nnx.Param(jnp.ones(size), axes=("embed",))
        self.bias = nnx.Param(jnp.zeros(size), axes=("embed",))
        self.running_mean = Constant(jnp.zeros(size), axes=("constant",))
        self.running_var = Constant(jnp.ones(size), axes=("constant",))

    def __call__(self, x: Float[Array, "*B T M"]) -> Float[Array, "*B T M"]:
        """Computes [*B T M] -> [*B T M]."""
        mean, var = (jax.lax.stop_gradient(y[...]) for y in (self.running_mean, self.running_var))
        normed = (x - mean) * jax.lax.rsqrt(var + _EPSILON)
        return (normed * self.scale[...] + self.bias[...]).astype(x.dtype)


class NormedConvolution(nnx.Module):
    """A convolution without bias, and its norm."""

    def __init__(self, inputs: int, outputs: int, width: int, *, dtype: Any, rngs: nnx.Rngs):
        self.conv = nnx.Conv(
            inputs,
            outputs,
            kernel_size=(width,),
            padding="SAME",
            use_bias=False,
            dtype=dtype,
            kernel_metadata={"axes": (None, None, "embed")},
            rngs=rngs,
        )
        self.norm = KnownNorm(outputs)

    def __call__(self, x: Float[Array, "*B T I"]) -> Float[Array, "*B T O"]:
        """Computes [*B T I] -> [*B T O]."""
        return self.norm(self.conv(x))


class Postnet(nnx.Module):
    """Convolutions over frames, with tanh between them."""

    def __init__(self, config: SpeechT5Config, *, rngs: nnx.Rngs):
        between = [config.postnet_dim] * (config.postnet_layers - 1)
        sizes = [config.mels, *between, config.mels]
        options: dict[str, Any] = dict(dtype=config.block.dtype, rngs=rngs)
        self.layers = nnx.List(
            [
                NormedConvolution(before, after, config.postnet_width, **options)
                for before, after in zip(sizes[:-1], sizes[1:], strict=True)
            ]
        )
        self.rate = config.postnet_dropout_rate

    def __call__(
        self, x: Float[Array, "*B T M"], valid: Any = None, key: Any = None
    ) -> Float[Array, "*B T M"]:
        """Computes [*B T M] -> [*B T M]; padding, where ``valid`` [*B T] is False, reaches no other place."""
        keys, last = split(key, len(self.layers)), len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            x = layer(x if valid is None else jnp.where(valid[..., None], x, 0))
            x = dropout(x if number == last else jnp.tanh(x), self.rate, keys[number])
        return x


class SpeechT5(TransformerTTS):
    """Letters [*B S], groups of frames [*B T R*M] and speakers [*B E] in, the next groups and stops out."""

    def __init__(
        self, config: SpeechT5Config, *, rngs: nnx.Rngs
    ):  # none of its parts but the prenet
        block, own = config.block, config.encoder_block
        dim, dtype, self.group, self.mels = block.dim, block.dtype, config.group, config.mels
        self.letters = Embedding(config.vocab_size, dim, scale=1.0, dtype=dtype, rngs=rngs)
        self.encoder_norm = own.normalise(rngs)
        layers = [EncoderLayer(own, rngs=rngs) for _ in range(config.encoder_layers)]
        self.encoder = nnx.List(layers)
        draw, size = nnx.initializers.normal(0.02), dim // own.attention.num_heads
        self.relative_keys = nnx.Param(
            draw(rngs.params(), (2 * config.farthest, size)), axes=(None, "head_dim")
        )
        self.prenet = Prenet(config, rngs=rngs)
        self.letter_position_scale = nnx.Param(jnp.ones(()), axes=())
        self.frame_position_scale = nnx.Param(jnp.ones(()), axes=())
        self.speaker = speaker_layer(config.speaker_dim, dim, dtype, rngs)
        self.decoder = DecoderStack(
            block, config.decoder_layers, memory_dim=dim, positions="none", rngs=rngs
        )
        axes: dict[str, Any] = dict(in_axes=("embed",), dtype=dtype, rngs=rngs)
        self.frames = linear(dim, config.group * config.mels, out_axes=("mlp",), **axes)
        self.stop = linear(dim, config.group, out_axes=("classes",), **axes)
        self.postnet = Postnet(config, rngs=rngs)
        self.dropout_rate = block.dropout_rate

    @on_any_mesh
    def encode(
        self,
        source: Int[Array, "*B S"],
        segment_ids: Int[Array, "*B S"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Encoded:
        """Encodes letters to vectors [*B S D]; ``segment_ids`` 0 is padding."""
        keys = split(key, 1 + len(self.encoder))
        places = jnp.arange(source.shape[-1])
        x = self._placed(self.letters(source), places, self.letter_position_scale)
        x = dropout(self.encoder_norm(x), self.dropout_rate, keys[0])
        half = self.relative_keys.shape[0] // 2
        distance = jnp.clip(places[:, None] - places, -half, half - 1)
        relative = self.relative_keys[...][distance + half]
        mask = None if segment_ids is None else masks.segments(segment_ids)
        for layer, own in zip(self.encoder, keys[1:], strict=True):
            x = layer(x, relative, mask, own)
        return Encoded(x, None if segment_ids is None else segment_ids > 0)

    @on_any_mesh
    def stops(self, hidden: Float[Array, "*B T D"]) -> Float[Array, "*B T R"]:
        """Computes the logit, float32, that each frame of a group is the last one."""
        return self.stop(hidden).astype(jnp.float32)

    @on_any_mesh
    def logits(self, hidden: Float[Array, "*B T D"]) -> Any:
        """Computes the next groups [*B T G], and the logit [*B T] that a group has the last frame.

        Its probability is the sum of those of its frames, as in ``transformers``, just below 1 at most.
        """
        likely = jnp.minimum(jax.nn.sigmoid(self.stops(hidden)).sum(-1), 1.0 - 1e-6)
        stop = jnp.log(likely) - jnp.log1p(-likely)
        return self.frames(hidden).astype(jnp.float32), stop

    def _placed(self, x: Array, positions: Array, scale: Any) -> Array:
        """Adds sinusoids whose sines and cosines alternate."""
        halves = sinusoidal(positions, x.shape[-1]).reshape(*positions.shape, 2, -1)
        table = jnp.swapaxes(halves, -1, -2).reshape(*positions.shape, x.shape[-1])
        return x + scale[...].astype(x.dtype) * table.astype(x.dtype)
