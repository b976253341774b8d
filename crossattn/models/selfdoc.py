"""SelfDoc: texts and pictures of a page's regions, encoded separately, then by cross-attention, then fused.

    text     [R T] --encoder, mean--> + box --self-attention--> L --agree--read--> L' --+
                                                                | X X   | X             +--gate--> [R D]
    pictures [R H W C] --encoder, mean--> + box --self-att.---> V --agree--read--> V' --+
    agree: queries and values of one modality, keys of the other. read: queries of one, the rest of the other.

With ``q``, ``k``, ``v`` projections of their own in each direction and layer, and ``n(x) = norm(x)``,

    L1 = L  + softmax(q(n(L))  k(n(V))^T  / sqrt(H)) v(n(L))      V1 likewise, L and V exchanged
    L2 = L1 + softmax(q(n(L1)) k(n(V1))^T / sqrt(H)) v(n(V1))     V2 likewise
    L' = L2 + f(n(L2))                                            V' likewise
    F  = norm(g n(L') + (1 - g) n(V')),  g = sigmoid(w [n(L'); n(V')] + b), a number for each region

The first stage multiplies weights over the keys of one modality by values of the other: the i-th vectors of
both are of one region.

Small encoders, trained with the rest, replace the paper's Sentence-BERT and Faster R-CNN. The
gate is the paper's modality-adaptive attention as one linear layer. It reads and weighs normalised vectors:
vectors of residual streams grow in training, and with them a gate's logits.

Source: Li et al. 2021, "SelfDoc: Self-Supervised Document Representation Learning".
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from crossattn.nn.blocks import Block
from crossattn.nn.encoded import Encoded
from crossattn.nn.examples import texts, vectors
from crossattn.nn.inputs import TokenInput
from crossattn.nn.layers import linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import ClassOutput, logits_of
from crossattn.nn.positions import LearnedPositions
from crossattn.nn.stack import encoder_stack
from crossattn.nn.sublayers import BlockConfig, split
from crossattn.ops import masks
from crossattn.ops.masks import Mask
from crossattn.types import Array, Bool, Count, Float, Int, Key

_PAD = 0  # padding token


@dataclass(frozen=True)
class SelfDocConfig:
    """The shape of a SelfDoc.

    Attributes:
      vocab_size: V.
      num_classes: of regions.
      block: shape of every block.
      tokens: the largest number of tokens of a region's text, a hard limit.
      picture: height, width and channels of a region's picture; patches divide height and width.
      part_layers: layers over the tokens of a text, and over the patches of a picture.
      region_layers: layers of self-attention over the regions of a page, in each modality.
      cross_layers: layers of cross-attention between the modalities; one modality alone has none.
      patch: side of the square patches.
      reads: the modalities, "both", "text" or "picture".
    """

    vocab_size: int
    num_classes: int
    block: BlockConfig
    tokens: int = 32
    picture: tuple[int, int, int] = (24, 96, 1)
    part_layers: Count = 1
    region_layers: Count = 1
    cross_layers: Count = 1
    patch: Count = 12
    reads: Literal["both", "text", "picture"] = "both"


def tiny(**changes: Any) -> SelfDocConfig:
    """Returns a small configuration for tests."""
    block = BlockConfig.of(dim=16, num_heads=2, mlp_dim=32, activation="gelu")
    config = SelfDocConfig(64, 5, block, tokens=6, picture=(4, 8, 1), patch=4)
    return replace(config, **changes)


def example(config: SelfDocConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    regions = 3
    text, _ = texts(rows * regions, config.tokens // 2, config.vocab_size, padding)
    text = np.pad(text.reshape(rows, regions, -1), [(0, 0), (0, padding), (0, 0)])
    corners = np.sort(vectors(rows, regions, 2, 2, padding=padding), axis=2)
    return dict(
        text=text,
        boxes=corners.reshape(rows, regions + padding, 4),
        pictures=vectors(rows, regions, *config.picture, padding=padding),
        segment_ids=texts(rows, regions, config.vocab_size, padding)[1],
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reading:
    """The attention weights and gates of each region.

    Attributes:
      text, picture: weights [*B N R S] of texts on pictures, and of pictures on texts, in the second stage
        of the last layer.
      gates: [*B R], from 1, text alone, to 0, picture alone.
    """

    text: Float[Array, "*B N R S"]
    picture: Float[Array, "*B N S R"]
    gates: Float[Array, "*B R"]


class SelfDoc(nnx.Module):
    """Texts, boxes and pictures of regions in, a vector a region or logits of its class out.

    Raises:
      ValueError: patches do not divide pictures, or ``reads`` is unknown.
    """

    def __init__(self, config: SelfDocConfig, *, rngs: nnx.Rngs):
        if config.reads not in ("both", "text", "picture"):
            raise ValueError(f"reads is {config.reads!r}; expected 'both', 'text' or 'picture'.")
        both = config.reads == "both"
        self.text = TextParts(config, rngs) if both or config.reads == "text" else None
        self.picture = PictureParts(config, rngs) if both or config.reads == "picture" else None
        self.text_regions = None if self.text is None else Regions(config, rngs)
        self.picture_regions = None if self.picture is None else Regions(config, rngs)
        layers = config.cross_layers if both else 0
        self.cross = nnx.List([CrossModality(config.block, rngs=rngs) for _ in range(layers)])
        self.fusion = GatedFusion(config.block, rngs=rngs) if both else None
        self.norm = config.block.normalise(rngs)
        self.output = ClassOutput(
            config.block.dim, config.num_classes, dtype=config.block.dtype, rngs=rngs
        )

    @on_any_mesh
    def hidden(
        self,
        text: Int[Array, "*B R T"],
        boxes: Float[Array, "*B R four"],
        pictures: Float[Array, "*B R H W C"],
        segment_ids: Int[Array, "*B R"] | None = None,
        key: Key[Array, ""] | None = None,
        *,
        return_weights: bool = False,
    ) -> Any:
        """Computes vectors [*B R D] of the regions of pages; with ``return_weights``, a ``Reading`` too.

        Args:
          text: tokens of each region, padded with 0.
          boxes: left, top, right, bottom, in fractions of the page.
          pictures: of each region, in the size of the config.
          segment_ids: the page of each region, 0 for padding; None is one page.
          key: turns dropout on.

        Raises:
          ValueError: the three differ in their number of regions, a text is longer than the model's
            ``tokens``, or pictures have another size; or a model of one modality is asked for weights.
        """
        _check_regions(text, boxes, pictures)
        if return_weights and self.fusion is None:
            raise ValueError("one modality alone reads no other; leave return_weights out.")
        keys = iter(split(key, 4 + len(self.cross)))
        mask = None if segment_ids is None else masks.segments(segment_ids)
        encoded = []
        sides: Any = (
            (self.text, self.text_regions, text),
            (self.picture, self.picture_regions, pictures),
        )
        for parts, regions, given in sides:
            if parts is not None:
                x = regions(parts(given, next(keys)), boxes, mask, next(keys))
                encoded.append(Encoded.of(x, segment_ids))
        if self.fusion is None:
            return self.norm(jnp.asarray(encoded[0].vectors))
        words, looks = encoded
        weights: Any = None
        for layer in self.cross:
            words, looks, weights = layer(words, looks, next(keys), mask=mask)
        x, gates = self.fusion(jnp.asarray(words.vectors), jnp.asarray(looks.vectors))
        x = self.norm(x)
        return (x, Reading(weights[0], weights[1], gates)) if return_weights else x

    @on_any_mesh
    def logits(self, hidden: Float[Array, "*B R D"]) -> Float[Array, "*B R C"]:
        """Applies the output layer: scores of every class, float32."""
        return self.output.logits(hidden)

    @logits_of(hidden)
    def __call__(self) -> Any:
        """Computes logits [*B R C] of the class of each region; the arguments of ``hidden``."""


class TextParts(nnx.Module):
    """Encoder of texts [*B T] to vectors [*B D]: means of their encoded tokens, 0 for an empty text."""

    def __init__(self, config: SelfDocConfig, rngs: nnx.Rngs):
        block = config.block
        self.input = TokenInput(
            config.vocab_size,
            block.dim,
            positions="learned",
            max_length=config.tokens,
            dropout_rate=block.dropout_rate,
            dtype=block.dtype,
            rngs=rngs,
        )
        self.encoder = encoder_stack(block, config.part_layers, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "*B T"], key: Key[Array, ""] | None
    ) -> Float[Array, "*B D"]:
        keys, valid = split(key, 2), tokens != _PAD
        self.input.check(tokens.shape[-1])
        x, _ = self.encoder(
            self.input(tokens, key=keys[0]), key=keys[1], mask=masks.key_padding(valid)
        )
        count = jnp.maximum(valid.sum(-1, keepdims=True), 1)
        return jnp.where(valid[..., None], x, 0).sum(-2) / count.astype(x.dtype)


class PictureParts(nnx.Module):
    """Encoder of pictures [*B H W C] to vectors [*B D]: means of their encoded patches."""

    def __init__(self, config: SelfDocConfig, rngs: nnx.Rngs):
        block, patch = config.block, config.patch
        height, width, channels = config.picture
        if height % patch or width % patch:
            raise ValueError(
                f"patch is {patch}; expected a divisor of the pictures' height and width, {height} and "
                f"{width}."
            )
        self.patches = linear(
            patch * patch * channels,
            block.dim,
            in_axes=("features",),
            out_axes=("embed",),
            dtype=block.dtype,
            rngs=rngs,
        )
        self.positions = LearnedPositions(height * width // patch**2, block.dim, rngs=rngs)
        self.encoder = encoder_stack(block, config.part_layers, rngs=rngs)
        self.size, self.patch = config.picture, patch

    def __call__(
        self, pictures: Float[Array, "*B H W C"], key: Key[Array, ""] | None
    ) -> Float[Array, "*B D"]:
        if pictures.shape[-3:] != self.size:
            raise ValueError(
                f"pictures are {list(pictures.shape[-3:])}; expected this model's {list(self.size)}."
            )
        x = self.patches(_patches(pictures, self.patch))
        x = x + self.positions(jnp.arange(x.shape[-2])).astype(x.dtype)
        return self.encoder(x, key=key)[0].mean(-2)


def _patches(x: Float[Array, "*B H W C"], side: int) -> Float[Array, "*B P S"]:
    """Cuts pictures into square patches, row by row, each as one vector."""
    *lead, height, width, channels = x.shape
    x = x.reshape(*lead, height // side, side, width // side, side, channels)
    return jnp.swapaxes(x, -4, -3).reshape(*lead, -1, side * side * channels)


class Regions(nnx.Module):
    """Encoder of a page's regions [*B R D], from the vectors of their parts and their boxes."""

    def __init__(self, config: SelfDocConfig, rngs: nnx.Rngs):
        block = config.block
        self.box = linear(
            6, block.dim, in_axes=("features",), out_axes=("embed",), dtype=block.dtype, rngs=rngs
        )
        self.norm = block.normalise(rngs)
        self.encoder = encoder_stack(block, config.region_layers, rngs=rngs)

    def __call__(
        self,
        parts: Float[Array, "*B R D"],
        boxes: Float[Array, "*B R four"],
        mask: Mask | None,
        key: Key[Array, ""] | None,
    ) -> Float[Array, "*B R D"]:
        sizes = boxes[..., 2:] - boxes[..., :2]
        x = self.norm(parts + self.box(jnp.concatenate([boxes, sizes], -1)))
        return self.encoder(x, key=key, mask=mask)[0]


class CrossModality(nnx.Module):
    """A layer of cross-attention between two modalities, in two stages; see the module's docstring."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        self.text, self.picture = Side(config, rngs), Side(config, rngs)

    @on_any_mesh
    def __call__(
        self,
        text: Encoded,
        picture: Encoded,
        key: Key[Array, ""] | None = None,
        *,
        mask: Mask | Bool[Array, "..."] | None = None,
    ) -> tuple[Encoded, Encoded, tuple[Array, Array]]:
        """Computes both modalities, and the weights of the second stage, [*B N R R] each.

        Args:
          text, picture: vectors [*B R D] of the same regions.
          key: turns dropout on.
          mask: the pairs that may attend, in both directions.
        """
        keys, given = split(key, 4), (text, picture)
        agreed = (
            self.text.agreed(text, picture, self.picture, mask, keys[0]),
            self.picture.agreed(picture, text, self.text, mask, keys[1]),
        )
        text, picture = (replace(x, vectors=own) for x, own in zip(given, agreed, strict=True))
        words, read = self.text.read(text, picture, self.picture, mask, keys[2])
        looks, seen = self.picture.read(picture, text, self.text, mask, keys[3])
        return replace(text, vectors=words), replace(picture, vectors=looks), (read, seen)


class Side(nnx.Module):
    """One of the two modalities of a layer: a block for each stage."""

    def __init__(self, config: BlockConfig, rngs: nnx.Rngs):
        reads: dict[str, Any] = dict(memory_dim=config.dim, reads="other")
        self.agreeing = Block(cross=config.cross_attention(rngs, **reads))
        self.reading = Block(
            cross=config.cross_attention(rngs, **reads), feedforward=config.feedforward(rngs)
        )

    def agreed(
        self, own: Encoded, other: Encoded, others: "Side", mask: Any, key: Any
    ) -> Float[Array, "*B S D"]:
        """Computes the first stage: queries and values of ``own``, keys of ``other``."""
        values = _normed(own, self.agreeing).vectors
        valid = jnp.asarray(own.readable & other.readable)
        keys = _normed(other, others.agreeing).vectors
        memory = self.agreeing.cross.memory(keys, valid=valid, values_of=values)
        reads: dict[str, Any] = dict(memories={"other": memory}, memory_masks={"other": mask})
        return self.agreeing(jnp.asarray(own.vectors), key=key, **reads)[0]

    def read(
        self, own: Encoded, other: Encoded, others: "Side", mask: Any, key: Any
    ) -> tuple[Float[Array, "*B S D"], Float[Array, "*B N S Z"]]:
        """Computes the second stage and the feed-forward network, and the weights."""
        x, state = self.reading(
            jnp.asarray(own.vectors),
            key=key,
            memories={"other": _normed(other, others.reading)},
            memory_masks={"other": mask},
            capture=("cross.weights",),
        )
        return x, state.captured["cross.weights"]


def _normed(x: Encoded, block: Block) -> Encoded:
    """Normalises vectors for a block's cross-attention."""
    return replace(x, vectors=block.cross_residual.pre_norm(jnp.asarray(x.vectors)))


class GatedFusion(nnx.Module):
    """Gated fusion of two vectors a region, ``g n(l) + (1 - g) n(v)``; the gate reads both."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        self.text_norm, self.picture_norm = config.normalise(rngs), config.normalise(rngs)
        self.gate = linear(
            2 * config.dim,
            1,
            in_axes=("embed",),
            out_axes=("classes",),
            dtype=config.dtype,
            rngs=rngs,
        )

    @on_any_mesh
    def __call__(
        self, text: Float[Array, "*B R D"], picture: Float[Array, "*B R D"]
    ) -> tuple[Float[Array, "*B R D"], Float[Array, "*B R"]]:
        """Computes the fused vectors, and the gates, float32, from 0 to 1."""
        text, picture = self.text_norm(text), self.picture_norm(picture)
        logits = self.gate(jnp.concatenate([text, picture], -1)).astype(jnp.float32)
        gates = jax.nn.sigmoid(logits)
        text_share = gates.astype(text.dtype)
        return text_share * text + (1 - text_share) * picture, gates[..., 0]


def _check_regions(text: Array, boxes: Array, pictures: Array) -> None:
    counts = text.shape[:-1], boxes.shape[:-1], pictures.shape[:-3]
    if len(set(counts)) > 1:
        raise ValueError(
            f"text, boxes and pictures are of {', '.join(str(list(c)) for c in counts)} regions; expected "
            "as many of each, one a region."
        )
