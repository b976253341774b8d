"""Text to image, written from outside: patches of a noisy picture read words, and flow to a picture.

    words [S] ─► embed ─► encoder ─► m [S D] ───────────────┐ keys, values
    picture x_t [H W C] ─► patches ─► z [P D] ─► blocks: itself, words, MLP ─► velocity [H W C]
    time t ─► frequencies ─► MLP ─► c [D] ────────┘ shifts, scales and gates each sublayer (adaLN-Zero)

    x_t = (1 - t) noise + t picture;   loss |v(x_t, t, words) - (picture - noise)|^2
    x <- x + v(x, t, words) / steps,   from noise at t = 0 to a picture at t = 1

Source: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers"; Liu et al. 2023, "Flow Straight
and Fast: Learning to Generate and Transfer Data with Rectified Flow"; the cross-attention to words,
Chen et al. 2024, "PixArt-alpha".
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

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
        scheme = dict(positions="sinusoidal", max_length=16)
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
        """The velocity [B H W C] of pictures x [B H W C] at their time [B], 0 to 1."""
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
        noise = jax.random.normal(noise_key, pictures.shape)
        time = jax.random.uniform(time_key, (len(pictures),))
        t = time[:, None, None, None]
        found = self((1 - t) * noise + t * pictures, time, words)
        return jnp.square(found - (pictures - noise)).mean()

    def sample(self, words, key, steps=20):
        """Pictures [B H W C] of words [B S], drawn by the key; the words are read once."""
        encoded = self.encode(words)
        return euler(
            lambda x, time: self.flow(x, time, encoded),
            jax.random.normal(key, (len(words), *self.image_shape)),
            steps,
        )


def euler(velocity, x, steps):
    """Follows ``velocity(x, time [B])`` from time 0 to 1 in equal steps."""

    def step(x, t):
        return x + velocity(x, jnp.full(len(x), t)) / steps, None

    return jax.lax.scan(step, x, jnp.arange(steps) / steps)[0]
