"""Bytes and JSON that nobody would write."""

import json

from hypothesis import strategies as st

_HOSTILE = (b"", b"\0" * 4, b"\xff" * 4, b"\xff\xff\xff\x7f", b"-1", b"99999999999", b"\0" * 4096)


def damaged(content):
    """Other bytes: cut, put in, put over, repeated, flipped or none; never the same."""
    at = st.integers(0, len(content))
    new = st.sampled_from(_HOSTILE) | st.binary(max_size=16)
    gone = st.sampled_from([0, 1, 4, 64, 4096, len(content)])
    flips = st.lists(st.integers(0, max(8 * len(content) - 1, 0)), min_size=1, max_size=8)
    return st.one_of(
        st.builds(lambda at, new, gone: content[:at] + new + content[at + gone :], at, new, gone),
        st.builds(lambda at: content[:at] + content[at : at + 100] + content[at:], at),
        flips.map(lambda bits: _flipped(content, bits)),
    ).filter(lambda other: other != content)


def _flipped(content, bits):
    other = bytearray(content)
    for bit in bits if content else ():
        other[bit // 8] ^= 1 << bit % 8
    return bytes(other)


_KEYS = (
    "source", "target", "model_type", "d_model", "vocab_size", "weight_map", "metadata", "model", "vocab",
    "type", "added_tokens", "step", "loss", "kind", "seed", "data.name", "train.steps", "optim.name",
)  # fmt: skip
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([10**400, -(10**400), 1e308, float("nan"), float("inf"), "\ud800"]),
    st.floats(),
    st.text(st.characters(), max_size=8),
)
_NAMES = st.sampled_from(_KEYS) | st.text(max_size=3)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=8,
)
_DEEP = st.sampled_from([1000, 100_000]).flatmap(
    lambda n: st.sampled_from(["[" * n, "[" * n + "]" * n, '{"source":' * n + "1" + "}" * n])
)
TEXTS = st.one_of(
    _VALUES.map(json.dumps),
    st.lists(_VALUES.map(json.dumps), min_size=1, max_size=30).map("\n".join),
    st.dictionaries(st.sampled_from(_KEYS), _VALUES, min_size=1).map(json.dumps),
    _DEEP,
    st.integers(4_290, 5_000).map(lambda digits: '{"vocab_size": ' + "9" * digits + "}"),
    st.text(max_size=20),
).map(lambda text: text.encode("utf-8", "surrogatepass"))
