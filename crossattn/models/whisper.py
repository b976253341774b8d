"""Whisper: a Transformer that reads sound, as frames of a log-mel spectrogram.

    log-mel [2S M] ─► GELU(conv) ─► GELU(conv, stride 2) ─► + sinusoids ─► layers of self-attention ─► m
    language, task, tokens [T] ─► embed, + positions ─► layers: masked self-attention, then read m ─► logits

    x <- x + Attend(LN x, LN x); x <- x + MLP(LN x)                                          encoder
    y <- y + Attend(LN y, LN y, causal); y <- y + Attend(LN y, m); y <- y + MLP(LN y)        decoder

Norms stand first, and there is one after the last layer of both stacks. Only the source input differs from
``Transformer``: two convolutions, the second of which halves the number of frames.

Source: Radford et al. 2022, "Robust Speech Recognition via Large-Scale Weak Supervision".
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.functional import Constant
from crossattn.models.transformer import Transformer, TransformerConfig
from crossattn.nn.examples import texts, vectors
from crossattn.nn.inputs import InputConfig
from crossattn.nn.positions import LearnedPositions
from crossattn.nn.sublayers import BlockConfig
from crossattn.ops.dropout import dropout
from crossattn.types import Array, Float, Int, Key

# The convolutions use it with any activation of the blocks.
_gelu = functools.partial(jax.nn.gelu, approximate=False)

STRIDE = 2
"""Frames per vector of the encoder."""


@dataclass(frozen=True)
class WhisperConfig:
    """The shape of a Whisper.

    Attributes:
      transformer: of the encoder and the decoder; its ``max_length`` is that of texts.
      mels: bands of the spectrogram, M.
      max_frames: the longest source; the released models read 3000 frames, 30 seconds.
    """

    transformer: TransformerConfig
    mels: int = 80
    max_frames: int = 3000


def tiny(**changes: Any) -> WhisperConfig:
    """Returns a small configuration for tests."""
    block = BlockConfig.of(
        dim=32, num_heads=2, mlp_dim=64, activation="gelu_exact", norm_epsilon=1e-5, key_bias=False
    )
    text = TransformerConfig(
        vocab_size=64,
        block=block,
        encoder_layers=2,
        decoder_layers=2,
        positions="learned",
        max_length=32,
        input=InputConfig(scale=1.0),
    )
    return replace(WhisperConfig(text, mels=8, max_frames=40), **changes)


def example(config: WhisperConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    target_in, target_segment_ids = texts(rows, 5, config.transformer.vocab_size, padding)
    frames = vectors(rows, min(12, config.max_frames), config.mels)
    return dict(source=frames, target_in=target_in, target_segment_ids=target_segment_ids)


class FrameInput(nnx.Module):
    """The source input: two convolutions with their nonlinearity, and positions."""

    def __init__(self, config: WhisperConfig, *, rngs: nnx.Rngs):
        block = config.transformer.encoder_block or config.transformer.block
        self.first = _convolution(config.mels, block.dim, block.dtype, rngs)
        self.second = _convolution(block.dim, block.dim, block.dtype, rngs, strides=STRIDE)
        self.positions = LearnedPositions(config.max_frames // STRIDE, block.dim, rngs=rngs)
        # The checkpoints hold the sinusoids as weights, but nobody trains them.
        table = _sinusoids(config.max_frames // STRIDE, block.dim)
        self.positions.table = Constant(table, axes=("constant", "embed"))
        self.max_frames = config.max_frames
        self.dropout_rate = block.dropout_rate

    @property
    def longest(self) -> int:
        """The largest number of frames."""
        return self.max_frames

    def __call__(
        self,
        frames: Float[Array, "*B F M"],
        positions: Int[Array, "*#B S"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B S D"]:
        """Computes a vector for every two frames.

        Raises:
          ValueError: the source has more frames than ``max_frames``.
        """
        if frames.shape[-2] > self.max_frames:
            raise ValueError(
                f"source has {frames.shape[-2]} frames; this model reads at most {self.max_frames}: "
                "cut the sound into pieces."
            )
        x = _gelu(self.first(frames))
        x = _gelu(self.second(x))
        positions = jnp.arange(x.shape[-2]) if positions is None else positions
        x = x + jax.lax.stop_gradient(self.positions(positions)).astype(x.dtype)
        return dropout(x, self.dropout_rate, key)


class Whisper(Transformer):
    """Frames [*B F M] and target tokens in, logits of the next target token out.

    ``source`` is the frames; ``source_segment_ids`` are those of the encoder's vectors [*B F/2].
    """

    def __init__(self, config: WhisperConfig, *, rngs: nnx.Rngs):
        frames = FrameInput(config, rngs=rngs)
        super().__init__(config.transformer, source_input=frames, rngs=rngs)


def _convolution(
    inputs: int, outputs: int, dtype: Any, rngs: nnx.Rngs, strides: int = 1
) -> nnx.Conv:
    return nnx.Conv(
        inputs,
        outputs,
        kernel_size=(3,),
        strides=strides,
        padding=1,
        dtype=dtype,
        kernel_metadata={"axes": (None, None, "embed")},
        bias_metadata={"axes": ("embed",)},
        rngs=rngs,
    )


def _sinusoids(length: int, dim: int) -> Float[Array, "S D"]:
    """Computes sinusoids whose last feature has the longest wavelength, unlike ``sinusoidal``."""
    half = dim // 2
    frequencies = 10000.0 ** (-jnp.arange(half) / max(half - 1, 1))
    angles = jnp.arange(length)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
