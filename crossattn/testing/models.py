"""A conformance suite for models of any library: what a model promises about who reads what.

    from crossattn.testing import models

    mine = models.Model(call, models.texts(target=(6, 64)))    # call(target) -> logits [B T V]
    for finding in models.conformance(mine):
        print(*finding)    # promise, case, outcome

An outcome is "kept", "broken: what", "refused: why", "not offered: what the adapter lacks", which is not
kept, or "not applicable: why", such as leakage in an encoder.

The oracle is the promise: a model is compared with itself on inputs for which its outputs must be equal. That
shows something only where a model reads at all. So "reads what it may" holds it to outputs that move with
each input by fifteen times what counts as a leak: weights may be too small for that, and then it says so.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from crossattn.testing import checks
from crossattn.testing.checks import Broken, expect
from crossattn.testing.promises import Finding, line

PROMISES = {
    "same again": "a call leaves nothing behind: the same call gives the same outputs",
    "reads what it may": "outputs move with every place of what the model reads",
    "no leakage": "no output moves with a later token of its text",
    "padding": "it changes nothing, whatever stands there, on either side",
    "a batch equals its rows": "each row alone, without a mask, has the outputs that it has in a batch",
    "cached equals whole": "steps through a cache have the outputs of whole texts",
    "packed equals alone": "texts packed into a row have the outputs that each has alone",
}
ROLES = ("source", "target")
CUT = 2  # places that padding takes from a row, and a second text
PROGRAMS = 2  # times the tolerance, for outputs of two programs
LEAK = 0.1  # times the tolerance, for outputs of one program that nothing may move
FAINT = 1.5  # times the tolerance: what outputs must move by at least


@dataclasses.dataclass(frozen=True)
class Model:
    """Adapter of a model: how the suite calls it.

    ``call`` is called by keyword, with those of these arguments that its signature has, and gives outputs
    [B T ...], one for each place of the target, or [B ...] of a model without a target.

      source: what ``draw`` gives by this name, [B S ...]: all of it may be read.
      target: [B T ...], the text whose places have the outputs.
      NAME_mask: int32, 1 where there is something and 0 for padding; NAME is source or target.
      NAME_segments: int32, 1, 2, ... of the texts packed into a row and 0 for padding.
      NAME_positions: int32, of the places in their own text.
      other names: what else ``draw`` gives, [B ...].

    A call for one row has none of the masks, segments and positions. What a signature lacks is not offered.

    Attributes:
      call: the model.
      draw: ``draw(rows)`` gives random inputs by name, without padding. A source or a target may be a tree
        of arrays.
      begin: makes the state of a cache; its arguments are those of ``call`` but the target's, ``rows`` and
        ``length``, the numbers of texts and of their places, and ``padding``, int32 [B], how many of these
        padding fills at the beginning of each row (prompts of unequal lengths).
      step: ``step(target, state)`` gives the outputs of the next places [B t ...] and the new state.
      causal: an output reads no later place of the target.
      convert: makes arrays of the model's library from those of numpy.
      takes: the arguments of ``call``, for one whose signature does not say so.
      begins: likewise, those of ``begin``.
    """

    call: Callable[..., Any]
    draw: Callable[[int], Mapping[str, Any]]
    begin: Callable[..., Any] | None = None
    step: Callable[..., Any] | None = None
    causal: bool = True
    convert: Callable[[np.ndarray], Any] = np.asarray
    takes: Collection[str] | None = None
    begins: Collection[str] | None = None


class NotOffered(Exception):
    """What an adapter does not offer, so that nobody can tell whether a promise is kept."""


class NotApplicable(Exception):
    """What a model is not, so that there is nothing to promise."""


def texts(seed: int = 0, **sizes: tuple[int, int]) -> Callable[[int], dict[str, np.ndarray]]:
    """Returns a ``draw`` of tokens: ``texts(source=(7, 64), target=(6, 64))`` has lengths and vocabularies.

    Tokens are from 3 on: the first are, in most vocabularies, for padding and ends.
    """

    def draw(rows: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        drawn = {n: rng.integers(3, vocab, (rows, size)) for n, (size, vocab) in sizes.items()}
        return {name: x.astype(np.int32) for name, x in drawn.items()}

    return draw


def conformance(
    model: Model,
    promises: Iterable[str] | None = None,
    refusals: tuple[type[Exception], ...] = (NotImplementedError,),
) -> list[Finding]:
    """Holds a model to every promise.

    Args:
      model: the adapter.
      promises: some of the keys of ``PROMISES``; None for all.
      refusals: the exceptions by which it says that it does not take a call.

    Raises:
      ValueError: there is no promise of a name.
    """
    held = Held(model)
    return [
        Finding(promise, case, _outcome(partial(check, held), refusals))
        for promise, case, check in items(promises)
    ]


def items(promises: Iterable[str] | None = None) -> Iterator[tuple[str, str, Callable]]:
    """Yields (promise, case, check): ``check(Held(model))`` raises where the promise is not kept.

    Raises:
      ValueError: there is no promise of a name.
    """
    chosen = list(PROMISES if promises is None else promises)
    unknown = [name for name in chosen if name not in PROMISES]
    if unknown:
        raise ValueError(f"promises has {unknown}; expected some of {', '.join(PROMISES)}.")
    for promise in chosen:
        for case, check in CASES[promise].items():
            yield promise, case, check


def _outcome(run: Callable[[], None], refusals: tuple[type[Exception], ...]) -> str:
    try:
        run()
    except NotOffered as lack:
        return f"not offered: {lack}"
    except NotApplicable as reason:
        return f"not applicable: {reason}"
    except Broken as broken:
        return f"broken: {broken}"
    except refusals as error:
        return f"refused: {line(error)}"
    except Exception as error:
        return f"broken: {type(error).__name__}: {line(error)}"
    return "kept"


class Held:
    """A model with the inputs of all checks, few in shape, so that what is compiled is compiled once."""

    def __init__(self, model: Model):
        self.model = model
        self.takes = _names(model.call, model.takes)
        self.begins = _names(model.begin, model.begins)
        few = model.draw(2)
        self.lengths = {role: _length(few[role]) for role in ROLES if role in few}
        self.rows = max(3, *self.lengths.values(), 3) + 1
        self.drawn = dict(model.draw(self.rows))
        # What another row has in the same place: what a change puts there, and what stands in padding.
        self.others = _map(lambda x: np.roll(x, 1, axis=0), self.drawn)

    @property
    def masked(self) -> list[str]:
        """The roles whose padding the call can be told."""
        return [role for role in self.lengths if {f"{role}_mask", f"{role}_segments"} & self.takes]

    def outputs(self, given: Mapping[str, Any], segments: Mapping[str, Any] | None = None) -> Any:
        """Calls the model for a batch, with whatever it takes; segments are all 1 where none are given."""
        return self._called({**given, **self._places(given, segments or {})})

    def _places(self, given: Mapping[str, Any], segments: Mapping[str, Any]) -> dict[str, Any]:
        places: dict[str, Any] = {}
        for role in self.lengths:
            shape = (len(_leaf(given[role])), _length(given[role]))
            ids = np.asarray(segments.get(role, np.ones(shape)), np.int32)
            places[f"{role}_mask"] = (ids > 0).astype(np.int32)
            places |= {f"{role}_segments": ids, f"{role}_positions": _positions(ids)}
        return places

    def _called(self, given: Mapping[str, Any]) -> np.ndarray:
        named = {name: x for name, x in given.items() if name in self.takes}
        out = _numpy(self.model.call(**_map(self.model.convert, named)))
        rows, length = len(_leaf(given)), "target" in given and _length(given["target"])
        wanted = (rows, length) if length else (rows,)
        expect(out.shape[: len(wanted)] == wanted, f"outputs {out.shape} begin not with {wanted}")
        return out

    def alone(self, given: Mapping[str, Any], row: int, cut: Collection[str] = ()) -> np.ndarray:
        """Calls the model for one row, without masks; the sequences of ``cut`` without their last places."""
        one = {name: _map(lambda x: x[row : row + 1], x) for name, x in given.items()}
        for role in cut:
            one[role] = _map(lambda x: x[:, :-CUT], one[role])
        return np.asarray(self._called(one)[0])

    @cached_property
    def whole(self) -> np.ndarray:
        """The outputs of the drawn rows."""
        return self.outputs(self.drawn)

    @property
    def tolerance(self) -> float:
        """Of the dtype of the outputs, relative."""
        return checks.TOLERANCE[self.whole.dtype.name]

    @cached_property
    def shorter(self) -> dict[int, np.ndarray]:
        """The outputs of odd rows alone, cut where padding can be told."""
        return {row: self.alone(self.drawn, row, self.masked) for row in range(1, self.rows, 2)}

    def ragged(self, roles: Collection[str], beyond: Any = None) -> tuple[dict, dict]:
        """Inputs and segments whose odd rows are cut; in the cut places stands what other rows have."""
        given, segments = dict(self.drawn), {}
        for role in roles:
            ids = np.ones((self.rows, self.lengths[role]), np.int32)
            ids[1::2, -CUT:] = 0
            noise = (self.others if beyond is None else beyond)[role]
            given[role] = _map(partial(_where, ids > 0), self.drawn[role], noise)
            segments[role] = ids
        return given, segments

    def moved(self, change: Callable[[dict, int], bool], count: int) -> dict[int, np.ndarray]:
        """How far the outputs [T ...] or [...] of one input move with each of ``count`` changes of it.

        ``change(inputs, row)`` changes a row, or returns False where there is nothing else to put there.
        """
        same = _map(lambda x: np.repeat(x[:1], self.rows, axis=0), self.drawn)
        changed = [row for row in range(1, count + 1) if change(same, row)]
        out = self.outputs(same).astype(np.float64)
        expect(np.isfinite(out).all(), "outputs are NaN or Inf")
        far = np.abs(out - out[0]) / np.abs(out[0]).max()
        return {row - 1: np.asarray(far[row]) for row in changed}

    def influence(self, role: str) -> dict[int, np.ndarray]:
        """How far outputs [T ...] or [...] move with each place of a source or a target."""

        def change(same: dict, place: int) -> bool:
            before = _map(np.copy, same[role])
            for x, other in zip(_leaves(same[role]), _leaves(self.others[role]), strict=True):
                x[place, place - 1] = other[0, place - 1]
            pairs = zip(_leaves(before), _leaves(same[role]), strict=True)
            return any(np.any(x != y) for x, y in pairs)

        found = self.moved(change, self.lengths[role])
        if "target" not in self.lengths:
            return found
        return {u: x.reshape(len(x), -1).max(-1) for u, x in found.items()}


# Checks, by promise. Each takes ``Held`` and raises ``Broken`` or ``NotOffered``.


def _same_again(held: Held) -> None:
    first = held.whole
    held.outputs({**held.others})
    checks.close(held.outputs(held.drawn), first, "the second time", first.dtype)


def _reads_role(role: str, held: Held) -> None:
    _applies(role in held.lengths, f"it has no {role}")
    text = "target" in held.lengths
    for u, moved in held.influence(role).items():
        if text and role == "target":
            where = np.arange(len(moved))
            moved = moved[where > u if held.model.causal else where != u]
        largest = moved.max(initial=0.0)
        if role == "target" and held.model.causal and u == held.lengths[role] - 1:
            continue  # nothing comes after it
        _moves(held, largest, f"place {u} of the {role}")


def _reads_the_rest(held: Held) -> None:
    rest = [name for name in held.drawn if name not in ROLES]
    _applies(rest, "it reads nothing besides")
    for name in rest:

        def change(same: dict, row: int, name: str = name) -> bool:
            for x, other in zip(_leaves(same[name]), _leaves(held.others[name]), strict=True):
                x[row] = other[0]
            return any(np.any(x[0] != x[row]) for x in _leaves(same[name]))

        for moved in held.moved(change, 1).values():
            _moves(held, moved.max(), name)


def _moves(held: Held, far: float, what: str) -> None:
    least = FAINT * held.tolerance
    said = f"{what} moves no output by more than {far:.1g} of the largest; expected {least:.1g}"
    expect(far > least, said)


def _no_leakage(held: Held) -> None:
    _applies("target" in held.lengths and held.model.causal, "it generates nothing")
    for u, moved in held.influence("target").items():
        earlier = moved[:u]
        if earlier.max(initial=0.0) > LEAK * held.tolerance:
            t = int(np.argmax(earlier))
            raise Broken(f"output {t} moves with token {u}, by {earlier[t]:.2g} of the largest")


def _lengths(held: Held) -> None:
    _applies(held.lengths, "it has no text")
    _needs(held.masked, "it takes no mask")
    out = held.outputs(*held.ragged(held.masked))
    for row, alone in held.shorter.items():
        found = out[row][: len(alone)] if "target" in held.lengths else out[row]
        _close(found, alone, f"row {row}, shorter than its batch")


def _what_padding_holds(role: str, held: Held) -> None:
    _applies(role in held.lengths, f"it has no {role}")
    _needs(role in held.masked, f"it takes no mask of the {role}")
    one = held.outputs(*held.ragged([role]))
    given, segments = held.ragged([role], _map(lambda x: np.roll(x, 1, axis=0), held.others))
    other = held.outputs(given, segments)
    if role == "target":
        real = segments[role] > 0
        one, other = one[real], other[real]
    checks.close(other, one, "with other padding", one.dtype)


def _left(held: Held) -> None:
    _applies("target" in held.lengths, "it has no target")
    _needs("target" in held.masked, "it takes no mask of the target")
    _needs("target_positions" in held.takes, "it takes no positions of the target")
    given, segments = held.ragged(held.masked)
    given["target"] = _map(lambda x: _rolled(x, CUT), given["target"])
    segments["target"] = _rolled(segments["target"], CUT)
    out = held.outputs(given, segments)
    for row, alone in held.shorter.items():
        _close(out[row, CUT:], alone, f"row {row}, padded on the left")


def _nothing_but_padding(held: Held) -> None:
    _applies(held.lengths, "it has no text")
    _needs(held.masked, "it takes no mask")
    segments = {r: np.ones((held.rows, held.lengths[r]), np.int32) for r in held.masked}
    for ids in segments.values():
        ids[0] = 0
    out = held.outputs(held.drawn, segments)
    expect(np.isfinite(out[0]).all(), "the outputs of a row of padding are NaN or Inf")
    checks.close(out[1:], held.whole[1:], "beside a row of padding", out.dtype)


def _rows(held: Held) -> None:
    for row in range(held.rows):
        _close(held.alone(held.drawn, row), held.whole[row], f"row {row} alone")


def _begun(held: Held, given: Mapping[str, Any], segments: Mapping[str, Any], **more: Any) -> Any:
    """Begins decoding, with whatever of the inputs ``begin`` takes."""
    begin = held.model.begin
    assert begin is not None
    arrays = {**given, **held._places(given, segments), **more}
    arrays = {name: x for name, x in arrays.items() if name in held.begins}
    size = {"rows": held.rows, "length": held.lengths["target"]}
    size = {name: number for name, number in size.items() if name in held.begins}
    return begin(**_map(held.model.convert, arrays), **size)


def _stepped(held: Held, given: Mapping[str, Any], state: Any, sizes: Iterable[int]) -> Iterator:
    """Yields the outputs of the next places, of these numbers each."""
    step, at = held.model.step, 0
    assert step is not None
    for size in sizes:
        chunk = _map(lambda x, at=at, size=size: x[:, at : at + size], given["target"])
        out, state = step(_map(held.model.convert, chunk), state)
        yield _numpy(out)
        at += size


def _sizes(held: Held, *first: int) -> list[int]:
    return [*first, *[1] * (held.lengths["target"] - sum(first))]


def _cached(sizes: tuple[int, ...], held: Held) -> None:
    _generates(held)
    given, segments = held.ragged([role for role in held.masked if role == "source"])
    state = _begun(held, given, segments)
    found = np.concatenate([*_stepped(held, given, state, _sizes(held, *sizes))], axis=1)
    _close(found, held.outputs(given, segments), "steps")


def _two_at_once(held: Held) -> None:
    _generates(held)
    both = held.drawn, held.others
    begun = [_stepped(held, x, _begun(held, x, {}), _sizes(held)) for x in both]
    found = zip(*zip(*begun, strict=True), strict=True)
    for name, given, steps in zip(("first", "second"), both, found, strict=True):
        out = np.concatenate(steps, axis=1)
        _close(out, held.outputs(given), f"the {name} of two decoded in turn")


def _prompts(held: Held) -> None:
    _generates(held)
    _needs("padding" in held.begins, "begin takes no padding")
    given, segments = held.ragged(held.masked)
    given["target"] = _map(lambda x: _rolled(x, CUT), given["target"])
    segments["target"] = _rolled(held.ragged(["target"])[1]["target"], CUT)
    padding = (segments["target"] == 0).sum(-1).astype(np.int32)
    state = _begun(held, given, segments, padding=padding)
    # the first step reads all padding, as that of a prompt does
    steps = [*_stepped(held, given, state, _sizes(held, CUT + 1))]
    out = np.concatenate(steps, axis=1)
    cut = {*held.masked, "target"}
    for row in range(1, held.rows, 2):
        shifted = held.alone(held.drawn, row, cut)
        _close(out[row, CUT:], shifted, f"row {row}, whose prompt is padded on the left")


def _packed(second: bool, held: Held) -> None:
    _applies("target" in held.lengths, "it has no target")
    lacking = [role for role in held.lengths if f"{role}_segments" not in held.takes]
    _needs(not lacking, f"it takes no segments of the {' and the '.join(lacking)}")
    given, segments = dict(held.drawn), {}
    for role, length in held.lengths.items():
        long, short = (
            [_map(lambda x, n=n: x[:, :n], x[role])]
            for x, n in ((held.drawn, length - CUT), (held.others, CUT))
        )
        texts = short + long if second else long + short
        given[role] = _map(lambda *x: np.concatenate(x, axis=1), *texts)
        numbers = [np.full((held.rows, _length(text)), i + 1) for i, text in enumerate(texts)]
        segments[role] = np.concatenate(numbers, axis=1)
    out = held.outputs(given, segments)[:, CUT if second else 0 :]
    for row in range(1, held.rows, 2):
        alone = held.alone(held.drawn, row, held.lengths)
        _close(
            out[row][: len(alone)],
            alone,
            f"the {'second' if second else 'first'} text of row {row}",
        )


CASES: dict[str, dict[str, Callable[[Held], None]]] = {
    "same again": {"after another call": _same_again},
    "reads what it may": {
        "target": partial(_reads_role, "target"),
        "source": partial(_reads_role, "source"),
        "the rest": _reads_the_rest,
    },
    "no leakage": {"each token": _no_leakage},
    "padding": {
        "unequal lengths": _lengths,
        "what it holds, in the source": partial(_what_padding_holds, "source"),
        "what it holds, in the target": partial(_what_padding_holds, "target"),
        "on the left": _left,
        "a row of it": _nothing_but_padding,
    },
    "a batch equals its rows": {"each row": _rows},
    "cached equals whole": {
        "one by one": partial(_cached, ()),
        "several at once": partial(_cached, (1, 2)),
        "two texts in turn": _two_at_once,
        "prompts of unequal lengths": _prompts,
    },
    "packed equals alone": {"first": partial(_packed, False), "second": partial(_packed, True)},
}


def _needs(offered: Any, lack: str) -> None:
    if not offered:
        raise NotOffered(lack)


def _applies(there: Any, reason: str) -> None:
    if not there:
        raise NotApplicable(reason)


def _generates(held: "Held") -> None:
    _applies("target" in held.lengths and held.model.causal, "it generates nothing")
    _needs(held.model.begin is not None and held.model.step is not None, "it has no steps")


def _close(found: Any, expected: Any, what: str) -> None:
    """Compares outputs of two programs."""
    checks.close(found, expected, what, expected.dtype, ulps=PROGRAMS)


def _names(function: Callable | None, said: Collection[str] | None) -> set[str]:
    if said is None and function is not None:
        said = inspect.signature(function).parameters
    return {*(said or ())}


def _map(function: Callable, *trees: Any) -> Any:
    return jax.tree.map(function, *trees)


def _leaves(tree: Any) -> list[np.ndarray]:
    return jax.tree.leaves(tree)


def _leaf(tree: Any) -> np.ndarray:
    return _leaves(tree)[0]


def _length(tree: Any) -> int:
    return _leaf(tree).shape[1]


def _where(real: np.ndarray, x: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, other)


def _rolled(x: np.ndarray, places: int) -> np.ndarray:
    """Moves the last places of odd rows to the front."""
    x = np.copy(x)
    x[1::2] = np.roll(x[1::2], places, axis=1)
    return x


def _positions(segments: np.ndarray) -> np.ndarray:
    """Numbers the places of each text in a row from 0."""
    places = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    begins = np.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    return (places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)).astype(np.int32)


def _numpy(out: Any) -> np.ndarray:
    """Returns an array of numpy; PyTorch's without their gradient."""
    return np.asarray(out.detach() if hasattr(out, "detach") else out)
