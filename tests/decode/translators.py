"""Tiny translators and language models that end their sentences now and then, for tests."""

import numpy as np

import crossattn as xa
from crossattn.models import Decoder, Transformer, decoder, transformer
from tests import numpy_model as oracle

from .markov import EOS

V, LENGTH = 16, 7
RNG = np.random.default_rng(0)
SOURCE = RNG.integers(3, V, (3, 6)).astype(np.int32)
SEGMENTS = (np.arange(6) < np.array([[6], [4], [5]])).astype(np.int32)


def translator(seed=17, **changes):
    """(build, params); padding is never the most likely token, and some sentences end early."""
    config = transformer.tiny(**dict(vocab_size=V, encoder_layers=1, tie_output=False, **changes))
    build = lambda rngs: Transformer(config, rngs=rngs)  # noqa: E731
    return build, speaking(oracle.random_params(build, seed=seed))


def language_model(seed=0, **changes):
    """(build, params)."""
    config = decoder.tiny(**dict(vocab_size=V, tie_output=False, **changes))
    build = lambda rngs: Decoder(config, rngs=rngs)  # noqa: E731
    return build, speaking(oracle.random_params(build, seed=seed))


def speaking(params):
    """Logits of padding and of the beginning low, of the end a little higher."""
    bias, table = params["decoder"]["norm"]["bias"], params["output"]["table"]
    table[[0, 1]] = -4 * bias
    table[EOS] += 0.5 * bias
    return params


def bound(pair):
    return xa.functional.bind(*pair)
