"""The layer beside a translator that scores words without context."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.models.transformer import tiny
from experiments.tasks.lexicon import TransformerWithLexicon
from tests import numpy_model as oracle

SOURCE = np.random.default_rng(0).integers(3, 64, (2, 6))


@pytest.mark.parametrize("config", [tiny(), tiny(source_vocab_size=64)])
def test_word_scores_are_log_probabilities_of_single_words(config):
    build = lambda rngs: TransformerWithLexicon(config, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    every = jnp.broadcast_to(jnp.arange(config.vocab_size), (2, config.vocab_size))
    scores = jax.jit(lambda source: xa.apply(build, params, source, every, method="word_scores"))
    found = scores(SOURCE)
    assert found.shape == (2, 64, 6)
    np.testing.assert_allclose(np.exp(found).sum(1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(scores(SOURCE[:, ::-1]), found[:, :, ::-1], rtol=1e-5)
