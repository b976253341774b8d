"""MiniLM as an embedder: similarities that its publisher documents."""

import numpy as np
import pytest

from crossattn.data import fetch
from experiments.minilm import MiniLM

pytestmark = pytest.mark.skipif(
    not (fetch.cache_dir() / "weights" / "minilm-l6-v2").is_dir(),
    reason="not fetched yet: python -m experiments.fetch_weights minilm",
)
SENTENCES = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
]


def test_vectors_have_the_similarities_that_sentence_transformers_documents():
    """Those that its quickstart prints for all-MiniLM-L6-v2, to four digits."""
    vectors = MiniLM()(SENTENCES)
    expected = [[1, 0.6660, 0.1046], [0.6660, 1, 0.1411], [0.1046, 0.1411, 1]]
    np.testing.assert_allclose(vectors @ vectors.T, expected, atol=1e-4)


def test_a_vector_does_not_depend_on_the_texts_beside_it():
    embed = MiniLM()
    long = " ".join(SENTENCES * 12)
    together = embed([long, *SENTENCES, *[long] * 70])
    np.testing.assert_allclose(together[1:4], embed(SENTENCES), atol=1e-5)
    assert len(np.unique(together[4:].round(4), axis=0)) == 1
