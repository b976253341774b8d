"""A captioner, written from outside: a decoder of any width reads what a ViT made of a picture.

    picture [H W C] ─► patches ─► blocks of self-attention ─► vectors [1+P M] ─┐ keys, values
    words so far [T] ─► embed ─► blocks of masked self-attention, then reads ◄─┘ ─► logits [T V]

    y <- y + Attend(LN y, LN y, causal);  y <- y + Attend(LN y, ViT(picture));  y <- y + MLP(LN y)

Source: Li et al. 2023, "TrOCR", section 2; Vinyals et al. 2015, "Show and Tell"; the ViT, Dosovitskiy et al.
2021, "An Image is Worth 16x16 Words".
"""

from flax import nnx

from crossattn.nn import (
    Autoregressive,
    BlockConfig,
    DecoderStack,
    Encoded,
    EncoderBlock,
    PatchEmbedding,
    Stack,
    TokenInput,
    TokenOutput,
)


class PictureReader(nnx.Module):
    """A ViT: vectors [*B S M] of pictures [*B H W C], of its class token, if any, and of their patches."""

    def __init__(
        self, dim, image_size, *, patch=4, channels=3, layers=2, class_token=True, num_heads=2, rngs
    ):
        shape = BlockConfig.of(dim, num_heads, mlp_dim=4 * dim, activation="gelu")
        self.patches = PatchEmbedding(
            image_size, patch, channels, dim, class_token=class_token, rngs=rngs
        )
        self.stack = Stack(lambda rngs: EncoderBlock(shape, rngs=rngs), layers, rngs=rngs)
        self.norm = shape.normalise(rngs)

    def __call__(self, pictures):
        return Encoded(self.norm(self.stack(self.patches(pictures))[0]))


class Captioner(Autoregressive):
    """Pictures [*B H W C] and words so far [*B T] in, logits of the next word [*B T V] out."""

    def __init__(
        self, vocab_size, dim, image_dim, image_size, *, layers=2, num_heads=2, rngs, **layout
    ):
        shape = BlockConfig.of(dim, num_heads, mlp_dim=2 * dim)
        self.reader = PictureReader(image_dim, image_size, rngs=rngs)
        scheme = dict(positions="sinusoidal")
        self.target_input = TokenInput(vocab_size, dim, **scheme, rngs=rngs)
        self.decoder = DecoderStack(
            shape, layers, memory_dim=image_dim, positions="sinusoidal", **layout, rngs=rngs
        )
        self.output = TokenOutput(vocab_size, dim, tied=True, rngs=rngs)

    def __call__(self, source, target_in):
        states = self.decoder.read(source=self.reader(source))
        return self.logits(self.decoder(self.target_input(target_in), states)[0])

    def prefill(self, batch, num_beams, cache_length, *, source, lookahead=0):
        """States that have read the pictures [B H W C]."""
        states = self.decoder.read(source=self.reader(source))
        return self.decoder.prefill(states, batch, num_beams, cache_length + lookahead)
