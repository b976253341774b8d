"""Contrastive search: likely tokens whose vectors are unlike those of what was said before.

The candidates of a step are sequences of a row that all go on from the chosen one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.decode.capture import Capture, captured
from crossattn.decode.config import GenerationConfig
from crossattn.decode.hypotheses import Hypotheses
from crossattn.decode.logits import topk
from crossattn.decode.logits.processors import LogitsProcessor
from crossattn.decode.search.greedy import log_p_of
from crossattn.decode.states import select
from crossattn.ops.promotion import as_written
from crossattn.types import Array, Bool, Float, Int


@as_written
def contrastive_search(
    model: Any,
    states: Any,
    *,
    candidates: int = 4,
    alpha: float = 0.6,
    processors: Sequence[LogitsProcessor] = (),
    capture: Capture | None = None,
    **config: Any,
) -> Hypotheses:
    """One hypothesis a row, of tokens that maximise ``(1 - alpha) p - alpha similarity``.

    ``similarity`` is the largest cosine between a candidate's vector and those of all tokens before it.

    Args:
      model: with ``decode_hidden``, which is ``decode_step`` before the output layer, and ``logits``.
      states: what the model's ``prefill`` made for ``candidates`` sequences a row and
        ``GenerationConfig.cache_length + 1`` positions, for the last token is read too, to be compared.
      candidates: the k most likely tokens are compared; 1 is greedy.
      alpha: 0 is greedy; larger repeats less.
      processors: what to forbid or reweigh.
      capture: which cross-attention to return.
      **config: ``batch`` and ``max_new_tokens``, and what else ``GenerationConfig`` has.

    Returns:
      Hypotheses with J = 1; the score is the sum of the model's own log-probabilities.

    Raises:
      ValueError: candidates or alpha are out of range, or the model has no vectors to compare.
    Source: Su et al. 2022, equation 5.
    """
    if candidates < 1 or not 0 <= alpha <= 1:
        raise ValueError(
            f"candidates is {candidates}, alpha {alpha}; expected 1 or more, and 0 to 1."
        )
    if not hasattr(model, "decode_hidden"):
        raise ValueError(
            f"contrastive search compares the vectors behind tokens, but {type(model).__name__} has no "
            "decode_hidden(); decode with candidates=1."
        )
    search = _Contrast(
        model, GenerationConfig(**config), candidates, alpha, tuple(processors), capture
    )
    end = jax.lax.while_loop(search.unfinished, search.advance, search.begin(states))
    tokens = end.tokens[..., search.config.start :]
    return Hypotheses.of(tokens, end.scores[:, None], end.lengths[:, None], end.weights)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Contrasted:
    """Where the loop stands: the newest token is read already.

    Attributes:
      lengths: how many tokens of each row were generated, its end included.
      vectors: [B X D], of unit length.
      logits, seen: of the next token, and the attention that made them.
    """

    length: Int[Array, ""]
    tokens: Int[Array, "B 1 X"]
    vectors: Float[Array, "B X D"]
    logits: Float[Array, "B V"]
    scores: Float[Array, " B"]
    lengths: Int[Array, " B"]
    done: Bool[Array, " B"]
    states: Any
    seen: Float[Array, "B 1 1 M N S"] | None
    weights: Float[Array, "B 1 T M N S"] | None


@dataclass(frozen=True)
class _Contrast:
    model: Any
    config: GenerationConfig
    candidates: int
    alpha: float
    processors: tuple[LogitsProcessor, ...]
    capture: Capture | None

    def begin(self, states: Any) -> _Contrasted:
        """The whole prefix read."""
        config, B = self.config, self.config.batch
        prefix = jnp.repeat(config.prefix[:, None], self.candidates, axis=1)
        hidden, states, [seen] = captured(
            self.model.decode_hidden, [self.capture], prefix, config.unread(states)
        )
        hidden, tokens = hidden[:, 0], config.tokens(1)
        seen = None if seen is None else seen[:, :1, -1:]
        later = jnp.zeros((B, config.max_new_tokens, hidden.shape[-1]), jnp.float32)
        return _Contrasted(
            length=jnp.int32(config.start),
            tokens=tokens,
            vectors=jnp.concatenate([_unit(hidden), later], axis=1),
            logits=self.model.logits(hidden[:, -1]).astype(jnp.float32),
            scores=jnp.zeros((B,), jnp.float32),
            lengths=jnp.zeros((B,), jnp.int32),
            done=jnp.broadcast_to(config.row_limits() < 1, (B,)),
            states=states,
            seen=seen,
            weights=None if seen is None else jnp.repeat(0 * seen, config.max_new_tokens, axis=2),
        )

    def unfinished(self, run: _Contrasted) -> Bool[Array, ""]:
        """Whether a row lacks its end."""
        return (run.length < run.tokens.shape[-1]) & ~jnp.all(run.done)

    def advance(self, run: _Contrasted) -> _Contrasted:
        """Tries the likeliest tokens, and keeps one of each row."""
        config, k, put = self.config, self.candidates, jax.lax.dynamic_update_slice_in_dim
        processed = config.process(self.processors, run.logits[:, None], run.tokens, run.length)[
            :, 0
        ]
        best, tokens = topk.top_k(processed, k)
        hidden, states, [seen] = captured(
            self.model.decode_hidden,
            [self.capture],
            tokens[..., None].astype(jnp.int32),
            run.states,
        )
        hidden = hidden[:, :, 0]
        chosen = self._contrast(best - jax.nn.logsumexp(processed, -1, keepdims=True), hidden, run)

        def kept(x: Array) -> Array:
            return jnp.take_along_axis(x, chosen.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)

        token = jnp.where(run.done, config.pad_id, kept(tokens)[:, 0].astype(jnp.int32))
        log_p = log_p_of(run.logits, kept(tokens)[:, 0])
        count = run.length - config.start
        weights: Any = run.weights
        latest: Any = run.seen
        return _Contrasted(
            length=run.length + 1,
            tokens=put(run.tokens, token[:, None, None], run.length, axis=2),
            vectors=put(run.vectors, _unit(kept(hidden)), run.length, axis=1),
            logits=self.model.logits(kept(hidden)[:, 0]).astype(jnp.float32),
            scores=jnp.where(run.done, run.scores, run.scores + log_p),
            lengths=run.lengths + ~run.done,
            done=run.done | config.ended(token) | (count + 1 >= config.row_limits()),
            states=select(states, jnp.broadcast_to(chosen[:, None], tokens.shape)),
            seen=None if seen is None else kept(seen),
            weights=None if seen is None else put(weights, latest, count, axis=2),
        )

    def _contrast(
        self, log_p: Float[Array, "B k"], hidden: Float[Array, "B k D"], run: _Contrasted
    ) -> Int[Array, " B"]:
        """The best candidate of each row."""
        cosines = jnp.einsum("bkd,bxd->bkx", _unit(hidden), run.vectors)
        positions = jnp.arange(run.vectors.shape[1])
        known = (positions < run.length) & (positions >= self.config.padding[:, None])
        similarity = jnp.where(known[:, None], cosines, -1.0).max(-1)
        worth = (1 - self.alpha) * jnp.exp(log_p) - self.alpha * similarity
        return jnp.argmax(jnp.where(log_p == -jnp.inf, -jnp.inf, worth), axis=-1)


def _unit(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    x = x.astype(jnp.float32)
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
