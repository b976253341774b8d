"""A LLaVA, written from outside: projected patches of pictures stand among the tokens of a language model.

    picture [H W C] ─► ViT ─► Z [P M] ─► projector ─► H [P D] ─┐
    <s> look at <image> ... <image> what is this ? ─► embed ─► H in place of the P tokens of an image
                                                                 └─► masked self-attention ─► logits [T V]
    H = W2 gelu(W1 Z + b1) + b2

Nothing but self-attention reads the patches, whose keys and values are in its cache, as those of tokens are.

Source: Liu et al. 2023, "Visual Instruction Tuning", equation 1; the projector, Liu et al. 2024, "Improved
Baselines with Visual Instruction Tuning", section 3.3.
"""

import jax
import jax.numpy as jnp

from crossattn.nn import (
    Autoregressive,
    BlockConfig,
    DecoderStack,
    TokenInput,
    TokenOutput,
    linear,
)

from .captioner import PictureReader


class Llava(Autoregressive):
    """Tokens [B T], pictures [B I H W C] and their places [B I], -1 for none, in; logits [B T V] out."""

    def __init__(
        self, vocab_size, dim, image_dim, image_size, *, layers=2, num_heads=2, rngs, **layout
    ):
        shape = BlockConfig.of(dim, num_heads, mlp_dim=2 * dim)
        self.reader = PictureReader(image_dim, image_size, class_token=False, rngs=rngs)
        axes = dict(in_axes=("embed",), out_axes=("mlp",))
        self.first = linear(image_dim, dim, **axes, rngs=rngs)
        self.second = linear(dim, dim, in_axes=("mlp",), out_axes=("embed",), rngs=rngs)
        scheme = dict(positions="sinusoidal")
        self.target_input = TokenInput(vocab_size, dim, **scheme, rngs=rngs)
        self.decoder = DecoderStack(shape, layers, positions="sinusoidal", **layout, rngs=rngs)
        self.output = TokenOutput(vocab_size, dim, tied=True, rngs=rngs)

    def encode(self, images):
        """Vectors [B I P D], of the size of embeddings, of pictures [B I H W C]."""
        patches = self.reader(images).vectors
        return self.second(jax.nn.gelu(self.first(patches), approximate=False))

    def embed(self, tokens, positions, context=None):
        """Vectors [B J T D] of tokens [B J T], at positions [T] or [B 1 T], and of their row's pictures."""
        vectors, starts = context
        B, count, P, D = vectors.shape
        starts = starts[:, None, None]
        after = positions[..., None] - starts  # [B 1 T I], of the first of an image
        inside = (starts >= 0) & (after >= 0) & (after < P)
        which = jnp.where(inside, after + P * jnp.arange(count), -1).max(-1)
        patches = vectors.reshape(B, 1, count * P, D)
        patches = jnp.take_along_axis(patches, jnp.maximum(which, 0)[..., None], axis=2)
        return self.target_input(tokens, positions, others=(which >= 0, patches))

    def __call__(self, tokens, images, image_positions):
        context = (self.encode(images), image_positions)
        x = self.embed(tokens[:, None], jnp.arange(tokens.shape[-1]), context)[:, 0]
        return self.logits(self.decoder(x, self.decoder.read())[0])

    def prefill(self, batch, num_beams, cache_length, *, images, image_positions, lookahead=0):
        """States whose context is the pictures' vectors and places, which ``embed`` gets at each step."""
        context, length = (self.encode(images), image_positions), cache_length + lookahead
        return self.decoder.prefill(self.decoder.read(), batch, num_beams, length, context)
