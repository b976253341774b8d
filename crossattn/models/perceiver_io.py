"""Perceiver IO: a few learnt latents read inputs of any kind and number, and output queries read latents.

    pixels, frames, bytes   x [S C] ───────┐ keys, values
    latents                 z [L D] ──► read ──► layers of self-attention, `repeats` times ──┐ keys, values
    queries of outputs      q [T E] ─────────────────────────────────────────────────────► write ──► logits

    z <- z + Attend(LN z, LN x); z <- z + MLP(LN z)      read
    z <- z + Attend(LN z, LN z); z <- z + MLP(LN z)      each layer
    y <- q + Attend(LN q, LN z); y <- y + MLP(LN y)      write

Inputs cost S L and outputs T L, where self-attention over them would cost S S and T T. There is no
convolution: a pixel, or a frame of sound, is its values and features of its position.

Source: Jaegle et al. 2021, "Perceiver: General Perception with Iterative Attention", and "Perceiver IO: A
General Architecture for Structured Inputs & Outputs", sections 3.1 and 3.2.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.nn.blocks import Block
from crossattn.nn.encoded import Encoded
from crossattn.nn.examples import texts, vectors
from crossattn.nn.inputs import InputConfig, TokenInput
from crossattn.nn.layers import linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import ClassOutput, OutputConfig, TokenOutput, logits_of
from crossattn.nn.positions import LearnedPositions
from crossattn.nn.stack import encoder_stack
from crossattn.nn.sublayers import BlockConfig, split
from crossattn.ops.positions import fourier, fourier_dim, sinusoidal
from crossattn.types import Array, Count, Float, Int, Key

PixelPositions = Literal["fourier", "learned"]
Start = Literal["random", "diagonal"]
# Near places have like sinusoids, far ones do not: 2 pi times this is the longest period.
_SINUSOIDS_TO = 10.0


@dataclass(frozen=True)
class PerceiverIOConfig:
    """The shape of a Perceiver IO.

    Attributes:
      block: shape of the latents' layers, of size D.
      layers: layers of self-attention between the latents.
      latents: number of latents, L.
      repeats: number of runs of those layers, with the same parameters.
      read, write: shapes of the block of latents that read inputs, and of queries that read latents; None is
        ``block``. The size of ``write`` is that of the queries, E.
      read_skip, write_skip: residual connections around the attention of ``read`` and ``write``.
      image_size: height and width of pictures; None reads none.
      channels: of a pixel.
      frames: of sounds, F; None reads none. Other numbers of frames are read too.
      mels: values of a frame, M.
      pixel_positions: "fourier", fixed features, or "learned", a table; both are concatenated to values.
      bands: of Fourier positions, those of frames too, see ``ops.positions.fourier``.
      resolution: of a picture's Fourier positions; None is ``image_size``.
      pixel_dim: size to which a pixel's values and learnt positions are projected; None does not project
        values, and needs Fourier positions.
      vocab_size: of tokens, V; None reads none.
      token_dim: size of their embeddings; None is E, which a model that predicts tokens needs.
      max_length: the longest text, a hard limit.
      kind_dim: number of learnt features that tell pictures, sounds and tokens apart in a model of several,
        appended to the largest kind of vectors; smaller kinds are filled up to the same size.
      num_classes: number of classes, of one query; None predicts tokens, with a query for each position.
      start: parameters at initialisation: "random", or "diagonal", where each latent attends to its place of
        the text and each query to its latent, see ``PerceiverIO``. It needs tokens, and one size for all.
      scan, remat: of the layers, see ``Stack``.
    """

    block: BlockConfig
    layers: Count
    latents: Count
    repeats: Count = 1
    read: BlockConfig | None = None
    write: BlockConfig | None = None
    read_skip: bool = True
    write_skip: bool = True
    image_size: tuple[int, int] | None = None
    channels: int = 3
    frames: Count | None = None
    mels: Count = 80
    pixel_positions: PixelPositions = "fourier"
    bands: Count = 64
    resolution: tuple[int, int] | None = None
    pixel_dim: Count | None = None
    vocab_size: int | None = None
    token_dim: int | None = None
    max_length: int = 512
    kind_dim: int = 2
    num_classes: int | None = None
    start: Start = "random"
    scan: bool = False
    remat: bool | str = False


def tiny(**changes: Any) -> PerceiverIOConfig:
    """Returns a small configuration for tests, which predicts tokens."""
    block = BlockConfig.of(dim=32, num_heads=2, mlp_dim=64, activation="gelu", cross_heads=1)
    small = PerceiverIOConfig(
        block, layers=1, latents=6, repeats=2, bands=4, vocab_size=64, max_length=64
    )
    return replace(small, **changes)


def example(config: PerceiverIOConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    given: dict[str, Any] = {}
    if config.vocab_size is not None:
        given["tokens"], given["segment_ids"] = texts(rows, 5, config.vocab_size, padding)
    if config.image_size is not None:
        given["image"] = vectors(rows, *config.image_size, config.channels)
    if config.frames is not None:
        given["sound"] = vectors(rows, config.frames, config.mels)
    return given


class PerceiverIO(nnx.Module):
    """Tokens, a picture, a sound or several in; logits of classes, or of a token at each position, out.

    Random latents read almost the same mean of all tokens at first, and learn late what stands where. With
    ``start="diagonal"`` the tables of positions, latents and queries begin as sinusoids of places, latents
    spread evenly over ``max_length``, and the projections of queries and keys in a cross-attention are equal
    at first, so that attention begins near the own place. The parameters are the same, and all are trained.

    Raises:
      ValueError: the config reads nothing, predicts tokens without a vocabulary, or has no diagonal to start
        on.
    """

    def __init__(self, config: PerceiverIOConfig, *, rngs: nnx.Rngs):
        _check(config)
        block, read, write = config.block, config.read or config.block, config.write or config.block
        self.pixels: Any = None if config.image_size is None else _pixels(config, rngs)
        self.frames: Any = None if config.frames is None else _frames(config, rngs)
        self.tokens: Any = None if config.vocab_size is None else _tokens(config, write.dim, rngs)
        sizes = [each.dim for each in (self.pixels, self.frames) if each is not None]
        sizes += [] if self.tokens is None else [config.token_dim or write.dim]
        several, size = len(sizes) > 1, max(sizes)
        size += config.kind_dim if several else 0
        kinds = [_vectors(1, size - own, rngs) for own in sizes]
        self.kinds: Any = nnx.List(kinds) if several else None
        cross: dict[str, Any] = dict(memory_dim=size, reads="inputs", norm_memory=True)
        self.latents = _vectors(config.latents, block.dim, rngs)
        self.read = Block(
            cross=read.cross_attention(rngs, **cross, skip=config.read_skip),
            feedforward=read.feedforward(rngs),
        )
        self.layers = encoder_stack(
            block, config.layers, scan=config.scan, remat=config.remat, rngs=rngs
        )
        self.repeats = config.repeats
        queries = 1 if config.num_classes is not None else config.max_length
        self.queries = LearnedPositions(queries, write.dim, rngs=rngs)
        cross |= dict(memory_dim=block.dim, reads="latents")
        self.write = Block(
            cross=write.cross_attention(rngs, **cross, skip=config.write_skip),
            feedforward=write.feedforward(rngs),
        )
        self.output: Any
        if config.num_classes is not None:
            self.output = ClassOutput(write.dim, config.num_classes, dtype=block.dtype, rngs=rngs)
        else:
            size, bias = config.vocab_size or 0, OutputConfig(bias=True)
            self.output = TokenOutput(size, write, bias, tied=True, rngs=rngs)
        if config.start == "diagonal":
            self._start_on_diagonal(config.latents, config.max_length)

    def _start_on_diagonal(self, latents: int, length: int) -> None:
        dim = self.latents.shape[-1]
        places = jnp.arange(length)
        spread = (2 * jnp.arange(latents) + 1) * length // (2 * latents)
        tables = (
            (self.latents, spread),
            (self.queries.table, places),
            (self.tokens.learned.table, places),
        )
        for table, at in tables:
            # Sinusoids have a variance of 1 / 2, embeddings one of 1 / D.
            table.set_value(sinusoidal(at, dim, _SINUSOIDS_TO) * (2 / dim) ** 0.5)
        for block in (self.read, self.write):
            block.cross.key.kernel.set_value(block.cross.query.kernel.get_value())

    @property
    def longest(self) -> int | None:
        """The largest number of tokens that have positions; None reads no tokens."""
        return None if self.tokens is None else self.tokens.longest

    @on_any_mesh
    def encode(
        self,
        tokens: Int[Array, "*B S"] | None = None,
        image: Float[Array, "*B H W C"] | None = None,
        sound: Float[Array, "*B F M"] | None = None,
        *,
        segment_ids: Int[Array, "*B S"] | None = None,
        positions: Int[Array, "*#B S"] | None = None,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Encodes inputs to latents [*B L D].

        Args:
          tokens, image, sound: the inputs of this model, and no others.
          segment_ids: of the tokens; 0 is padding. Latents read all texts of a row together.
          positions: of the tokens; None is ``arange``.
          key: turns dropout on.
          return_weights: also return the weights [*B N L S] of latents on pixels, then frames, then tokens.

        Raises:
          ValueError: an input is missing, or this model does not read it; or a text is too long, a picture
            or a sound has other axes or channels, or a picture another size than the learnt positions.
        """
        keys = split(key, 3 + self.repeats)
        inputs = self._inputs(tokens, image, sound, segment_ids, positions, keys[0])
        x, state = self.read(
            self.latents[...].astype(inputs.vectors.dtype),
            key=keys[1],
            memories={"inputs": inputs},
            capture=("cross.weights",) if return_weights else (),
        )
        x = self.layers.repeat(x, keys[3:])
        return Encoded(x) if state is None else (Encoded(x), state.captured["cross.weights"])

    @on_any_mesh
    def decode(
        self,
        latents: Encoded | Float[Array, "*B L D"],
        positions: Int[Array, "*#B T"] | None = None,
        key: Key[Array, ""] | None = None,
        *,
        return_weights: bool = False,
    ) -> Any:
        """Decodes latents to vectors [*B T E] of the queries at these positions.

        None is all positions: the one of classes, or ``max_length``. ``return_weights`` adds the queries'
        weights [*B N T L].
        """
        at = jnp.arange(self.queries.count) if positions is None else positions
        latents = Encoded.of(latents)
        y, state = self.write(
            self.queries(at).astype(latents.vectors.dtype),
            key=key,
            memories={"latents": latents},
            capture=("cross.weights",) if return_weights else (),
        )
        return y if state is None else (y, state.captured["cross.weights"])

    @on_any_mesh
    def hidden(
        self,
        tokens: Int[Array, "*B S"] | None = None,
        image: Float[Array, "*B H W C"] | None = None,
        sound: Float[Array, "*B F M"] | None = None,
        *,
        segment_ids: Int[Array, "*B S"] | None = None,
        positions: Int[Array, "*#B S"] | None = None,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Computes the output layer's input: a vector [*B E] for classes, or one of each token, [*B S E].

        Arguments are those of ``encode``; ``return_weights`` adds the weights of latents on inputs
        [*B N L S] and of queries on latents [*B N T L].
        """
        keys = split(key, 2)
        latents = self.encode(
            tokens,
            image,
            sound,
            segment_ids=segment_ids,
            positions=positions,
            key=keys[0],
            return_weights=return_weights,
        )
        latents, read = latents if return_weights else (latents, None)
        classes = isinstance(self.output, ClassOutput)
        at = None if classes or tokens is None else jnp.arange(tokens.shape[-1])
        at = at if classes or positions is None else positions
        y = self.decode(latents, at, keys[1], return_weights=return_weights)
        y, written = y if return_weights else (y, None)
        y = y[..., 0, :] if classes else y
        return (y, read, written) if return_weights else y

    @on_any_mesh
    def logits(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Applies the output layer: logits of classes or of tokens, float32."""
        if isinstance(self.output, ClassOutput):
            return self.output.logits(hidden)
        return self.output.logits(hidden, self.tokens.embedding)

    def output_product(
        self, hidden: Float[Array, "*B S D"]
    ) -> tuple[Float[Array, "*B S E"], Float[Array, "V E"]]:
        """Returns vectors and a table, the factors of the ``logits`` of tokens, for fused losses."""
        return self.output.product(hidden, self.tokens.embedding)

    @logits_of(hidden)
    def __call__(self) -> Any:
        """Computes logits [*B C] of classes, or [*B S V] of each token; the arguments of ``hidden``."""

    @on_any_mesh
    def patch_weights(self, image: Float[Array, "*B H W C"]) -> dict[str, Float[Array, "*B h w"]]:
        """Computes the first query's weights on latents times the latents' weights on pixels.

        The weights are means over heads. Layers between the latents mix them, which these weights leave out.
        """
        _, read, written = self.hidden(image=image, return_weights=True)
        asked = jnp.mean(written[..., 0, :], axis=-2)
        seen = jnp.einsum("...L,...LS->...S", asked, jnp.mean(read, axis=-3))
        return {"pixels, by way of latents": seen.reshape(image.shape[:-1])}

    def _inputs(
        self,
        tokens: Array | None,
        image: Array | None,
        sound: Array | None,
        segment_ids: Array | None,
        positions: Array | None,
        key: Array | None,
    ) -> Encoded:
        """Returns vectors of the pixels, then of the frames, then of the tokens, of one size."""
        inputs = dict(
            image=(image, self.pixels), sound=(sound, self.frames), tokens=(tokens, self.tokens)
        )
        for name, (given, module) in inputs.items():
            if (given is None) != (module is None):
                kind = "reads no" if module is None else "wants"
                raise ValueError(
                    f"{name} {'is missing' if given is None else 'came'}, but this PerceiverIO {kind} "
                    f"{name}; give what its config has a size for."
                )
        parts = []
        if image is not None:
            parts.append(Encoded(self.pixels(image)))
        if sound is not None:
            parts.append(Encoded(self.frames(sound)))
        if tokens is not None:
            parts.append(Encoded.of(self.tokens(tokens, positions, key), segment_ids))
        if self.kinds is not None:
            parts = [_extended(x, kind[...]) for x, kind in zip(parts, self.kinds, strict=True)]
        return Encoded.concat(*parts)


class GridInput(nnx.Module):
    """The vectors of a grid's places, pixels or frames: values, then features of the position.

    Args:
      name: of the input, for errors.
      size: of each axis of the grid.
      channels: values of a place.
      dim: size to which values and learnt positions are projected; None does not project values, and has no
        learnt positions.
      learned: whether positions are a table, in place of Fourier features.
      bands, resolution: of Fourier features, see ``ops.positions.fourier``.
      dtype: computation dtype.
    """

    def __init__(
        self,
        name: str,
        size: tuple[int, ...],
        channels: int,
        *,
        dim: int | None = None,
        learned: bool = False,
        bands: int,
        resolution: tuple[int, ...] | None = None,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = dict(out_axes=("mlp",), dtype=dtype, rngs=rngs)
        self.values = (
            None if dim is None else linear(channels, dim, in_axes=("channels",), **options)
        )
        options |= dict(in_axes=("embed",))
        self.positions = LearnedPositions(math.prod(size), dim or 0, rngs=rngs) if learned else None
        self.projection = linear(dim or 0, dim or 0, **options) if learned else None
        self.name, self.size, self.channels = name, size, channels
        self.bands, self.resolution, self.dtype = bands, resolution or size, dtype
        beside = (dim or 0) if learned else fourier_dim(len(size), bands)
        self.dim = (channels if dim is None else dim) + beside

    def __call__(self, grid: Float[Array, "*B_and_grid C"]) -> Float[Array, "*B S D"]:
        """Computes vectors of the places, row by row.

        Raises:
          ValueError: the grid has other axes or channels, or another size than the learnt positions.
        """
        axes, expected = len(self.size), (*self.size, self.channels)
        shape = grid.shape[-1 - axes : -1]
        if (
            grid.ndim <= axes
            or grid.shape[-1] != self.channels
            or (self.positions is not None and shape != self.size)
        ):
            last = " ".join(map(str, grid.shape[-1 - axes :]))
            raise ValueError(f"{self.name} is [... {last}]; expected {expected}.")
        x = grid.reshape(*grid.shape[: -1 - axes], -1, self.channels)
        x = x.astype(self.dtype or jnp.float32)
        x = x if self.values is None else self.values(x)
        if self.positions is None:
            places = fourier(shape, self.bands, self.resolution)
            places = places.reshape(-1, places.shape[-1])
        else:
            places = self.projection(self.positions.table[...])
        places = jnp.broadcast_to(places.astype(x.dtype), (*x.shape[:-1], places.shape[-1]))
        return jnp.concatenate([x, places], axis=-1)


def _check(config: PerceiverIOConfig) -> None:
    write = config.write or config.block
    if config.frames is not None and min(config.frames, config.mels) < 1:
        raise ValueError(
            f"frames is {config.frames} and mels is {config.mels}; expected 1 or more of each."
        )
    if config.vocab_size is None and config.image_size is None and config.frames is None:
        raise ValueError(
            "vocab_size, image_size and frames are all None; expected one at least, or nothing is read."
        )
    if config.num_classes is None and config.vocab_size is None:
        raise ValueError(
            "num_classes and vocab_size are both None; expected one at least, or nothing is predicted."
        )
    if config.num_classes is None and config.token_dim not in (None, write.dim):
        raise ValueError(
            f"token_dim is {config.token_dim}; a model that predicts tokens expects the size of its queries, "
            f"{write.dim}, whose output layer is their table."
        )
    sizes = {config.block.dim, write.dim, config.token_dim or write.dim}
    cross = [shape.cross or shape.attention for shape in (config.read or config.block, write)]
    if config.start == "diagonal" and (
        config.num_classes is not None
        or config.image_size is not None
        or config.frames is not None
        or len(sizes) > 1
        or any(shape.num_kv_heads not in (None, shape.num_heads) for shape in cross)
    ):
        raise ValueError(
            "start is 'diagonal'; expected a model that reads and predicts tokens alone, whose latents, "
            "tokens and queries have one size, and as many heads of keys as of queries."
        )
    if config.pixel_positions == "learned" and config.image_size and config.pixel_dim is None:
        raise ValueError("pixel_positions is 'learned'; expected a pixel_dim, their size.")


def _pixels(config: PerceiverIOConfig, rngs: nnx.Rngs) -> GridInput:
    assert config.image_size is not None
    return GridInput(
        "image",
        config.image_size,
        config.channels,
        dim=config.pixel_dim,
        learned=config.pixel_positions == "learned",
        bands=config.bands,
        resolution=config.resolution,
        dtype=config.block.dtype,
        rngs=rngs,
    )


def _frames(config: PerceiverIOConfig, rngs: nnx.Rngs) -> GridInput:
    assert config.frames is not None
    options: dict[str, Any] = dict(bands=config.bands, dtype=config.block.dtype, rngs=rngs)
    return GridInput("sound", (config.frames,), config.mels, **options)


def _tokens(config: PerceiverIOConfig, query_dim: int, rngs: nnx.Rngs) -> TokenInput:
    # Latents find a token by its position, so positions are as large as embeddings.
    dim = config.token_dim or query_dim
    return TokenInput(
        config.vocab_size,
        dim,
        positions="learned",
        max_length=config.max_length,
        config=InputConfig(scale=1.0, position_std=dim**-0.5),
        dropout_rate=config.block.dropout_rate,
        dtype=config.block.dtype,
        rngs=rngs,
    )


def _vectors(count: int, dim: int, rngs: nnx.Rngs) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), (count, dim)) * 0.02, axes=(None, "embed"))


def _extended(x: Encoded, kind: Float[Array, "one K"]) -> Encoded:
    """Appends the features of their kind to vectors."""
    kind = jnp.broadcast_to(kind.astype(x.vectors.dtype), (*x.vectors.shape[:-1], kind.shape[-1]))
    return replace(x, vectors=jnp.concatenate([x.vectors, kind], axis=-1))
