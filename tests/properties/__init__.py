"""Examples of hypothesis: the same few in every run of the tests, many new ones in ``make fuzz``."""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

generators = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def examples(count):
    """So many examples for a property; twenty times as many in ``make fuzz``."""
    many = count * settings.default.max_examples // 100
    return settings(max_examples=many, suppress_health_check=list(HealthCheck))
