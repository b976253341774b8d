"""Multi-head attention: one module for self-, masked and cross-attention.

The module makes a ``Memory`` (``memory``), appends to one (``extend``) and reads one (``__call__``). The
origin of the memory decides which kind of attention it is.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from crossattn.nn.layers import linear, norm
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.persistent import PersistentVectors
from crossattn.ops import masks
from crossattn.ops.arguments import check_dropout_rate, check_mask, in_words_of_here
from crossattn.ops.attend import attend
from crossattn.ops.blockwise.stats import AttentionStats, attention_stats
from crossattn.ops.masks import Mask, as_mask
from crossattn.ops.memory import Memory
from crossattn.ops.positions import rotary
from crossattn.types import Array, Bool, Float, Int, Key


class MultiHeadAttention(nnx.Module):
    """Queries from ``x`` read a memory. Single-head attention is ``num_heads=1``.

    Args:
      dim: size of the queries' input, D.
      num_heads: query heads, N.
      memory_dim: size of the vectors that the memory is made from; None is ``dim``.
      out_dim: size of the output; None is ``dim``.
      head_dim: H; None is ``dim // num_heads``.
      value_dim: size of a value head, Hv; None is H.
      num_kv_heads: key/value heads, K; None is ``num_heads``.
      use_bias: biases in the four projections.
      key_bias: a bias in the keys' projection; None is ``use_bias``.
      out_bias: a bias in the projection of the output; None is ``use_bias``.
      qk_norm: root-mean-square norm on each query and key head (Dehghani et al. 2023).
      memory_norm: a norm of the vectors that the memory is made from; None is none.
      num_persistent: learnt keys and values of each head that every query reads beside its memory, P; see
        ``PersistentVectors``; None is none.
      rope_base: base wavelength of rotary positions; None is no rotation.
      rope_scaling: the scaling of rotary frequencies; None is none.
      scale: factor of the logits; None is ``head_dim ** -0.5``.
      softcap: limit on the logits, see ``attend``.
      dropout_rate: of the attention weights; active when a call gets a ``dropout_key``.
      dtype: computation dtype.

    Raises:
      ValueError: a size is no integer above 0, heads do not divide, or a rate is not in [0, 1).
      TypeError: an argument is unknown; those of other libraries are told what they are called here.
    Source: Vaswani et al. 2017, section 3.2.2; grouped heads, Ainslie et al. 2023.
    """

    @in_words_of_here
    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        memory_dim: int | None = None,
        out_dim: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        num_kv_heads: int | None = None,
        use_bias: bool = True,
        key_bias: bool | None = None,
        out_bias: bool | None = None,
        qk_norm: bool = False,
        memory_norm: nnx.Module | None = None,
        num_persistent: int | None = None,
        rope_base: float | None = None,
        rope_scaling: rotary.RopeScaling | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        sizes = dict(dim=dim, num_heads=num_heads, memory_dim=memory_dim, out_dim=out_dim)
        sizes |= dict(head_dim=head_dim, value_dim=value_dim, num_kv_heads=num_kv_heads)
        _check_made(sizes, rngs)
        check_dropout_rate(dropout_rate)
        kv_heads = num_kv_heads or num_heads
        if head_dim is None and dim % num_heads:
            raise ValueError(f"num_heads is {num_heads}; expected a divisor of dim, {dim}.")
        if num_heads % kv_heads:
            raise ValueError(
                f"num_kv_heads is {kv_heads}; expected a divisor of num_heads, {num_heads}."
            )
        head_dim = head_dim or dim // num_heads
        memory_dim, value_dim = memory_dim or dim, value_dim or head_dim
        key_bias = use_bias if key_bias is None else key_bias
        out_bias = use_bias if out_bias is None else out_bias
        inner, options = ("heads", "head_dim"), dict[str, Any](dtype=dtype, rngs=rngs)
        into: dict[str, Any] = dict(in_axes=("embed",), out_axes=inner, **options)
        of_memory: dict[str, Any] = into | dict[str, Any](out_axes=("kv_heads", "head_dim"))
        back: dict[str, Any] = dict(in_axes=inner, out_axes=("embed",), **options)
        self.query = linear(dim, (num_heads, head_dim), use_bias=use_bias, **into)
        self.key = linear(memory_dim, (kv_heads, head_dim), use_bias=key_bias, **of_memory)
        self.value = linear(memory_dim, (kv_heads, value_dim), use_bias=use_bias, **of_memory)
        self.out = linear((num_heads, value_dim), out_dim or dim, use_bias=out_bias, **back)
        self.query_norm = norm("rms", head_dim, dtype=dtype, rngs=rngs) if qk_norm else None
        self.key_norm = norm("rms", head_dim, dtype=dtype, rngs=rngs) if qk_norm else None
        self.memory_norm: Any = memory_norm
        shape = kv_heads, head_dim, value_dim
        self.persistent = (
            PersistentVectors(num_persistent, *shape, rngs=rngs) if num_persistent else None
        )
        self.rope_base, self.rope_scaling = rope_base, rope_scaling
        self.scale = scale
        self.softcap = softcap
        self.dropout_rate = dropout_rate
        self.kv_shape = shape
        self.dtype = dtype

    @in_words_of_here
    @on_any_mesh
    def memory(
        self,
        x: Float[Array, "*B S M"],
        *,
        positions: Int[Array, "*#B S"] | None = None,
        valid: Bool[Array, "*B S"] | None = None,
        values_of: Float[Array, "*B S M"] | None = None,
    ) -> Memory:
        """Projects keys and values of ``x``; or keys of ``x``, and values of ``values_of``.

        Args:
          x: vectors [*B S M].
          positions: of the vectors, for rotary keys and masks by position; None is ``arange``.
          valid: which vectors may be read, True = may; None is all.
          values_of: vectors of the same size and number, where values have another origin than keys: the
            paper's ``attention(q, k, v)`` is ``attention(q, attention.memory(k, values_of=v))``.

        Raises:
          ValueError: the vectors are not of size ``memory_dim``.
        """
        for name, vectors in (("x", x), ("values_of", x if values_of is None else values_of)):
            _check_size(f"MultiHeadAttention.memory: {name}", vectors, self.key, "memory_dim")
        if self.memory_norm is not None:
            x = self.memory_norm(x)
            values_of = None if values_of is None else self.memory_norm(values_of)
        keys = self.key(x)
        values = self.value(x if values_of is None else values_of)
        if self.key_norm is not None:
            keys = self.key_norm(keys)
        if self.rope_base is not None:
            places = jnp.arange(x.shape[-2]) if positions is None else positions
            keys = self._rotated(keys, places)
        if positions is not None:
            positions = jnp.broadcast_to(positions, x.shape[:-1])
        return Memory(keys, values, valid=valid, positions=positions)

    def cache(self, batch_shape: tuple[int, ...], size: int) -> Memory:
        """Returns an empty memory of ``size`` slots, for ``extend``; it stores rotary positions."""
        dtype = self.dtype or jnp.float32
        cache = Memory.empty(batch_shape, size, *self.kv_shape, dtype=dtype, bare=True)
        if self.rope_base is None:
            return cache
        return replace(cache, positions=jnp.zeros((*batch_shape, size), jnp.int32))

    @on_any_mesh
    def extend(
        self,
        cache: Memory,
        x: Float[Array, "*B X D"],
        *,
        positions: Int[Array, "*#B X"] | None = None,
    ) -> Memory:
        """Returns the cache with the keys and values of ``x`` appended.

        Args:
          positions: of ``x``, for rotary positions and for a cache that stores them; None continues
            those of the cache.
        """
        rotary_positions = positions
        if positions is None and cache.length is not None:
            rotary_positions = jnp.asarray(cache.length) + jnp.arange(x.shape[-2])
        new = self.memory(x, positions=rotary_positions)
        kept = None if cache.positions is None else positions
        return cache.append(new.keys, new.values, positions=kept)

    def before(self, x: Float[Array, "*B T D"], cache: Memory | None) -> Int[Array, "..."] | None:
        """Returns how many positions a cache has before those of ``x``, the last ones; None is 0.

        Raises:
          ValueError: the cache is smaller than ``x``, and so cannot contain it.
        """
        if cache is None or cache.length is None:
            return None
        count, size = x.shape[-2], cache.size
        if count > size:
            raise ValueError(
                f"x has {count} positions, but the cache that it reads has room for {size}; expected a "
                "cache that x was appended to, by extend."
            )
        return jnp.asarray(cache.length) - count

    def _rotated(self, x: Array, positions: Array) -> Array:
        assert self.rope_base is not None
        return rotary.rotate(x, positions, self.rope_base, self.rope_scaling)

    def _query_positions(self, x: Array, memory: Memory) -> Array:
        """Returns positions [T] or [*B T] of queries for which the call gave none."""
        before = self.before(x, memory)
        if before is None and memory.positions is None:
            return jnp.arange(x.shape[-2])
        if before is None or memory.positions is None:
            kept = "has positions of its own" if before is None else "is a cache without positions"
            raise ValueError(
                f"memory {kept}, so that those of rotary queries are not known; give them as positions=."
            )
        slots = before[..., None] + jnp.arange(x.shape[-2])
        slots = jnp.broadcast_to(slots, (*memory.positions.shape[:-1], x.shape[-2]))
        positions = jnp.take_along_axis(memory.positions, slots, axis=-1, mode="clip")
        extra = x.ndim - 1 - (memory.keys.ndim - 2)
        return (
            positions if positions.ndim == 1 else jnp.expand_dims(positions, range(-1 - extra, -1))
        )

    @in_words_of_here
    @on_any_mesh
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        memory: Memory | Float[Array, "*C S M"] | None = None,
        mask: Mask | Bool[Array, "..."] | None = None,
        *,
        positions: Int[Array, "*#B T"] | None = None,
        bias: Float[Array, "..."] | None = None,
        dropout_key: Key[Array, ""] | None = None,
        backend: str | None = None,
        return_weights: bool = False,
        edit: Callable[[Array], Array] | None = None,
        watch: Callable[[AttentionStats], None] | None = None,
    ) -> Any:
        """Reads ``memory`` with the queries of ``x``.

        Args:
          x: [*B T D]. Batch axes that the memory lacks (next to T) hold further queries of the same
            memory: beams share their source without a copy of it. Queries [T D] without batch axes, such
            as Perceiver's latents, read the memory of every example.
          memory: a ``Memory``; an array to make one from; None for self-attention.
          mask: the pairs of query and key that may attend, besides the memory's padding mask; an array
            as ``attend`` takes it, or [T S].
          positions: of the queries (and of a self-attention memory), for rotary positions. None is the
            last positions of a cache, and ``arange`` without one.
          bias: added to the logits, [*#B #N #T #S] or without batch axes.
          dropout_key: turns dropout on.
          backend: see ``attend``.
          return_weights: also return the weights [*B N T S], float32, those before dropout; with
            persistent vectors [*B N T (S P)], those of the memory first.
          edit: changes what heads read [*B T N Hv], before the projection that adds them up.
          watch: takes ``attention_stats`` of the weights on the memory, which are computed without a matrix.

        Returns:
          [*B T D], or a pair with the weights; D is ``out_dim`` where that is given.

        Raises:
          ValueError: ``x`` has other batch axes than the memory, or vectors of another size than ``dim``;
            rotary attention cannot derive the queries' positions from the memory; or as ``attend`` does.
        """
        _check_size("MultiHeadAttention: x", x, self.query, "dim")
        if not jnp.issubdtype(dtype := getattr(mask, "dtype", bool), jnp.bool_):
            raise ValueError(
                f"MultiHeadAttention: mask is an array of {dtype}; expected a Mask or booleans, of 0 and 1 "
                "mask.astype(bool). It is the third argument: for attention(q, k, v) write attention(q, k) "
                "where v is k, and else attention(q, attention.memory(k, values_of=v)); an additive mask of "
                "0 and -inf is bias=."
            )
        if memory is None and self.key.in_features != self.query.in_features:
            raise ValueError(
                "MultiHeadAttention: memory is None, so that x reads itself, but the memory has size "
                f"memory_dim = {self.key.in_features[0]}, and x {x.shape[-1]}; give memory=."
            )
        if memory is None:
            memory = self.memory(x, positions=positions)
        elif not isinstance(memory, Memory):
            memory = self.memory(memory)
        mask = Mask(()) if mask is None else as_mask(mask, memory.keys.ndim)
        T, count = x.shape[-2], math.prod(x.shape[memory.keys.ndim - 3 : -2])
        if bias is not None:
            bias = bias.reshape((1,) * (memory.keys.ndim - bias.ndim) + bias.shape)
        alone = dict[str, Any](mask=mask & memory.mask(), bias=bias)
        if count > 1:
            shape = (*memory.keys.shape[:-3], self.query.out_features[0], T, memory.size)
            own = check_mask(mask, shape)
            own = Mask(()) if own is None else own
            mask, bias = _repeated(own, bias, count, T, memory.size)
        mask = mask & memory.mask()

        query = self.query(x)
        if self.query_norm is not None:
            query = self.query_norm(query)
        unrotated = query = for_each_example(query, query.shape[:-3], memory.keys.shape[:-3])
        if self.rope_base is not None:
            positions = self._query_positions(x, memory) if positions is None else positions
            query = self._rotated(query, positions)
        lead, shared = query.shape[:-2], memory.keys.ndim - 3
        query = query.reshape(*lead[:shared], count * T, *query.shape[-2:])
        if watch is not None:
            alone |= dict(scale=self.scale, softcap=self.softcap)
            watch(_stats_of_each(query, jnp.asarray(memory.keys), lead[shared:-1], alone))
        reading: Any = attend
        if self.persistent is not None:
            reading = partial(self.persistent.attend, unrotated.reshape(query.shape))
        result = reading(
            query,
            memory.keys,
            memory.values,
            mask,
            bias=bias,
            scale=self.scale,
            softcap=self.softcap,
            dropout_rate=self.dropout_rate if dropout_key is not None else 0.0,
            dropout_key=dropout_key,
            backend=backend,
            return_weights=return_weights,
        )
        out, weights = result if return_weights else (result, None)
        out = out.reshape(*lead, *out.shape[-2:])
        out = self.out(out if edit is None else edit(out))
        return out if weights is None else (out, _unfold(weights, lead, shared))


def for_each_example(queries: Array, own: tuple[int, ...], batch: tuple[int, ...]) -> Array:
    """Repeats queries without batch axes for each example of the memory; those with batch axes ``own`` stay.

    Raises:
      ValueError: the queries have other batch axes than the memory.
    """
    if own and own[: len(batch)] != batch:
        raise ValueError(
            f"x has batch axes {own}, and the memory {batch}; expected the memory's, and further ones at "
            "the end for queries that share an example's memory, or none."
        )
    return queries if own else jnp.broadcast_to(queries, (*batch, *queries.shape))


def _check_made(sizes: dict[str, Any], rngs: Any) -> None:
    """Checks the sizes that a module is made with, None for usual ones, and its streams of keys."""
    for name, size in sizes.items():
        whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if size is not None and not (whole and size > 0):
            raise ValueError(f"{name} is {size!r}; expected an integer above 0.")
    if not isinstance(rngs, nnx.Rngs):
        raise ValueError(f"rngs is of type {type(rngs).__name__}; expected flax's nnx.Rngs(seed).")


def _check_size(name: str, x: Array, layer: nnx.LinearGeneral, argument: str) -> None:
    """Checks the size of the vectors that a projection is applied to."""
    [size] = layer.in_features
    if getattr(x, "ndim", 0) < 2:
        said = f"has shape {x.shape}" if hasattr(x, "shape") else f"is a {type(x).__name__}"
        raise ValueError(
            f"{name} {said}; expected an array of vectors of size {argument} = {size}, [*B T {size}]."
        )
    if x.shape[-1] != size:
        raise ValueError(
            f"{name} has shape {x.shape}; expected vectors of size {argument} = {size}."
        )


def _repeated(
    mask: Mask, bias: Float[Array, "..."] | None, count: int, queries: int, keys: int
) -> tuple[Mask, Float[Array, "..."] | None]:
    """Repeats the mask and the bias of T queries ``count`` times, for further queries of the same S keys."""

    def times(x: Array) -> Array:
        return x if x.shape[-2] == 1 else jnp.concatenate([x] * count, axis=-2)

    if mask.terms:
        allowed = mask.block(jnp.arange(queries), jnp.arange(keys))
        # With one query, the row may be that query's own.
        of_keys = allowed.shape[-2] == 1 < queries
        mask = mask if of_keys else Mask((masks.Explicit(times(allowed)),))
    return mask, None if bias is None else times(bias)


def _stats_of_each(
    query: Array, keys: Any, extra: tuple[int, ...], options: dict[str, Any]
) -> AttentionStats:
    """Computes statistics of folded queries [*C (extra T) N H] as those of each sequence, [*C extra N T]."""
    if not extra:
        return attention_stats(query, keys, **options)
    *batch, _, N, H = query.shape
    query = query.reshape(*batch, math.prod(extra), -1, N, H)
    along = len(batch)
    stats = jax.vmap(lambda q: attention_stats(q, keys, **options), along, along)(query)
    return jax.tree.map(lambda x: x.reshape(*batch, *extra, *x.shape[along + 1 :]), stats)


def _unfold(weights: Array, lead: tuple[int, ...], shared: int) -> Array:
    """Reshapes [*C N (extra T) S] -> [*C extra N T S]."""
    *batch, N, _, S = weights.shape
    weights = weights.reshape(*batch, N, *lead[shared:], S)
    return jnp.moveaxis(weights, len(batch), -3)
