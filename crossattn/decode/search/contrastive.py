"""Contrastive search: likely tokens whose vectors differ from those of all earlier tokens.

The candidates of a step are sequences of a row that all continue the chosen one.
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
from crossattn.decode.search.greedy import Progress, log_p_of
from crossattn.decode.states import method
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
    """Generates one hypothesis a row, of tokens that maximise ``(1 - alpha) p - alpha similarity``.

    ``similarity`` is the largest cosine between a candidate's vector and those of all tokens before it.

    Args:
      model: with ``decode_hidden``, which is ``decode_step`` before the output layer, and ``logits``. What
        passes between them is vectors, or arrays with the axes of tokens of which ``vectors`` are compared.
      states: made by the model's ``prefill`` for ``candidates`` sequences a row and
        ``GenerationConfig.cache_length + 1`` positions, since the last token is compared too.
      candidates: number of most likely tokens that are compared; 1 is greedy.
      alpha: 0 is greedy; larger repeats less.
      processors, capture, **config: as in ``greedy``, and so is the result.

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
    end = jax.lax.while_loop(_Contrasted.unfinished, search.advance, search.begin(states))
    return end.text.hypotheses(search.config)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Contrasted:
    """State of the loop, which has read the newest token.

    Attributes:
      vectors: vectors of all tokens, of unit length.
      logits, seen: logits of the next token, and the attention of the step that computed them.
    """

    text: Progress
    vectors: Float[Array, "B X D"]
    logits: Float[Array, "B V"]
    seen: Float[Array, "B 1 1 M N S"] | None

    def unfinished(self) -> Bool[Array, ""]:
        return self.text.unfinished()


@dataclass(frozen=True)
class _Contrast:
    model: Any
    config: GenerationConfig
    candidates: int
    alpha: float
    processors: tuple[LogitsProcessor, ...]
    capture: Capture | None

    def begin(self, states: Any) -> _Contrasted:
        """Reads the whole prefix."""
        config = self.config
        prefix = jnp.repeat(config.prefix[:, None], self.candidates, axis=1)
        hidden, states, [seen] = captured(
            self.model.decode_hidden, [self.capture], prefix, config.unread(states)
        )
        hidden = jax.tree.map(lambda x: x[:, 0], hidden)
        read = _vectors(hidden)
        seen = None if seen is None else seen[:, :1, -1:]
        weights = None if seen is None else jnp.repeat(0 * seen, config.max_new_tokens, axis=2)
        later = jnp.zeros((config.batch, config.max_new_tokens, read.shape[-1]), jnp.float32)
        return _Contrasted(
            text=Progress.begin(config, states, weights),
            vectors=jnp.concatenate([_unit(read), later], axis=1),
            logits=self.model.logits(jax.tree.map(lambda x: x[:, -1], hidden)).astype(jnp.float32),
            seen=seen,
        )

    def advance(self, run: _Contrasted) -> _Contrasted:
        """Reads the most likely tokens, and keeps one of each row."""
        config, text, put = self.config, run.text, jax.lax.dynamic_update_slice_in_dim
        logits = config.process(self.processors, run.logits[:, None], text.tokens, text.length)
        processed = logits[:, 0]
        best, tokens = topk.top_k(processed, self.candidates)
        hidden, states, [seen] = captured(
            self.model.decode_hidden,
            [self.capture],
            tokens[..., None].astype(jnp.int32),
            text.states,
        )
        hidden = jax.tree.map(lambda x: x[:, :, 0], hidden)
        log_p = best - jax.nn.logsumexp(processed, -1, keepdims=True)
        chosen = self._contrast(log_p, _vectors(hidden), run)

        def kept(x: Array) -> Array:
            return jnp.take_along_axis(x, chosen.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)

        token, hidden = kept(tokens)[:, 0], jax.tree.map(kept, hidden)
        log_p = log_p_of(run.logits, token)
        states = method(states, "select")(jnp.broadcast_to(chosen[:, None], tokens.shape))
        return _Contrasted(
            text=text.append(config, token.astype(jnp.int32), log_p, states, run.seen),
            vectors=put(run.vectors, _unit(_vectors(hidden)), text.length, axis=1),
            logits=self.model.logits(jax.tree.map(lambda x: x[:, 0], hidden)).astype(jnp.float32),
            seen=None if seen is None else kept(seen),
        )

    def _contrast(
        self, log_p: Float[Array, "B k"], hidden: Float[Array, "B k D"], run: _Contrasted
    ) -> Int[Array, " B"]:
        """Returns the number of the best candidate of each row."""
        cosines = jnp.einsum("bkd,bxd->bkx", _unit(hidden), run.vectors)
        positions = jnp.arange(run.vectors.shape[1])
        known = (positions < run.text.length) & (positions >= self.config.padding[:, None])
        similarity = jnp.where(known[:, None], cosines, -1.0).max(-1)
        worth = (1 - self.alpha) * jnp.exp(log_p) - self.alpha * similarity
        return jnp.argmax(jnp.where(log_p == -jnp.inf, -jnp.inf, worth), axis=-1)


def _vectors(hidden: Any) -> Float[Array, "*B D"]:
    """Returns the vectors that are compared, of ``decode_hidden``."""
    return getattr(hidden, "vectors", hidden)


def _unit(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    x = x.astype(jnp.float32)
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
