"""Several runs in one program: members differ in their seed, or in numbers of the optimiser.

Parameters, optimiser state and batches get a leading axis of members, over which the training step is
vmapped, or on CPU looped unless it has convolutions; on a mesh with an axis ``seed`` it is split along that.
Each member computes the numbers of its run alone, up to rounding.
"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossattn.rows import programs_of
from crossattn.train.state import TrainState, from_json, to_json

_LOG = logging.getLogger(__name__)

SWEPT = ("learning_rate", "final_fraction", "weight_decay", "clip_norm", "b1", "b2", "eps")
"""Numbers of the optimiser of which members may have different ones: they change no shape."""

AXIS = "seed"
"""The mesh axis that splits members."""

STATE = TrainState(None, 0, 0, 0)  # type: ignore[arg-type]
"""The axis of members in the parts of a state; all are at the same step."""


@dataclass(frozen=True)
class Member:
    """One of the runs.

    Attributes:
      name: "seed_1", "learning_rate_0.002", or both: of its metrics and files.
      seed: of its parameters, dropout and order of the data.
      optim: its own fields of ``OptimConfig``.
    """

    name: str
    seed: int
    optim: Mapping[str, float] = field(default_factory=dict)


def members_of(seed: int, seeds: int = 1, sweep: str | None = None) -> tuple[Member, ...]:
    """Returns the members of a run; none for a run of one seed without a sweep.

    Args:
      seed: the first seed.
      seeds: number of seeds, which follow each other.
      sweep: "optim.learning_rate=1e-3,2e-3", several of these with ";" between them: each combination with
        each seed is a member.

    Raises:
      ValueError: a key of the sweep is none of ``SWEPT``, or a value no number.
    """
    lists = _parsed(sweep) if sweep is not None else {}
    if seeds == 1 and not lists:
        return ()
    found = []
    for values in itertools.product(*lists.values()):
        optim = dict(zip(lists, values, strict=True))
        named = [f"{key}_{value:g}" for key, value in optim.items()]
        for own in range(seed, seed + seeds):
            name = "_".join(named + ([f"seed_{own}"] if seeds > 1 else []))
            found.append(Member(name, own, optim))
    return tuple(found)


def _parsed(sweep: str) -> dict[str, list[float]]:
    lists: dict[str, list[float]] = {}
    for part in sweep.split(";"):
        key, _, texts = part.partition("=")
        section, _, name = key.strip().partition(".")
        try:
            values = [float(text) for text in texts.split(",")]
        except ValueError:
            values = []
        if section != "optim" or name not in SWEPT or name in lists or not values:
            expected = ", ".join(f"optim.{each}" for each in SWEPT)
            raise ValueError(
                f"sweep has {part!r}; expected KEY=NUMBER,NUMBER,... with a key of {expected}, each once"
            )
        if len(set(values)) < len(values):
            raise ValueError(f"sweep has {part!r}, with a value twice; name each once")
        lists[name] = values
    return lists


def keys(members: Sequence[Member], impl: str | None = None) -> jax.Array:
    """Returns the random keys [members] of their seeds."""
    return jnp.stack([jax.random.key(member.seed, impl=impl) for member in members])


def swept(members: Sequence[Member]) -> dict[str, jax.Array]:
    """Returns the numbers [members] of the optimiser in which members differ."""
    return {
        name: jnp.asarray([member.optim[name] for member in members], jnp.float32)
        for name in members[0].optim
    }


def take(tree: Any, index: Any) -> Any:
    """Returns the arrays of one member."""
    return jax.tree.map(lambda x: x[index], tree)


def stack(trees: Sequence[Any]) -> Any:
    """Stacks the arrays of members, in their order."""
    return jax.tree.map(lambda *each: jnp.stack(each), *trees)


def stacked(shapes: Any, count: int, along: str | None = None) -> Any:
    """Returns the shapes of so many members' arrays, with their places, from those of one."""

    def one(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (count, *x.shape), x.dtype, sharding=_stacked_place(x.sharding, along)
        )

    return jax.tree.map(one, shapes)


def stacked_sharding(sharding: TrainState | None, along: str | None) -> TrainState | None:
    """Returns the shardings of a state of members, from those of one; None stays None."""
    if sharding is None:
        return None
    trees = sharding.params, sharding.opt_state, sharding.ema
    return TrainState(
        sharding.step, *jax.tree.map(lambda place: _stacked_place(place, along), trees)
    )


def _stacked_place(place: Any, along: str | None) -> Any:
    """Returns a sharding with the axis of members first; one device stays one device."""
    if not isinstance(place, NamedSharding):
        return place
    return NamedSharding(place.mesh, PartitionSpec(along, *place.spec))


def axis_of(mesh: Mesh | None, count: int) -> str | None:
    """Returns the mesh axis that splits so many members; None if the mesh has none.

    Raises:
      ValueError: it does not divide them.
    """
    if mesh is None or AXIS not in mesh.axis_names:
        return None
    if not count or count % mesh.shape[AXIS]:
        raise ValueError(
            f"mesh.seed is {mesh.shape[AXIS]} and the run has {count or 'no'} members; expected a divisor of "
            "train.seeds times the values of train.sweep"
        )
    return AXIS


def mapped(call: Callable, in_axes: Any, out_axes: Any, along: str | None) -> Callable:
    """Returns ``jax.vmap`` of a function over members, along a mesh axis if there is one."""
    return jax.vmap(call, in_axes, out_axes, spmd_axis_name=along)


def each_step(step: Callable, along: str | None) -> Callable:
    """Returns the step of all members: of one after the other on CPU, and elsewhere of all at once.

    On CPU one member fills the cores, and XLA's batched products are slower than its plain ones. A loop slows
    the gradients of convolutions, which XLA computes by a fast routine outside loops alone: a step that has
    some is of all members at once on CPU, too.

    Args:
      step: (state, *arguments) -> (state, metrics) of one member.
      along: the mesh axis that splits members.
    """
    step = jax.jit(step)  # traced once for all of these

    def in_turn(state: TrainState, *arguments: Any) -> tuple[TrainState, Any]:
        def one(member: Any) -> tuple[TrainState, Any]:
            trees, own = member
            return step(TrainState(state.step, *trees), *own)

        trees = state.params, state.opt_state, state.ema
        new, metrics = jax.lax.map(one, (trees, arguments))
        return replace(new, step=new.step[0]), metrics

    def at_once(state: TrainState, *arguments: Any) -> tuple[TrainState, Any]:
        axes = (STATE, *(0 for _ in arguments))
        return mapped(step, axes, (STATE, 0), along)(state, *arguments)

    def of_all(state: TrainState, *arguments: Any) -> tuple[TrainState, Any]:
        trees = state.params, state.opt_state, state.ema
        trees, own = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (trees, arguments)
        )
        if _convolves(jax.make_jaxpr(step)(TrainState(state.step, *trees), *own)):
            return at_once(state, *arguments)
        return jax.lax.platform_dependent(state, *arguments, cpu=in_turn, default=at_once)

    return of_all if along is None else at_once


def _convolves(program: Any) -> bool:
    return any(
        equation.primitive.name == "conv_general_dilated"
        or any(map(_convolves, programs_of(equation)))
        for equation in program.eqns
    )


def spread(name: str, values: Sequence[float], members: Sequence[Member]) -> dict[str, float]:
    """Returns the mean of a metric by its name, and each member's as MEMBER/NAME."""
    each = {f"{member.name}/{name}": float(x) for member, x in zip(members, values, strict=True)}
    return {name: float(np.mean(values))} | each


def spread_all(each: Sequence[Mapping[str, float]], members: Sequence[Member]) -> dict[str, float]:
    """Returns ``spread`` of all metrics of members; means first."""
    found = [spread(name, [values[name] for values in each], members) for name in each[0]]
    means = {name: values[name] for name, values in zip(each[0], found, strict=True)}
    return means | {name: x for values in found for name, x in values.items()}


class MemberBatches:
    """Batches of several iterators, stacked along a leading axis of members.

    Arrays of different shapes (rows and lengths of buckets) are padded to the largest: with 0, or with -1
    where that stands for nothing, as in links of words. Dropout of such a batch then draws other numbers than
    in the run alone. The first batch that is half padding is logged.
    """

    def __init__(self, iterators: Sequence[Any]):
        self._iterators = list(iterators)
        self._said = False

    def __next__(self) -> dict[str, np.ndarray]:
        batches = [next(each) for each in self._iterators]
        found = {name: _stacked([batch[name] for batch in batches]) for name in batches[0]}
        full = sum(np.size(x) for batch in batches for x in batch.values())
        padded = sum(x.size for x in found.values())
        if padded > 2 * full and not self._said:
            self._said = True
            _LOG.warning(
                "members have batches of unlike lengths: padded alike, this one is %.1f times as large",
                padded / full,
            )
        return found

    def get_state(self) -> list[Any]:
        """Returns the position of each iterator, JSON-able."""
        return [to_json(each.get_state()) for each in self._iterators]

    def set_state(self, state: Sequence[Any]) -> None:
        """Continues from positions."""
        for each, own in zip(self._iterators, state, strict=True):
            each.set_state(from_json(own))

    def close(self) -> None:
        """Ends the iterators' workers."""
        for each in self._iterators:
            getattr(each, "close", lambda: None)()


def _stacked(arrays: Sequence[Any]) -> np.ndarray:
    arrays = [np.asarray(x) for x in arrays]
    shape = tuple(map(max, *(x.shape for x in arrays))) if len(arrays) > 1 else arrays[0].shape
    signed = np.issubdtype(arrays[0].dtype, np.signedinteger)
    nothing = -1 if signed and any((x == -1).any() for x in arrays) else 0
    found = np.full((len(arrays), *shape), nothing, arrays[0].dtype)
    for index, x in enumerate(arrays):
        found[(index, *map(slice, x.shape))] = x
    return found
