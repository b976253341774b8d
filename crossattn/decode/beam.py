"""Beam search in one ``while_loop``: penalties of length and coverage, groups that differ, an early stop.

Nothing large is ever moved: sources are read once and shared by the beams of a row, and a cache stays
where it was written. A beam carries its *path* instead: which place among the beams made each step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.decode import topk
from crossattn.decode.capture import Capture, captured, room_for
from crossattn.decode.hypotheses import Hypotheses
from crossattn.decode.penalties import Coverage, Penalty, gnmt
from crossattn.decode.processors import Processor
from crossattn.decode.states import StepFn, source_valid, with_ancestors
from crossattn.decode.stopping import EXACT, Stopping
from crossattn.decode.target import Target
from crossattn.ops.promotion import as_written
from crossattn.types import Array, Bool, Float, Int

_NEVER = -1e9


@as_written
def beam_search(
    step: StepFn,
    states: Any,
    *,
    beams: int,
    length_penalty: float | Penalty = 0.6,
    coverage: Coverage | None = None,
    stopping: Stopping = EXACT,
    groups: int = 1,
    diversity: float = 0.5,
    processors: Sequence[Processor] = (),
    capture: Capture | None = None,
    **target: Any,
) -> Hypotheses:
    """The ``beams`` best hypotheses a row, best first.

    A hypothesis of n tokens scores ``log p / ((5 + n) / 6) ** length_penalty``, or ``log p`` divided by
    another ``Penalty``, plus the cost of ``coverage``.

    Args:
      step: a model's next-token function.
      states: what the model's ``start`` made for ``beams`` beams and ``Target.room`` positions.
      beams: J.
      length_penalty: alpha; 0 compares log-probabilities, larger favours longer hypotheses.
      coverage: a cost for what was not attended to.
      stopping: when a row is done; ``stopping.transformers()`` does as that library does.
      groups: J / groups beams search by themselves in each group; a token that earlier groups chose at
        this step loses ``diversity`` for each time. Source: Vijayakumar et al. 2018.
      processors: what to forbid or reweigh; they get log-probabilities.
      capture: which cross-attention to return.
      **target: ``batch`` and ``max_length``, and what else ``Target`` has.

    Raises:
      ValueError: the beams do not divide into the groups.
    Source: Wu et al. 2016, "GNMT", section 7.
    """
    if beams < 1 or groups < 1 or beams % groups:
        raise ValueError(f"beams is {beams}, groups {groups}; expected a multiple of the groups.")
    penalty = length_penalty if callable(length_penalty) else gnmt(length_penalty)
    search = _BeamSearch(
        step, Target(**target), beams, penalty, coverage, stopping, groups, diversity,
        tuple(processors), capture,
    )  # fmt: skip
    end = jax.lax.while_loop(search.unfinished, search.advance, search.begin(states))
    return search.finish(end)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Found:
    """Hypotheses, live or finished.

    Attributes:
      lengths: how many tokens were generated; of live ones, all that the loop has taken.
      path: the beam that read each input token.
    """

    scores: Float[Array, "B C"]
    lengths: Int[Array, "B C"]
    tokens: Int[Array, "B C X"]
    path: Int[Array, "B C X"]
    covered: Float[Array, "B C S"] | None

    def pick(self, index: Int[Array, "B J"]) -> "_Found":
        """Those with these numbers."""

        def rows(x: Array) -> Array:
            return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)

        return jax.tree.map(rows, self)

    def best(self, scores: Float[Array, "B C"], count: int) -> "_Found":
        """The ``count`` best by other scores, which become theirs."""
        scores, index = jax.lax.top_k(scores, count)
        return replace(self.pick(index), scores=scores)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Beams:
    """J live prefixes and the J best finished hypotheses of each row; groups that are ``open`` go on."""

    length: Int[Array, ""]
    live: _Found
    done: _Found
    open: Bool[Array, "B G"]
    states: Any
    weights: Float[Array, "B J T M N S"] | None


@dataclass(frozen=True)
class _BeamSearch:
    """The loop; its fields are the arguments of ``beam_search``."""

    step: StepFn
    target: Target
    beams: int
    penalty: Penalty
    coverage: Coverage | None
    stopping: Stopping
    groups: int
    diversity: float
    processors: tuple[Processor, ...]
    capture: Capture | None

    def begin(self, states: Any) -> _Beams:
        """One live prefix a group: all its beams are equal, so only one may have children."""
        target, B, J = self.target, self.target.batch, self.beams
        tokens = target.tokens(J)
        first = jnp.arange(J) % (J // self.groups) == 0
        covered = None
        if self.coverage is not None:
            covered = jnp.zeros((B, J, source_valid(states).shape[-1]))
        scores = jnp.tile(jnp.where(first, 0.0, _NEVER), (B, 1))
        lengths, path = jnp.zeros((B, J), jnp.int32), jnp.zeros_like(tokens)
        return _Beams(
            length=jnp.int32(target.start),
            live=_Found(scores, lengths, tokens, path, covered),
            done=_Found(jnp.full((B, J), _NEVER), lengths, tokens, path, None),
            open=jnp.broadcast_to(target.most()[:, None] > 0, (B, self.groups)),
            states=target.enter(self.step, states, J),
            weights=room_for(self.step, self.capture, states, J, target.max_length),
        )

    def unfinished(self, loop: _Beams) -> Bool[Array, ""]:
        """Whether a hypothesis may still get better."""
        return (loop.length < loop.live.tokens.shape[-1]) & jnp.any(loop.open)

    def advance(self, loop: _Beams) -> _Beams:
        """One token more for every live prefix."""
        live, logits, states, seen = self._read(loop)
        log_z = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        if self.processors:
            logits = self.target.steer(self.processors, logits - log_z, live.tokens, loop.length)
            log_z = jnp.zeros_like(log_z)
        count, size = loop.length + 1 - self.target.start, self.beams // self.groups
        taken = jnp.zeros((logits.shape[0], 1, logits.shape[-1])) if self.groups > 1 else None
        parts = []
        for group in range(self.groups):
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
        still_open = self._open(live, done, count)
        return _Beams(loop.length + 1, live, done, loop.open & still_open, states, weights)

    def finish(self, loop: _Beams) -> Hypotheses:
        """The groups' hypotheses together, and the attention on each one's own path."""
        start, done = self.target.start, loop.done
        if self.groups > 1:
            done = done.best(done.scores, self.beams)
        weights = loop.weights
        if weights is not None:
            path = done.path[:, :, start - 1 : -1, None, None, None]
            weights = jnp.take_along_axis(weights, path, axis=1)
        scores = jnp.where(_real(done.scores), done.scores, -jnp.inf)
        return Hypotheses.of(done.tokens[..., start:], scores, done.lengths, weights)

    def _read(self, loop: _Beams) -> tuple[_Found, Float[Array, "B J V"], Any, Any]:
        """Live prefixes that know where their last token was read; logits, states, attention."""
        index, live = loop.length - 1, loop.live
        place = jnp.broadcast_to(jnp.arange(self.beams), live.scores.shape)
        path = _put(live.path, place, index)
        cover = None if self.coverage is None else self.coverage.attention
        logits, states, [seen, covering] = captured(
            self.step,
            [self.capture, cover],
            _at(live.tokens, index)[..., None],
            with_ancestors(loop.states, path),
            index,
        )
        covered = None if cover is None else live.covered + covering[:, :, 0].mean((-3, -2))
        live = replace(live, path=path, covered=covered)
        return live, logits[:, :, 0].astype(jnp.float32), states, seen

    def _children(
        self,
        live: _Found,
        logits: Float[Array, "B J V"],
        log_z: Float[Array, "B J 1"],
        taken: Float[Array, "B 1 V"] | None,
        length: Int[Array, ""],
    ) -> _Found:
        """The best continuations of a row: as many as leave J live ones, however many of them end."""
        B, V = logits.shape[0], logits.shape[-1]
        count = max(2, 1 + len(self.target.ends)) * live.scores.shape[1]
        steered = logits if taken is None else logits - self.diversity * taken
        # Per beam first: a search over J * V candidates is what the time would be spent on.
        best, tokens = topk.top_k(steered, min(count, V))
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
        self, children: _Found, done: _Found, open: Bool[Array, " B"], loop: _Beams
    ) -> tuple[_Found, _Found]:
        """The best children that live on, and the best finished hypotheses with those that end."""
        size, count = done.scores.shape[1], loop.length + 1 - self.target.start
        ended = self.target.ended(_at(children.tokens, loop.length))
        ended = ended | (count >= self.target.most()[:, None])
        live = children.best(jnp.where(ended, _NEVER, children.scores), size)

        counts = ended & _real(children.scores) & open[:, None]
        if self.stopping.among_beams:
            counts = counts & (jnp.arange(counts.shape[1]) < size)
        worth = children.scores / self.penalty(count.astype(jnp.float32))
        if self.coverage is not None:
            covered: Any = children.covered
            worth = worth + self.coverage.cost(covered, source_valid(loop.states))
        both = jax.tree.map(
            lambda *x: jnp.concatenate(x, axis=1), done, replace(children, covered=None)
        )
        worth = jnp.concatenate([done.scores, jnp.where(counts, worth, _NEVER)], axis=1)
        return live, both.best(worth, size)

    def _open(self, live: _Found, done: _Found, count: Int[Array, ""]) -> Bool[Array, "B G"]:
        """Which groups of each row may still find better hypotheses."""
        shape = (live.scores.shape[0], self.groups, -1)
        alive, worth = live.scores.reshape(shape), done.scores.reshape(shape)
        most = self.target.most()[:, None].astype(jnp.float32)
        filled = _real(worth[..., -1])
        count = count.astype(jnp.float32)
        return self.stopping.open(alive, worth, filled, count, most, self.penalty)


def _real(scores: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Scores of hypotheses that exist."""
    return scores > _NEVER / 2


def _at(x: Int[Array, "B C X"], index: Int[Array, ""]) -> Int[Array, "B C"]:
    return jax.lax.dynamic_index_in_dim(x, index, axis=2, keepdims=False)


def _put(x: Int[Array, "B C X"], new: Int[Array, "B C"], index: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, new[..., None], index, axis=2)
