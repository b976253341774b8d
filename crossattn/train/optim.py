"""Optimisers and learning-rate schedules: one frozen config in, one optax transformation out.

Every optimiser is the chain clip -> direction -> weight decay -> learning rate, and they differ in the
direction only. The parameters' logical axes decide which of them decay, and which of them Muon
orthogonalises.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from crossattn.train.adafactor import Sides, scale_by_adafactor
from crossattn.train.trainable import rate_factors
from crossattn.types import NonNegative, Positive, Rate

Schedule = Callable[[Any], jax.Array]

# Heads and head size together are one side of a matrix.
_HEAD_AXES = ("heads", "kv_heads", "head_dim")
_MATRIX_AXES = ("embed", "mlp", *_HEAD_AXES)
# Muon updates of this root-mean-square are as large as Adam's, so one learning rate serves
# both (https://arxiv.org/abs/2502.16982).
_MUON_RMS = 0.2


UNUSED = {"lion": ("eps",), "sgd": ("b1", "b2", "eps"), "adafactor": ("b1", "b2", "eps")}
"""Numbers of Adam, by the optimisers that do not use them."""


@dataclass(frozen=True)
class OptimConfig:
    """Settings of the optimiser.

    Second moments stay float32: a step adds less to one than bfloat16 resolves.

    Attributes:
      name: the optimiser.
      learning_rate: at its peak.
      schedule: the learning rate after warm-up.
      warmup_steps: steps of linear warm-up.
      final_fraction: learning rate at the last step as a share of the peak (cosine, linear, wsd).
      cooldown_fraction: share of the steps in which wsd falls.
      weight_decay: decoupled, of matrices and tables.
      clip_norm: largest global norm of the gradient; None is no clipping.
      b1, b2: decay of the first and the second moment (adamw, lion).
      eps: added to adamw's denominator.
      momentum: of muon's matrices and of sgd.
      train: regular expression for the names of the parameters to train; None is all.
      rates: factors of the learning rate, "encoder=0.1,embedding=0.5", see ``trainable``.
      mu_dtype: of the first moment (adamw, lion, muon, sgd).

    Raises:
        ValueError: learning_rate or weight_decay is below 0 or not finite, or mu_dtype is of another type.
    """

    name: Literal["adamw", "adafactor", "lion", "muon", "sgd"] = "adamw"
    learning_rate: NonNegative = 1e-3
    schedule: Literal["constant", "cosine", "linear", "rsqrt", "wsd"] = "cosine"
    warmup_steps: Annotated[int, "[0, inf)"] = 0
    final_fraction: Annotated[float, "[0, 1]"] = 0.0
    cooldown_fraction: Annotated[float, "[0, 1]"] = 0.2
    weight_decay: NonNegative = 0.0
    clip_norm: Positive | None = 1.0
    b1: Rate = 0.9
    b2: Rate = 0.98
    eps: NonNegative = 1e-9
    momentum: Rate = 0.95
    train: str | None = None
    rates: str | None = None
    mu_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        if self.mu_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"mu_dtype is {self.mu_dtype!r}; use float32 or bfloat16")
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; expected a number, 0 or more")


def make_optimizer(
    config: OptimConfig,
    total_steps: int,
    logical_axes: Any,
    numbers: Mapping[str, Any] | None = None,
) -> tuple[optax.GradientTransformation, Schedule]:
    """Returns (optax transformation, schedule: step -> learning rate).

    logical_axes: a tuple of axis names for each parameter, in the parameters' structure.
    numbers: traced scalars in the place of fields of the config.

    Raises:
        ValueError: the name or the schedule is unknown, or the rates match no parameter.
    """
    decays = "weight_decay" in (numbers or {}) or config.weight_decay > 0
    own: Any = SimpleNamespace(**vars(config) | dict(numbers or {}))
    schedule = _schedule(own, total_steps)
    parts = [_direction(own, logical_axes)]
    if own.clip_norm is not None:
        parts.insert(0, optax.clip_by_global_norm(own.clip_norm))
    if decays:
        parts.append(optax.add_decayed_weights(own.weight_decay, _decay_mask(logical_axes)))
    parts.append(optax.scale_by_learning_rate(schedule))
    if rates := config.rates:
        rate_factors(logical_axes, rates)  # raises its errors now
        parts.append(
            optax.stateless(
                lambda updates, _: jax.tree.map(jnp.multiply, updates, rate_factors(updates, rates))
            )
        )
    return optax.chain(*parts), schedule


def make_schedule(config: OptimConfig, total_steps: int) -> Schedule:
    """Returns the learning rate by step (from 0): linear warm-up to the peak, then the named schedule.

    rsqrt falls as 1 / sqrt(step) from the end of the warm-up (https://arxiv.org/abs/1706.03762);
    wsd stays at the peak and falls linearly at the end (https://arxiv.org/abs/2404.06395).

    Raises:
        ValueError: the schedule is unknown.
    """
    return _schedule(config, total_steps)


def _schedule(config: Any, total_steps: int) -> Schedule:
    # The first step at the peak is the last of the rise; where there is no rise it is the first of all.
    rise, final = max(config.warmup_steps, 1), config.final_fraction
    rest = max(total_steps - rise, 1)
    cooldown: Any = min(max(config.cooldown_fraction * total_steps, 1.0), rest)  # not just an int
    shapes = {  # of the steps after the first at the peak
        "constant": optax.constant_schedule(1.0),
        "cosine": optax.cosine_decay_schedule(1.0, rest, final),
        "linear": optax.linear_schedule(1.0, final, rest),
        "rsqrt": lambda step: jnp.sqrt(rise / (rise + step)),
        "wsd": optax.linear_schedule(1.0, final, cooldown, rest - cooldown),
    }
    if config.schedule not in shapes:
        raise ValueError(f"schedule {config.schedule!r} is not one of {', '.join(shapes)}")
    shape = shapes[config.schedule]
    if rise > 1:
        rising = optax.linear_schedule(1 / rise, 1.0, rise - 1)
        shape = optax.join_schedules([rising, shape], [rise - 1])
    return lambda step: jnp.asarray(config.learning_rate * shape(jnp.asarray(step, jnp.float32)))


def of_more_steps(config: OptimConfig, before: int, now: int, made: int) -> str:
    """Describes what changes when a run of ``before`` steps, after ``made`` of them, gets ``now``."""
    old, new = make_schedule(config, before), make_schedule(config, now)
    steps = jnp.arange(made)
    text = f"the run has {now} steps now, {before} before: "
    if bool(jnp.all(old(steps) == new(steps))):
        return text + (
            f"under the schedule {config.schedule!r} those made are the first of {now} steps too"
        )
    return text + (
        f"the schedule {config.schedule!r} is that of {now} steps from here on, so the learning rate goes"
        f" from {float(old(made - 1)):.3g} to {float(new(made)):.3g}; a run of {now} steps from the start"
        " learns otherwise"
    )


def _direction(config: Any, logical_axes: Any) -> optax.GradientTransformation:
    """Returns the transformation of a gradient before decay and learning rate."""
    b1, b2, eps = config.b1, config.b2, config.eps
    makers = {
        "adamw": lambda: optax.scale_by_adam(b1, b2, eps, mu_dtype=config.mu_dtype),
        "lion": lambda: optax.scale_by_lion(b1, b2, mu_dtype=config.mu_dtype),
        "sgd": lambda: optax.trace(config.momentum, True, config.mu_dtype),
        "adafactor": lambda: scale_by_adafactor(_map_axes(factored_sides, logical_axes)),
        "muon": lambda: _muon(config, logical_axes),
    }
    if config.name not in makers:
        raise ValueError(f"optimizer {config.name!r} is not one of {', '.join(makers)}")
    return makers[config.name]()


def factored_sides(axes: tuple[str | None, ...]) -> Sides:
    """Returns the axes of rows and columns for Adafactor: as `matrix_sides`, and those of tables."""
    stacked = tuple(index for index, name in enumerate(axes) if name == "layers")
    groups = _groups(axes, (*_MATRIX_AXES, "vocab"))
    rows, columns = groups if len(groups) == 2 else ((), ())
    return Sides(rows, columns, stacked)


def _muon(config: Any, logical_axes: Any) -> optax.GradientTransformation:
    """Returns orthogonalised momentum for matrices, and Adam for embeddings, norms and biases."""
    of_each = _map_axes(lambda axes: matrix_sides(axes) or optax.MaskedNode(), logical_axes)
    labels = _map_axes(lambda axes: "muon" if matrix_sides(axes) else "adam", logical_axes)
    orthogonal = optax.chain(
        scale_by_muon(
            beta=config.momentum, weight_dimension_numbers=of_each, mu_dtype=config.mu_dtype
        ),
        optax.stateless(lambda updates, _: jax.tree.map(_to_adam_size, updates, of_each)),
    )
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=config.mu_dtype)
    return optax.partition({"muon": orthogonal, "adam": adam}, labels)


def matrix_sides(axes: tuple[str | None, ...]) -> MuonDimensionNumbers | None:
    """Returns the axes of a matrix's input and output; None for a parameter that is no matrix.

    ("embed", "heads", "head_dim") maps embed to all heads; ("heads", "head_dim", "embed") back.
    "layers" and unnamed axes count several matrices; "vocab" makes a table, never a matrix.
    """
    groups = _groups(axes, _MATRIX_AXES)
    if "vocab" in axes or len(groups) != 2:
        return None
    return MuonDimensionNumbers(*groups)


def _groups(axes: tuple[str | None, ...], names: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Returns the indices of the axes of these names; adjacent heads and head size are one group."""
    groups: list[tuple[int, ...]] = []
    for index, name in enumerate(axes):
        if name not in names:
            continue
        previous = axes[groups[-1][-1]] if groups else None
        if name in _HEAD_AXES and previous in _HEAD_AXES:
            groups[-1] += (index,)
        else:
            groups.append((index,))
    return groups


def _to_adam_size(update: jax.Array, sides: MuonDimensionNumbers) -> jax.Array:
    pair: Any = sides
    fan_in, fan_out = (math.prod(update.shape[axis] for axis in side) for side in pair)
    return update * (_MUON_RMS * max(fan_in, fan_out) ** 0.5)


def _decay_mask(logical_axes: Any) -> Any:
    """Returns True for matrices and tables, False for norms, constants and biases."""

    def decayed(axes: tuple[str | None, ...]) -> bool:
        own = [name for name in axes if name != "layers"]
        is_bias = len(own) < 2 or all(name in _HEAD_AXES for name in own)
        return not is_bias and "norm" not in own and "constant" not in own

    return _map_axes(decayed, logical_axes)


def _map_axes(function: Callable, logical_axes: Any) -> Any:
    """Calls a function on the tuple of axis names of each parameter."""
    return jax.tree.map(function, logical_axes, is_leaf=lambda x: isinstance(x, tuple))
