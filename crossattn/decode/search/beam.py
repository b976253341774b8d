"""Beam search in one ``while_loop``: penalties of length and coverage, diverse groups, an early stop."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.decode.capture import Capture, captured, empty_weights
from crossattn.decode.config import GenerationConfig
from crossattn.decode.hypotheses import Hypotheses
from crossattn.decode.logits import topk
from crossattn.decode.logits.processors import LogitsProcessor
from crossattn.decode.search.penalties import Coverage, Penalty, gnmt
from crossattn.decode.search.stopping import EXACT, Stopping
from crossattn.decode.states import DecodeStep, method, source_valid
from crossattn.ops.promotion import as_written
from crossattn.types import Array, Bool, Float, Int

_NEVER = -1e9


@as_written
def beam_search(
    decode_step: DecodeStep,
    states: Any,
    *,
    num_beams: int,
    length_penalty: float | Penalty = 0.6,
    coverage: Coverage | None = None,
    stopping: Stopping = EXACT,
    num_beam_groups: int = 1,
    diversity_penalty: float = 0.5,
    processors: Sequence[LogitsProcessor] = (),
    capture: Capture | None = None,
    **config: Any,
) -> Hypotheses:
    """Searches for the ``num_beams`` best hypotheses a row, best first.

    A hypothesis of n tokens scores ``log p / ((5 + n) / 6) ** length_penalty``, or ``log p`` divided by
    another ``Penalty``, plus the cost of ``coverage``.

    Args:
      decode_step, capture, **config: as in ``greedy``.
      states: made by the model's ``prefill`` for ``num_beams`` sequences a row and
        ``GenerationConfig.cache_length`` positions.
      num_beams: J.
      length_penalty: alpha; 0 compares log-probabilities, larger favours longer hypotheses.
      coverage: cost of source words without attention.
      stopping: rule by which a row is done; ``stopping.transformers()`` is that of the library.
      num_beam_groups: groups of beams that search independently, except that a token loses
        ``diversity_penalty`` for each beam of an earlier group that chose it at the same step.
        Source: Vijayakumar et al. 2018.
      processors: logits processors, applied in order to log-probabilities.

    Raises:
      ValueError: the groups do not divide the beams.
    Source: Wu et al. 2016, "GNMT", section 7.
    """
    if num_beams < 1 or num_beam_groups < 1 or num_beams % num_beam_groups:
        raise ValueError(
            f"num_beams is {num_beams}, num_beam_groups {num_beam_groups}; expected a multiple of the groups."
        )
    penalty = length_penalty if callable(length_penalty) else gnmt(length_penalty)
    search = _BeamSearch(
        decode_step, GenerationConfig(**config), num_beams, penalty, coverage, stopping,
        num_beam_groups, diversity_penalty, tuple(processors), capture,
    )  # fmt: skip
    end = jax.lax.while_loop(search.unfinished, search.advance, search.begin(states))
    return search.finish(end)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Candidates:
    """Hypotheses, live or finished.

    Attributes:
      lengths: number of generated tokens.
      parents: of live ones, the beam that each continues.
      path: beam that read each input token, where attention is captured.
    """

    scores: Float[Array, "B C"]
    lengths: Int[Array, "B C"]
    tokens: Int[Array, "B C X"]
    parents: Int[Array, "B C"] | None
    path: Int[Array, "B C X"] | None
    covered: Float[Array, "B C S"] | None

    def pick(self, index: Int[Array, "B J"]) -> "_Candidates":
        rows = lambda x: index.reshape(*index.shape, *(1,) * (x.ndim - 2))  # noqa: E731
        return jax.tree.map(lambda x: jnp.take_along_axis(x, rows(x), axis=1), self)

    def best(self, scores: Float[Array, "B C"], count: int) -> "_Candidates":
        """Picks the ``count`` best by other scores, which replace theirs."""
        scores, index = jax.lax.top_k(scores, count)
        return replace(self.pick(index), scores=scores)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Beams:
    """J live prefixes and the J best finished hypotheses of each row; ``open`` groups continue."""

    length: Int[Array, ""]
    live: _Candidates
    done: _Candidates
    open: Bool[Array, "B G"]
    states: Any
    weights: Float[Array, "B J T M N S"] | None


@dataclass(frozen=True)
class _BeamSearch:
    decode_step: DecodeStep
    config: GenerationConfig
    num_beams: int
    penalty: Penalty
    coverage: Coverage | None
    stopping: Stopping
    num_beam_groups: int
    diversity_penalty: float
    processors: tuple[LogitsProcessor, ...]
    capture: Capture | None

    def begin(self, states: Any) -> _Beams:
        """Starts with one live prefix a group, since its beams are still equal."""
        config, B, J = self.config, self.config.batch, self.num_beams
        tokens = config.tokens(J)
        first = jnp.arange(J) % (J // self.num_beam_groups) == 0
        covered = None
        if self.coverage is not None:
            covered = jnp.zeros((B, J, source_valid(states).shape[-1]))
        scores = jnp.tile(jnp.where(first, 0.0, _NEVER), (B, 1))
        lengths, parents = jnp.zeros((B, J), jnp.int32), self._beam_numbers()
        path = None if self.capture is None else jnp.zeros_like(tokens)
        weights = empty_weights(
            self.decode_step, self.capture, states, (B, J), config.max_new_tokens
        )
        return _Beams(
            length=jnp.int32(config.start),
            live=_Candidates(scores, lengths, tokens, parents, path, covered),
            done=_Candidates(jnp.full((B, J), _NEVER), lengths, tokens, None, path, None),
            open=jnp.broadcast_to(config.row_limits()[:, None] > 0, (B, self.num_beam_groups)),
            states=config.read_prefix(self.decode_step, states, J),
            weights=weights,
        )

    def unfinished(self, loop: _Beams) -> Bool[Array, ""]:
        """Returns whether a row may still find better hypotheses."""
        return (loop.length < loop.live.tokens.shape[-1]) & jnp.any(loop.open)

    def advance(self, loop: _Beams) -> _Beams:
        """Extends every live prefix by one token."""
        live, logits, states, seen = self._read(loop)
        log_z = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        if self.processors:
            logits = self.config.process(self.processors, logits - log_z, live.tokens, loop.length)
            log_z = jnp.zeros_like(log_z)
        count, size = loop.length + 1 - self.config.start, self.num_beams // self.num_beam_groups
        taken, parts = None, []
        if self.num_beam_groups > 1:
            taken = jnp.zeros((logits.shape[0], 1, logits.shape[-1]))
        for group in range(self.num_beam_groups):
            own = slice(group * size, (group + 1) * size)
            mine, done = (jax.tree.map(lambda x, own=own: x[:, own], f) for f in (live, loop.done))
            children = self._children(mine, logits[:, own], log_z[:, own], taken, loop.length)
            mine, done = self._sort(children, done, loop.open[:, group], loop)
            if taken is not None:
                newest = _at(mine.tokens, loop.length)
                taken = taken + jax.nn.one_hot(newest, logits.shape[-1]).sum(1, keepdims=True)
            parts.append((mine, done))
        live, done = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)

        weights: Any = loop.weights
        if seen is not None:
            weights = jax.lax.dynamic_update_slice_in_dim(weights, seen, count - 1, axis=2)
        still_open = loop.open & self._open(live, done, count)
        states = method(states, "select")(live.parents)
        return _Beams(loop.length + 1, live, done, still_open, states, weights)

    def finish(self, loop: _Beams) -> Hypotheses:
        """Merges the hypotheses of the groups, each with the attention on its own path."""
        start, done = self.config.start, loop.done
        if self.num_beam_groups > 1:
            done = done.best(done.scores, self.num_beams)
        weights = loop.weights
        if weights is not None:
            path: Any = done.path
            path = path[:, :, start - 1 : -1, None, None, None]
            weights = jnp.take_along_axis(weights, path, axis=1)
        scores = jnp.where(_real(done.scores), done.scores, -jnp.inf)
        return Hypotheses.of(done.tokens[..., start:], scores, done.lengths, weights)

    def _read(self, loop: _Beams) -> tuple[_Candidates, Float[Array, "B J V"], Any, Any]:
        """Reads the last tokens: live prefixes with paths and coverage; logits, states, attention."""
        index, live, numbers = loop.length - 1, loop.live, self._beam_numbers()
        path = None if live.path is None else _put(live.path, numbers, index)
        cover = None if self.coverage is None else self.coverage.attention
        logits, states, [seen, covering] = captured(
            self.decode_step,
            [self.capture, cover],
            _at(live.tokens, index)[..., None],
            loop.states,
        )
        covered = None if cover is None else live.covered + covering[:, :, 0].mean((-3, -2))
        live = replace(live, parents=numbers, path=path, covered=covered)
        return live, logits[:, :, 0].astype(jnp.float32), states, seen

    def _beam_numbers(self) -> Int[Array, "B J"]:
        return jnp.broadcast_to(jnp.arange(self.num_beams), (self.config.batch, self.num_beams))

    def _children(
        self,
        live: _Candidates,
        logits: Float[Array, "B J V"],
        log_z: Float[Array, "B J 1"],
        taken: Float[Array, "B 1 V"] | None,
        length: Int[Array, ""],
    ) -> _Candidates:
        """Returns the best continuations of a row, enough that J are live after any that end."""
        B, V = logits.shape[0], logits.shape[-1]
        count = max(2, 1 + len(self.config.ends)) * live.scores.shape[1]
        penalised = logits if taken is None else logits - self.diversity_penalty * taken
        # Each beam by itself first: a search over J * V candidates would take most of the time.
        best, tokens = topk.top_k(penalised, min(count, V))
        worth = best if taken is None else jnp.take_along_axis(logits, tokens, axis=-1)
        before = live.scores[..., None] - log_z
        best, scores = ((before + x).reshape(B, -1) for x in (best, worth))
        _, index = jax.lax.top_k(best, min(count, best.shape[1]))
        children = live.pick(index // tokens.shape[-1])
        chosen = jnp.take_along_axis(tokens.reshape(B, -1), index, axis=1)
        return replace(
            children,
            scores=jnp.take_along_axis(scores, index, axis=1),
            lengths=children.lengths + 1,
            tokens=_put(children.tokens, chosen.astype(jnp.int32), length),
        )

    def _sort(
        self, children: _Candidates, done: _Candidates, open: Bool[Array, " B"], loop: _Beams
    ) -> tuple[_Candidates, _Candidates]:
        """Returns the best children that stay live, and the best hypotheses with those that end."""
        size, count = done.scores.shape[1], loop.length + 1 - self.config.start
        ended = self.config.ended(_at(children.tokens, loop.length))
        ended = ended | (count >= self.config.row_limits()[:, None])
        live = children.best(jnp.where(ended, _NEVER, children.scores), size)

        counts = ended & _real(children.scores) & open[:, None]
        if self.stopping.among_beams:
            counts = counts & (jnp.arange(counts.shape[1]) < size)
        worth = children.scores / self.penalty(count.astype(jnp.float32))
        if self.coverage is not None:
            covered: Any = children.covered
            worth = worth + self.coverage.cost(covered, source_valid(loop.states))
        both = jax.tree.map(
            lambda *x: jnp.concatenate(x, axis=1),
            done,
            replace(children, parents=None, covered=None),
        )
        worth = jnp.concatenate([done.scores, jnp.where(counts, worth, _NEVER)], axis=1)
        return live, both.best(worth, size)

    def _open(
        self, live: _Candidates, done: _Candidates, count: Int[Array, ""]
    ) -> Bool[Array, "B G"]:
        """Returns which groups of each row may still find better hypotheses."""
        shape = (live.scores.shape[0], self.num_beam_groups, -1)
        alive, worth = live.scores.reshape(shape), done.scores.reshape(shape)
        limits = self.config.row_limits()[:, None].astype(jnp.float32)
        filled = _real(worth[..., -1])
        count = count.astype(jnp.float32)
        return self.stopping.open(alive, worth, filled, count, limits, self.penalty)


def _real(scores: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Returns which scores are of hypotheses that exist."""
    return scores > _NEVER / 2


def _at(x: Int[Array, "B C X"], index: Int[Array, ""]) -> Int[Array, "B C"]:
    return jax.lax.dynamic_index_in_dim(x, index, axis=2, keepdims=False)


def _put(x: Int[Array, "B C X"], new: Int[Array, "B C"], index: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, new[..., None], index, axis=2)
