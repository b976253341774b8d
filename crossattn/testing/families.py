"""The named conformance cases of attend, family by family.

`allowed`, what the oracle believes is readable, is always built from plain numpy comparisons, never by
the masks under test.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from crossattn.ops import masks as mask_algebra
from crossattn.testing.case import KEY, QUERY, B, H, K, N, S, T, array, case, shaped

m: Any = mask_algebra  # the terms take numpy arrays too, which its types do not say


def shapes():
    """Yields T != S, Hv != H, grouped heads and any number of batch axes."""
    yield shaped("no_mask_at_all")
    yield shaped("no_batch_axis", batch=())
    yield shaped("two_batch_axes", batch=(2, 3))
    yield shaped("three_batch_axes", batch=(2, 1, 3))
    yield shaped("more_queries_than_keys", t=7, s=3)
    yield shaped("one_query", t=1)
    yield shaped("one_key", s=1)
    yield shaped("no_keys", s=0)
    yield shaped("no_queries", t=0)
    yield shaped("no_examples", batch=(0,))
    yield shaped("values_narrower_than_keys", hv=3)
    yield shaped("every_head_its_own_keys", k=4)
    yield shaped("all_heads_share_one_key_head", k=1)
    batched = np.arange(S) < np.array([[2, 7, 0], [1, 4, 6]])[..., None]
    yield shaped(
        "two_batch_axes_padded", batch=(2, 3), mask=m.key_padding(batched),
        allowed=batched[..., None, None, :],
    )  # fmt: skip
    yield shaped(
        "causal_without_batch_axis_more_queries", batch=(), t=7, s=3, mask=m.causal(),
        allowed=np.arange(3)[None, :] <= np.arange(7)[:, None],
    )  # fmt: skip


def masks():
    """Yields every term of the mask algebra, alone and combined, against comparisons of indices."""
    lengths, starts = np.array([3, 7]), np.array([0, 2])
    valid = np.array([[1, 0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1]], bool)
    q_segment_ids = np.array([[1, 1, 2, 2, 0], [1, 2, 2, 3, 3]])
    k_segment_ids = np.array([[1, 2, 2, 2, 0, 0, 1], [1, 1, 1, 2, 3, 0, 0]])
    q_positions = np.array([[0, 3, 1, 9, 4], [5, 4, 3, 2, 1]])
    k_positions = np.array([[0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0]])
    padded = (KEY < lengths[:, None])[:, None, None]
    same = q_segment_ids[:, :, None] == k_segment_ids[:, None, :]
    same = (same & (q_segment_ids > 0)[:, :, None])[:, None]
    by_position = (k_positions[:, None, :] <= q_positions[:, :, None])[:, None]
    moved = (KEY <= QUERY + starts[:, None, None])[:, None]
    near = (KEY >= QUERY - 2) & (KEY <= QUERY + 1)
    yield case("causal", m.causal(), KEY <= QUERY)
    yield case("causal_with_offset", m.causal(offset=2), KEY <= QUERY + 2)
    yield case("causal_with_offset_per_example", m.causal(offset=starts), moved)
    yield case("causal_before_every_key", m.causal(offset=-3), KEY <= QUERY - 3)
    positions = {"q_positions": q_positions, "k_positions": k_positions}
    yield case("causal_by_positions", m.causal(**positions), by_position)
    yield case("window", m.window(2, 1), near)
    yield case("window_to_the_left_only", m.window(None), KEY <= QUERY)
    yield case("prefix", m.prefix(lengths), padded)
    yield case("key_lengths", m.lengths(lengths), padded)
    rows = (QUERY[:, 0] < np.array([5, 2])[:, None])[:, None, :, None]
    yield case("key_and_query_lengths", m.lengths(lengths, np.array([5, 2])), padded & rows)
    yield case("key_padding", m.key_padding(valid), valid[:, None, None])
    yield case("segments", m.segments(q_segment_ids, k_segment_ids), same)
    yield case("causal_and_padding", m.causal() & m.lengths(lengths), padded & (KEY <= QUERY))
    either = padded | (KEY <= QUERY)
    yield case("causal_or_prefix", m.causal() | m.prefix(lengths), either)
    every = m.segments(q_segment_ids, k_segment_ids) & (m.causal(**positions) | m.window(2, 1))
    yield case("segments_and_either", every, same & (by_position | near))
    dense = array("allowed", B, N, T, S) > 0
    yield case("explicit_and_causal", m.explicit(dense) & m.causal(), dense & (KEY <= QUERY))


def masked_rows():
    """Yields queries that may read nothing."""
    dense = array("allowed", B, N, T, S) > 0
    dense[0, :, 2] = dense[:, 1, 4] = False
    yield case("some_rows_read_nothing", jnp.asarray(dense), dense)
    nothing = np.zeros((B, 1, 1, S), bool)
    yield case("no_row_reads_anything", jnp.asarray(nothing), nothing)
    nothing = np.zeros((B, 1, 1, S))
    yield case("additive_minus_infinity_everywhere", bias=np.float32(nothing - np.inf))
    late = KEY >= QUERY[::-1] + 3
    yield case("rows_read_nothing_under_softcap", jnp.asarray(late[None, None]), late,
               options={"softcap": 1.5}, bias=array("bias", 1, N, T, S))  # fmt: skip
    half = case("masked_row_of_bfloat16", jnp.asarray(dense), dense)
    yield _cast(half, jnp.bfloat16)


def broadcasting():
    """Yields masks and biases with axes of size 1."""
    for shape in [(1, 1, 1, 1), (B, 1, 1, S), (1, N, 1, 1), (1, 1, T, 1), (B, N, T, S)]:
        name = "x".join(map(str, shape))
        dense = array("allowed", *shape) > -0.5
        yield case(f"mask_{name}", jnp.asarray(dense), dense)
        yield case(f"bias_{name}", bias=array("bias", *shape))
    additive = np.where(KEY <= QUERY, 0, -np.inf).astype(np.float32)[None, None]
    yield case("additive_mask_is_a_mask", bias=additive)
    learnt = array("bias", 1, N, T, S)
    yield case("bias_and_mask", m.causal(), KEY <= QUERY, bias=learnt)
    yield case("bias_and_additive_mask", bias=learnt + additive)


def scale_and_softcap():
    """Yields logits that are scaled, then capped, before the bias is added."""
    yield case("scale", options={"scale": 0.7})
    yield case("negative_scale", options={"scale": -0.5})
    yield case("softcap", options={"softcap": 2.0}, bias=None)
    yield case("softcap_scale_and_causal", m.causal(), KEY <= QUERY,
               options={"softcap": 0.5, "scale": 3.0})  # fmt: skip
    additive = np.where(KEY <= QUERY, 0, -np.inf).astype(np.float32)[None, None]
    yield case("softcap_keeps_the_additive_mask", bias=additive, options={"softcap": 2.0})
    yield case("softcap_then_bias", bias=array("bias", 1, N, T, S), options={"softcap": 1.0})


def large():
    """Yields logits with which a careless softmax overflows."""
    # whole numbers, so that float32 holds even the largest logit exactly
    q, k = np.rint(2 * array("q", B, T, N, H)), np.rint(2 * array("k", B, S, K, H))
    scaled = {"q": 100 * q, "k": 100 * k, "options": {"scale": 1.0}}
    yield case("logits_of_ten_thousands", **scaled)
    yield case("logits_of_ten_thousands_causal", m.causal(), KEY <= QUERY, **scaled)
    all_low = {**scaled, "k": -np.abs(scaled["k"]) - 100, "q": np.abs(scaled["q"]) + 100}
    yield case("every_logit_far_below_zero", **all_low)
    steep = np.float32(1e5 * (KEY % 2) * np.ones((1, 1, T, 1)))
    yield case("bias_of_a_hundred_thousand", q=q, k=k, bias=steep, options={"scale": 1.0})


def poison():
    """Yields NaN and Inf that nobody may read, or that only some queries may not."""
    lengths = np.array([3, 5])
    short = m.lengths(lengths)
    padded = (KEY < lengths[:, None])[:, None, None]
    beyond = np.arange(S) >= lengths[:, None]
    for name, bad in [("nan", np.nan), ("inf", np.inf), ("minus_inf", -np.inf)]:
        yield _poisoned(f"{name}_in_padding", bad, beyond, short, padded)
    future = np.arange(S)[None] >= np.array([[3], [T]])
    for where in ["k", "v"]:
        for name, bad in [("nan", np.nan), ("inf", np.inf)]:
            yield _poisoned(f"{name}_in_future_{where}", bad, future, m.causal(),
                            KEY <= QUERY, where)  # fmt: skip
    never = np.arange(S) >= np.full((B, 1), T)
    yield _poisoned("nan_beyond_the_last_query", np.nan, never, m.causal(), KEY <= QUERY)
    nowhere, all_keys = np.zeros((B, 1, 1, S), bool), np.ones((B, S), bool)
    mask = jnp.asarray(nowhere)
    yield _poisoned("nan_in_all_that_nobody_reads", np.nan, all_keys, mask, nowhere)
    additive = np.where(padded, 0, -np.inf).astype(np.float32)
    yield _poisoned("nan_under_the_additive_mask", np.nan, beyond, None, None, bias=additive)
    learnt = array("bias", 1, N, T, S)
    yield _poisoned("nan_in_padding_with_bias_and_softcap", np.nan, beyond, short, padded,
                    bias=learnt, options={"softcap": 2.0})  # fmt: skip
    one_head = np.ones((1, N, 1, S), bool)
    one_head[0, :2, 0, 4:] = False
    tail = np.broadcast_to(np.arange(S) >= 4, (B, S))
    yield _poisoned("nan_seen_by_other_heads_only", np.nan, tail, jnp.asarray(one_head), one_head)
    reads = np.arange(T) < np.array([T, 2])[:, None]
    q = np.where(reads[..., None, None], array("q", B, T, N, H), np.nan).astype(np.float32)
    only = m.lengths(np.array([S, S]), np.array([T, 2]))
    yield case("nan_in_a_query_that_reads_nothing", only, reads[:, None, :, None], q=q)
    spoilt = _poisoned("nan_in_padding_of_bfloat16", np.nan, beyond, short, padded)
    yield _cast(spoilt, jnp.bfloat16)


def narrow():
    """Yields narrow inputs, float32 inside: the oracle reads the rounded inputs."""
    yield _cast(case("bfloat16"), jnp.bfloat16)
    causal = case("bfloat16_causal_with_bias", m.causal(), KEY <= QUERY)
    yield _cast(dataclasses.replace(causal, bias=array("bias", 1, N, T, S)), jnp.bfloat16)
    yield _cast(shaped("bfloat16_many_keys", batch=(1,), t=2, s=300, n=2, k=1), jnp.bfloat16)
    q, k = 300 * np.ones((B, T, N, H)), 200 * np.rint(2 * array("k", B, S, K, H))
    wide = case("float16_logits_beyond_its_range", q=q, k=k, options={"scale": 1.0})
    yield dataclasses.replace(_cast(wide, jnp.float16), gradients=False)
    memory = _cast(case("float32_queries_of_a_bfloat16_memory"), jnp.bfloat16)
    yield dataclasses.replace(memory, q=array("q", B, T, N, H))


def _poisoned(name, bad, where, mask, allowed, arrays="kv", **changes):
    """Returns a case whose keys and/or values are `bad` at the positions `where` Bool [B S]."""
    spoilt = {"k": array("k", B, S, K, H), "v": array("v", B, S, K, H)}
    for key in arrays:
        spoilt[key][where] = bad
    return case(name, mask, allowed, **spoilt, **changes)


def _cast(one, dtype):
    """Returns the case with q, k and v rounded to a dtype; the bias stays float32."""
    narrow = {name: np.asarray(getattr(one, name)).astype(dtype) for name in "qkv"}
    return dataclasses.replace(one, **narrow)
