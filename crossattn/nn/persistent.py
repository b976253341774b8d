"""Persistent vectors: learnt keys and values that every query reads beside its memory, in one softmax.

    memory, S keys and values, masked ──┐
                                        ├─► softmax over S + P ─► sum of S + P values ─► head
    P learnt keys and values ───────────┘

    a = softmax([q k_1 ... q k_S, q c_1 ... q c_P] / sqrt(H));  o = sum_s a_s v_s + sum_p a_(S+p) u_p

Source: Sukhbaatar et al. 2019, "Augmenting Self-attention with Persistent Memory", section 4.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.ops.attend import run
from crossattn.ops.backends import warn_where_slow
from crossattn.ops.call import AttentionOutput
from crossattn.ops.memory import Memory
from crossattn.ops.parallel.merge import merge
from crossattn.types import AnyArray, Array, Float, Key


class PersistentVectors(nnx.Module):
    """Learnt keys and values of each head, which no mask hides and which have no position.

    Args:
      count: number of vectors of a head, P.
      num_kv_heads: key/value heads, K.
      head_dim: H.
      value_dim: size of a value head, Hv.

    Keys are multiplied by ``H ** 0.5`` and values by ``P ** 0.5``, for the variance of projected ones at
    initialisation and a higher rate of learning.

    Source: Sukhbaatar et al. 2019, "Augmenting Self-attention with Persistent Memory", section 4, with the
    factors of its experiments.
    """

    def __init__(
        self, count: int, num_kv_heads: int, head_dim: int, value_dim: int, *, rngs: nnx.Rngs
    ):
        keys = jax.random.normal(rngs.params(), (count, num_kv_heads, head_dim))
        values = jax.random.normal(rngs.params(), (count, num_kv_heads, value_dim))
        axes = (None, "kv_heads", "head_dim")
        self.keys = nnx.Param(keys * head_dim**-0.5, axes=axes)
        self.values = nnx.Param(values * count**-0.5, axes=axes)

    def memory(self, batch_shape: tuple[int, ...], dtype: Any = jnp.float32) -> Memory:
        """Returns the vectors as a memory [*B P K H], the same for every example."""
        P, _, H = self.keys.shape

        def repeated(vectors: Array, factor: float) -> Array:
            vectors = (vectors * factor).astype(dtype)
            return jnp.broadcast_to(vectors, (*batch_shape, *vectors.shape))

        return Memory(repeated(self.keys[...], H**0.5), repeated(self.values[...], P**0.5))

    def attend(
        self,
        unrotated: Float[AnyArray, "*B T N H"],
        q: Float[AnyArray, "*B T N H"],
        k: Float[AnyArray, "*B S K H"],
        v: Float[AnyArray, "*B S K Hv"],
        mask: Any = None,
        *,
        bias: Float[AnyArray, "..."] | None = None,
        dropout_key: Key[Array, ""] | None = None,
        return_weights: bool = False,
        backend: str | None = None,
        **options: Any,
    ) -> Any:
        """Computes ``attend`` over the keys k and the vectors; mask and bias are those of k.

        The vectors have no position: ``unrotated`` queries read them, and a text that begins later reads the
        same. They are a part of the memory that is merged by log-sum-exp, so that no cache is copied.

        Returns:
          The output [*B T N Hv]; or a pair with the weights [*B N T (S P)], those of k first.
        """
        own = self.memory(q.shape[:-3], q.dtype)
        keys = [None, None] if dropout_key is None else list(jax.random.split(dropout_key))
        parts: list[AttentionOutput] = []
        text, vectors = (q, k, v, mask), (unrotated, own.keys, own.values)
        for key, given, added in ((keys[0], text, bias), (keys[1], vectors, None)):
            ran = run(
                *given,
                backend=backend,
                bias=added,
                dropout_key=key,
                return_weights=return_weights,
                return_lse=True,
                wide=True,
                **options,
            )
            if ran.backend is not None:
                warn_where_slow(ran)
            parts.append(ran.attended)
        out, lse = merge(parts[0].out, parts[0].lse, parts[1].out, parts[1].lse)
        out = out.astype(q.dtype)
        if not return_weights:
            return out
        shares = [part.weights * jnp.exp(part.lse - lse)[..., None] for part in parts]
        return out, jnp.concatenate(shares, axis=-1)
