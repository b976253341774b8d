"""Text to image, written from outside: patches of a noisy picture read words, and flow to a picture.

    words [S] ─► embed ─► encoder ─► m [S D] ───────────────┐ keys, values
    picture x_t [H W C] ─► patches ─► z [P D] ─► blocks: itself, words, MLP ─► velocity [H W C]
    time t ─► frequencies ─► MLP ─► c [D] ────────┘ shifts, scales and gates each sublayer (adaLN-Zero)

    loss |v(x_t, t, words) - (noise - picture)|^2,   x_t = (1 - t) picture + t noise
    x <- x - v(x, t, words) / steps,   from noise at t = 1 to a picture at t = 0

Process and sampler are those of ``crossattn.decode.diffusion``. The package's own text to image, with
guidance, a task and data, is ``crossattn/models/pixart.py``.

Source: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers"; Lipman et al. 2023, "Flow
Matching for Generative Modeling"; the cross-attention to words, Chen et al. 2023, "PixArt-alpha".
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.decode import diffusion
from crossattn.nn import (
    Block,
    BlockConfig,
    Encoded,
    EncoderBlock,
    FeedForward,
    PatchEmbedding,
    Stack,
    TokenInput,
    linear,
)
from crossattn.ops import masks
from crossattn.ops.positions.sinusoids import sinusoidal


class Painter(nnx.Module):
    def __init__(self, vocab_size, dim, image_size, channels=1, *, patch=2, layers=2, rngs):
        plain = BlockConfig.of(dim, num_heads=4, mlp_dim=2 * dim)
        shape = replace(plain, condition_dim=dim)
        scheme = dict(positions="sinusoidal")
        self.source_input = TokenInput(vocab_size, dim, **scheme, rngs=rngs)
        self.encoder = Stack(lambda rngs: EncoderBlock(plain, rngs=rngs), 1, rngs=rngs)
        self.patches = PatchEmbedding(
            image_size, patch, channels, dim, class_token=False, rngs=rngs
        )
        self.time = FeedForward(dim, 2 * dim, "silu", rngs=rngs)

        def reads_words(rngs):
            return Block(
                attention=shape.self_attention(rngs),
                cross=shape.cross_attention(rngs, memory_dim=dim, reads="words"),
                feedforward=shape.feedforward(rngs),
            )

        self.stack = Stack(reads_words, layers, rngs=rngs)
        self.norm = plain.normalise(rngs)
        axes = dict(in_axes=("embed",), out_axes=(None, None, None))
        self.velocity = linear(dim, (patch, patch, channels), **axes, rngs=rngs)
        self.dim, self.image_shape = dim, (*image_size, channels)

    def encode(self, words):
        """Vectors of words [B S]; word 0 is padding."""
        mask = masks.key_padding(words > 0)
        return Encoded(self.encoder(self.source_input(words), mask=mask)[0], words > 0)

    def flow(self, x, time, encoded):
        """The velocity [B H W C] of pictures x [B H W C] at their time [B], 0 to 1, of noise."""
        thousandths = jnp.round(1000 * time).astype(jnp.int32)
        condition = self.time(sinusoidal(thousandths, self.dim))
        z, _ = self.stack(self.patches(x), memories={"words": encoded}, condition=condition)
        patches = self.velocity(self.norm(z))
        rows, columns = self.patches.grid(x.shape[1:3])
        patches = patches.reshape(len(x), rows, columns, *patches.shape[2:])
        return patches.swapaxes(2, 3).reshape(x.shape)

    def __call__(self, x, time, words):
        return self.flow(x, time, self.encode(words))

    def loss(self, pictures, words, key):
        """The mean squared error of velocities, at times and from noise that the key draws."""
        noise_key, time_key = jax.random.split(key)
        time = jax.random.uniform(time_key, (len(pictures),))
        noise = jax.random.normal(noise_key, pictures.shape)
        x, velocity = diffusion.noised(diffusion.Flow(), pictures, noise, time)
        return jnp.square(self(x, time, words) - velocity).mean()

    def sample(self, words, key, steps=20):
        """Pictures [B H W C] of words [B S], drawn by the key; the words are read once."""
        encoded = self.encode(words)
        noise = jax.random.normal(key, (len(words), *self.image_shape))
        flow = lambda x, time: self.flow(x, time, encoded)  # noqa: E731
        return diffusion.sample(flow, noise, sampler=diffusion.Euler(steps))
