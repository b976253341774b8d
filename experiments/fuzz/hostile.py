"""JSON that nobody would write: of any type, deep, huge, with half surrogates; made small by hypothesis."""

import json
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

_KEYS = (
    "source", "target", "model_type", "d_model", "vocab_size", "weight_map", "metadata", "model", "vocab",
    "type", "added_tokens", "step", "loss", "kind", "seed", "data.name", "train.steps", "optim.name",
)  # fmt: skip
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([10**400, -(10**400), 1e308, float("nan"), float("inf")]),
    st.floats(),
    st.text(st.characters(), max_size=8),
    st.just("\ud800"),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(_KEYS), st.text(max_size=3)), inner, max_size=4),
    ),
    max_leaves=8,
)
_DEEP = st.sampled_from([1000, 100_000]).flatmap(
    lambda depth: st.sampled_from(
        ["[" * depth, "[" * depth + "]" * depth, '{"source":' * depth + "1" + "}" * depth]
    )
)
TEXTS = st.one_of(
    _VALUES.map(json.dumps),
    st.lists(_VALUES.map(json.dumps), min_size=1, max_size=30).map("\n".join),
    st.dictionaries(st.sampled_from(_KEYS), _VALUES, min_size=1).map(json.dumps),
    _DEEP,
    st.integers(4_290, 5_000).map(lambda digits: '{"vocab_size": ' + "9" * digits + "}"),
    st.text(max_size=20),
)


def check_texts(check: Callable[[str], None], number: int, most: int = 30) -> None:
    """``check`` of some texts, of which the smallest that it refuses raises."""

    @seed(number)
    @settings(
        max_examples=most,
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(TEXTS)
    def run(text: str) -> None:
        check(text)

    run()
