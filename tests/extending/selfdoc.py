"""A SelfDoc, written from outside: texts and pictures of a page's regions read each other, and are fused.

    texts    [R E] ─► linear, + box ─► blocks ─► L ─► agrees ─► reads ─► L' ─┐
                                                      V, L      V, L         ├─ gate ─► [R D] ─► classes
    pictures [R F] ─► linear, + box ─► blocks ─► V ─► agrees ─► reads ─► V' ─┘

    L1 = L  + softmax(q(n(L))  k(n(V))^T  / sqrt(H)) v(n(L))        V1 likewise, L and V exchanged
    L2 = L1 + softmax(q(n(L1)) k(n(V1))^T / sqrt(H)) v(n(V1))       V2 likewise
    L' = L2 + f(n(L2));  F = norm(g n(L') + (1 - g) n(V')),  g = sigmoid(w [n(L'); n(V')] + b)

Source: Li et al. 2021, "SelfDoc: Self-Supervised Document Representation Learning", whose texts and pictures
are vectors of frozen encoders too.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.nn import (
    Block,
    BlockConfig,
    ClassOutput,
    Encoded,
    EncoderBlock,
    Stack,
    linear,
)
from crossattn.ops import masks

AXES = dict(in_axes=("features",), out_axes=("embed",))


class Side(nnx.Module):
    """One modality of the regions of a page."""

    def __init__(self, shape, size, *, rngs):
        self.features = linear(size, shape.dim, **AXES, rngs=rngs)
        self.box = linear(4, shape.dim, **AXES, rngs=rngs)
        self.norm = shape.normalise(rngs)
        self.stack = Stack(lambda rngs: EncoderBlock(shape, rngs=rngs), 1, rngs=rngs)
        reads = dict(memory_dim=shape.dim, reads="other")
        self.agreeing = Block(cross=shape.cross_attention(rngs, **reads))
        self.reading = Block(
            cross=shape.cross_attention(rngs, **reads), feedforward=shape.feedforward(rngs)
        )
        self.output_norm = shape.normalise(rngs)

    def encode(self, features, boxes, valid):
        """Vectors [*B R D] of features [*B R E] and boxes [*B R 4]; ``valid`` [*B R] is False for padding."""
        x = self.norm(self.features(features) + self.box(boxes))
        return self.stack(x, mask=masks.key_padding(valid))[0]

    def agree(self, own, other, theirs, valid):
        """Queries and values of ``own`` [*B R D], and keys of ``theirs``, that of the side ``other``."""
        values = self.agreeing.cross_residual.pre_norm(own)
        keys = other.agreeing.cross_residual.pre_norm(theirs)
        memory = self.agreeing.cross.memory(keys, values_of=values, valid=valid)
        return self.agreeing(own, memories={"other": memory})[0]

    def read(self, own, other, theirs, valid):
        """Queries of ``own`` [*B R D], and keys and values of ``theirs``."""
        memory = Encoded(other.reading.cross_residual.pre_norm(theirs), valid)
        return self.reading(own, memories={"other": memory})[0]


class SelfDoc(nnx.Module):
    """Regions in, logits of the class of each [*B R C] out."""

    def __init__(self, dim, text_size, picture_size, num_classes, *, num_heads=2, rngs):
        shape = BlockConfig.of(dim, num_heads, mlp_dim=2 * dim, activation="gelu")
        self.text = Side(shape, text_size, rngs=rngs)
        self.picture = Side(shape, picture_size, rngs=rngs)
        self.gate = linear(2 * dim, 1, in_axes=("embed",), out_axes=("classes",), rngs=rngs)
        self.norm = shape.normalise(rngs)
        self.output = ClassOutput(dim, num_classes, rngs=rngs)

    def __call__(self, texts, pictures, boxes, valid):
        """Logits [*B R C] of texts [*B R E], pictures [*B R F] and boxes [*B R 4]."""
        text, picture = self.text, self.picture
        L, V = text.encode(texts, boxes, valid), picture.encode(pictures, boxes, valid)
        L, V = text.agree(L, picture, V, valid), picture.agree(V, text, L, valid)
        L, V = text.read(L, picture, V, valid), picture.read(V, text, L, valid)
        L, V = text.output_norm(L), picture.output_norm(V)
        gate = jax.nn.sigmoid(self.gate(jnp.concatenate([L, V], axis=-1)))
        return self.output.logits(self.norm(gate * L + (1 - gate) * V))
