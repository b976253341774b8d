"""Attention whose scores are not scaled dot products of projected heads: additive, and Luong's.

The modules are called as ``MultiHeadAttention`` with one head is. They mask as ``attend`` does: masked keys
and values have no influence, even NaN, and a query without keys gives 0.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.axes import placed
from crossattn.nn.attention import for_each_example
from crossattn.nn.layers import linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.ops.arguments import check_mask
from crossattn.ops.masks import Mask, as_mask
from crossattn.ops.memory import Memory
from crossattn.types import AnyArray, Array, Bool, Float, Int, Key

Score = Literal["dot", "general", "concat"]


class ScoredAttention(nnx.Module):
    """Attention whose weights are the softmax of ``scores(query, keys)``; values are the memory's vectors.

    Subclasses define ``scores``, and may project keys once for any number of queries in ``keys``.
    """

    def keys(self, x: Float[Array, "*B S M"]) -> Float[Array, "*B S H"]:
        """Returns the keys: ``x`` itself unless a subclass projects it."""
        return x

    def scores(
        self, x: Float[Array, "*B T D"], keys: Float[Array, "*B S H"]
    ) -> Float[Array, "*B T S"]:
        """Computes the score of every query against every key."""
        raise NotImplementedError

    def near(
        self,
        x: Float[Array, "*B T D"],
        positions: Int[Array, "*B T"],
        memory: Memory,
        allowed: Bool[Array, "*#B T S"] | None,
    ) -> tuple[Bool[Array, "*#B T S"] | None, Float[Array, "*B T S"] | None]:
        """Returns the keys that a query may read and factors of their weights, or None; here, ``allowed``."""
        return allowed, None

    @on_any_mesh
    def memory(
        self,
        x: Float[Array, "*B S M"],
        *,
        positions: Int[Array, "*#B S"] | None = None,
        valid: Bool[Array, "*B S"] | None = None,
    ) -> Memory:
        """Makes a memory of keys [*B S 1 H], and the vectors of ``x`` as values [*B S 1 M]."""
        if positions is not None:
            positions = jnp.broadcast_to(positions, x.shape[:-1])
        keys = self.keys(x)
        return Memory(keys[..., None, :], x[..., None, :], valid=valid, positions=positions)

    @on_any_mesh
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        memory: Memory | Float[Array, "*C S M"] | None = None,
        mask: Mask | Bool[Array, "..."] | None = None,
        *,
        positions: Int[Array, "*#B T"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Reads ``memory`` with the queries of ``x``, as ``MultiHeadAttention`` does.

        Args:
          x: [*B T D], or [T D] for queries that read the memory of every example.
          memory: a result of ``memory``, or vectors; None is ``x`` itself.
          mask: the pairs of query and key that may attend, besides the memory's padding mask.
          positions: of the queries, for ``LocalAttention``; None is ``arange``.
          dropout_key: unused; these modules have no dropout.
          return_weights: also return the weights [*B 1 T S], float32.

        Returns:
          The weighted sum of the memory's vectors [*B T M], or a pair with the weights.

        Raises:
          ValueError: ``x`` has other batch axes than the memory, or the mask does not fit.
        """
        memory = self.memory(x) if memory is None else memory
        memory = memory if isinstance(memory, Memory) else self.memory(memory)
        keys, values = memory.keys[..., 0, :], memory.values[..., 0, :]
        batch, T = keys.shape[:-2], x.shape[-2]
        x = for_each_example(x, x.shape[:-2], batch)
        lead = x.shape[:-2]
        count = math.prod(lead[len(batch) :])
        mask = (Mask(()) if mask is None else as_mask(mask, memory.keys.ndim)) & memory.mask()
        mask, allowed = check_mask(mask, (*batch, 1, T, memory.size)), None
        if mask is not None:
            allowed = mask.block(jnp.arange(T), jnp.arange(memory.size))
            # A mask has an axis of one head, and is repeated for the further queries.
            allowed = jnp.broadcast_to(allowed, (*allowed.shape[:-2], T, memory.size))
            allowed = allowed if allowed.ndim == 2 else allowed[..., 0, :, :]
            allowed = jnp.concatenate([allowed] * count, axis=-2)
        x = x.reshape(*batch, count * T, x.shape[-1])
        # 0 times NaN is NaN, so infinite and NaN operands become 0 here, and their scores NaN, which the
        # mask can hide.
        poison = _poison(x)[..., :, None] + (_poison(keys) + _poison(values))[..., None, :]
        x, keys, values = (jnp.where(jnp.isfinite(a), a, 0) for a in (x, keys, values))
        # Queries are split, keys are not: XLA has summed wrongly where each split one of these axes.
        scores = placed(self.scores(x, keys).astype(jnp.float32) + poison, None)
        positions = jnp.arange(T) if positions is None else positions
        positions = jnp.broadcast_to(positions, (*lead, T)).reshape(x.shape[:-1])
        allowed, factors = self.near(x, positions, memory, allowed)
        weights = _softmax(scores, allowed)
        weights = weights if factors is None else weights * factors
        out = jnp.einsum("...ts,...sm->...tm", weights.astype(values.dtype), values)
        out = placed(out.reshape(*lead, T, out.shape[-1]), "embed")
        if not return_weights:
            return out
        return out, weights.reshape(*lead, T, memory.size)[..., None, :, :]


class AdditiveAttention(ScoredAttention):
    """A network with one hidden layer scores a query against a key: ``v . tanh(W q + U k)``.

    Args:
      dim: size of the queries, D.
      memory_dim: size of what is read, M; None is ``dim``.
      hidden: size of the hidden layer, H; None is ``dim``.
      dtype: computation dtype.

    Source: Bahdanau et al. 2015, section 3.1 and appendix A.1.2.
    """

    def __init__(
        self,
        dim: int,
        *,
        memory_dim: int | None = None,
        hidden: int | None = None,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        hidden = hidden or dim
        options: dict[str, Any] = dict(in_axes=("embed",), out_axes=("mlp",), dtype=dtype)
        self.query = linear(dim, hidden, **options, rngs=rngs)
        self.key = linear(memory_dim or dim, hidden, use_bias=False, **options, rngs=rngs)
        self.score = _vector(hidden, rngs)

    def keys(self, x: Float[Array, "*B S M"]) -> Float[Array, "*B S H"]:
        """Computes ``U k``."""
        return self.key(x)

    def scores(
        self, x: Float[Array, "*B T D"], keys: Float[Array, "*B S H"]
    ) -> Float[Array, "*B T S"]:
        """Computes ``v . tanh(W q + U k)`` in memory of T S H numbers."""
        return _additive(self.query(x), keys, self.score[...])


class LuongAttention(ScoredAttention):
    """Luong's scores: ``dot`` is q . k; ``general``, q . W k; ``concat``, v . tanh(W [q; k]).

    Args:
      dim: size of the queries, D.
      memory_dim: size of what is read, M; None is ``dim``.
      score: "dot", "general" or "concat".
      dtype: computation dtype.

    Raises:
      ValueError: the score is unknown; or it is "dot", and queries and keys differ in size.
    Source: Luong et al. 2015, section 3.1.
    """

    def __init__(
        self,
        dim: int,
        *,
        memory_dim: int | None = None,
        score: Score = "general",
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        memory_dim = memory_dim or dim
        if score not in ("dot", "general", "concat"):
            raise ValueError(f"score is {score!r}; expected 'dot', 'general' or 'concat'.")
        if score == "dot" and memory_dim != dim:
            raise ValueError(
                f"memory_dim is {memory_dim} and dim {dim}; 'dot' expects them to be equal: take 'general'."
            )
        options: dict[str, Any] = dict(in_axes=("embed",), out_axes=("mlp",), dtype=dtype)
        options |= dict(use_bias=False, rngs=rngs)
        concat = score == "concat"
        # W [q; k] is one matrix, in two parts.
        self.query = linear(dim, dim, **options) if concat else None
        self.key = None if score == "dot" else linear(memory_dim, dim, **options)
        self.score = _vector(dim, rngs) if concat else None

    def keys(self, x: Float[Array, "*B S M"]) -> Float[Array, "*B S D"]:
        """Computes ``W k``, or returns k."""
        return x if self.key is None else self.key(x)

    def scores(
        self, x: Float[Array, "*B T D"], keys: Float[Array, "*B S D"]
    ) -> Float[Array, "*B T S"]:
        """Computes the score of every query against every key."""
        if self.score is None:
            return jnp.einsum("...td,...sd->...ts", x, keys, preferred_element_type=jnp.float32)
        return _additive(self.query(x), keys, self.score[...])


class LocalAttention(LuongAttention):
    """Luong's local attention: a query reads the keys at most ``window`` places from a centre p.

        p = t, the position of the query                                                      local-m
        p = S sigmoid(v . tanh(W q)), weights times exp(-(s - p)^2 / (2 (window / 2)^2))       local-p

    s is the position of a key, S the number of keys that the masks allow. The sum of weights in "local-p" is
    less than 1.

    Args:
      dim, memory_dim, score, dtype: see ``LuongAttention``.
      window: places on either side of the centre, D in the paper.
      predicted: the centre is predicted, "local-p".

    Source: Luong et al. 2015, section 3.2.
    """

    def __init__(
        self,
        dim: int,
        *,
        memory_dim: int | None = None,
        score: Score = "general",
        window: int = 10,
        predicted: bool = True,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(dim, memory_dim=memory_dim, score=score, dtype=dtype, rngs=rngs)
        options: dict[str, Any] = dict(in_axes=("embed",), out_axes=("mlp",), use_bias=False)
        self.centre = linear(dim, dim, **options, dtype=dtype, rngs=rngs) if predicted else None
        self.centre_score = _vector(dim, rngs) if predicted else None
        self.window = window

    def near(
        self,
        x: Float[Array, "*B T D"],
        positions: Int[Array, "*B T"],
        memory: Memory,
        allowed: Bool[Array, "*#B T S"] | None,
    ) -> tuple[Bool[Array, "*#B T S"], Float[Array, "*B T S"] | None]:
        """Returns the keys in the window of each query, and the Gaussian of "local-p"."""
        keys = jnp.arange(memory.size) if memory.positions is None else memory.positions
        allowed = jnp.ones(memory.size, bool) if allowed is None else allowed
        if self.centre is None or self.centre_score is None:
            distance = keys[..., None, :] - positions[..., None]
            return allowed & (jnp.abs(distance) <= self.window), None
        centre = jnp.tanh(self.centre(x)) @ self.centre_score[...].astype(x.dtype)
        centre = allowed.sum(-1) * nnx.sigmoid(centre.astype(jnp.float32))
        distance = keys[..., None, :] - centre[..., None]
        factors = jnp.exp(-2 * (distance / self.window) ** 2)
        return allowed & (jnp.abs(distance) <= self.window), factors


def _vector(size: int, rngs: nnx.Rngs) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), (size,)) * size**-0.5, axes=("mlp",))


def _additive(queries: Array, keys: Array, score: Array) -> Float[Array, "*B T S"]:
    hidden = jnp.tanh(queries[..., :, None, :] + keys[..., None, :, :])
    return placed(hidden, None, "mlp") @ score.astype(hidden.dtype)


def _poison(x: Float[AnyArray, "*B X D"]) -> Float[Array, "*B X"]:
    """Returns NaN for each vector with a non-finite element, else 0."""
    return jax.lax.stop_gradient(x * 0).astype(jnp.float32).sum(-1)


def _softmax(
    scores: Float[Array, "*B T S"], allowed: Bool[Array, "*#B T S"] | None
) -> Float[Array, "*B T S"]:
    """Computes a masked softmax, 0 for a row without keys; its gradient has no NaN, as it has no -inf."""
    if allowed is None:
        return jax.nn.softmax(scores, axis=-1)
    lowest = jnp.finfo(scores.dtype).min
    peak = jnp.max(jnp.where(allowed, scores, lowest), axis=-1, keepdims=True)
    shifted = jnp.where(allowed, scores - jax.lax.stop_gradient(peak), 0.0)
    exponentials = jnp.where(allowed, jnp.exp(shifted), 0.0)
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / jnp.where(total == 0, 1.0, total)
