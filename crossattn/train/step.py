"""One training step: loss, gradient, update and average, in one jitted function of state and batch.

The same state and batch give the same next state, bit for bit: all randomness comes from
`fold_in(key(seed), step)`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from crossattn.rows import by_rows, draws_rows, row_axes
from crossattn.train import members as several
from crossattn.train.members import Member
from crossattn.train.state import TrainState
from crossattn.train.trainable import join, split

LossFn = Callable[[Any, Any, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
OptimizerOf = Callable[..., optax.GradientTransformation]
_Optax = optax.GradientTransformation | optax.GradientTransformationExtraArgs


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation | OptimizerOf,
    *,
    seed: int = 0,
    members: Sequence[Member] = (),
    along: str | None = None,
    accumulate: int = 1,
    ema_decay: float | None = None,
    compute_dtype: Any = None,
    prng: str | None = None,
    state_sharding: Any = None,
    offloaded: bool = False,
    trained: Collection[str] | None = None,
    compiler_options: Mapping[str, bool | str] | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]:
    """Makes a jitted `step(state, batch) -> (state, metrics)`, which donates the given state.

    Args:
        loss_fn: `(params, batch, key) -> (loss_sum, sums)`, summed over a batch, "weight" in sums.
        optimizer: receives the gradient of loss_sum / weight, the mean over the whole batch; a function
            of the members' own numbers if they have any.
        seed: step n uses fold_in(key(seed), n), and its microbatch i fold_in(.., i).
        members: runs with seeds of their own, along a leading axis of state, batch and metrics.
        along: the mesh axis that splits members.
        accumulate: microbatches of a batch; the result is that of the whole batch if loss_fn is a sum over
            rows. On a mesh gradients are sent once a step, unless loss_fn draws random numbers otherwise
            than by dropout or the functions of `rows`.
        ema_decay: weight of the past in the averaged parameters, in the first steps
            min(decay, (1 + step) / (10 + step)); needs a state made with `ema`.
        compute_dtype: dtype that floating parameters are cast to before loss_fn; None keeps theirs.
        prng: jax's random implementation by name; None is jax's default.
        state_sharding: on a mesh, the shardings of the state.
        offloaded: the optimiser's state is in host memory between steps, as `state_sharding` says.
        trained: names of the parameters to differentiate and update, None for all; needs a state made with
            the same names.
        compiler_options: flags of XLA for the step, by name.

    Returns:
        step. Its metrics: "sums" (of loss_fn, whole batch), "grad_norm" (before clipping) and
        "finite". If loss or gradient is not finite, the parameters stay unchanged, and the
        optimiser receives a gradient of zeros.

    Raises:
        ValueError: accumulate is below 1, or (in a call) no divisor of the batch's rows.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate is {accumulate}; it must be 1 or more")

    def step(
        state: TrainState, batch: Any, own: jax.Array, numbers: dict[str, jax.Array]
    ) -> tuple[TrainState, dict[str, Any]]:
        key = jax.random.fold_in(own, state.step)
        update = optimizer if isinstance(optimizer, _Optax) else optimizer(**numbers)
        params, frozen = split(state.params, trained)
        gradient = _make_gradient(loss_fn, compute_dtype, frozen)
        if accumulate > 1:
            gradient = _accumulated(gradient, accumulate, compute_dtype)
        grads, loss, sums = gradient(params, batch, key)
        mean = 1.0 / jnp.where(sums["weight"] == 0, 1.0, sums["weight"])
        grads = jax.tree.map(lambda g: g * mean.astype(g.dtype), grads)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        # Restoring the old state instead would make XLA copy it first.
        grads = _zero_unless(finite, grads)
        opt_state = state.opt_state
        if offloaded:
            opt_state = jax.device_put(opt_state, jax.memory.Space.Device)
        updates, opt_state = update.update(grads, opt_state, params)
        params = join(optax.apply_updates(params, _zero_unless(finite, updates)), frozen)
        ema = state.ema
        if ema_decay is not None:
            ema = _average(ema, params, ema_decay, state.step)
        metrics = {"sums": sums, "grad_norm": grad_norm, "finite": finite}
        return TrainState(state.step + 1, params, opt_state, ema), metrics

    def of_all(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        if not members:
            return step(state, batch, jax.random.key(seed, impl=prng), {})
        each = several.each_step(step, along)
        return each(state, batch, several.keys(members, prng), several.swept(members))

    of_all.__name__ = "step"  # which profiles show
    options: dict[str, Any] = {"compiler_options": compiler_options and dict(compiler_options)}
    if state_sharding is not None:
        options["out_shardings"] = state_sharding, None
    return jax.jit(of_all, donate_argnums=0, **options)


def _make_gradient(loss_fn: LossFn, compute_dtype: Any, frozen: Any) -> Callable:
    """Returns `(params, batch, key) -> (grads of loss_sum, loss_sum, sums)`, given frozen parameters."""

    def cast_loss(params, batch, key):
        params = join(params, frozen)
        if compute_dtype is not None:
            params = jax.tree.map(lambda p: _cast(p, compute_dtype), params)
        return loss_fn(params, batch, key)

    def gradient(params, batch, key):
        (loss, sums), grads = jax.value_and_grad(cast_loss, has_aux=True)(params, batch, key)
        return grads, loss, sums

    return gradient


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _accumulated(gradient: Callable, count: int, sent: Any) -> Callable:
    """Returns the same gradient, summed over `count` microbatches in a scan.

    Devices with whole parameters each sum their own gradients in float32, and send them once, after the scan,
    in the dtype `sent`, as they do without a scan.
    """

    def accumulated(params, batch, key):
        microbatches = jax.tree.map(lambda x: _split_rows(x, count), batch)
        first = jax.tree.map(lambda x: x[0], microbatches)
        along, parts = row_axes(batch, min(len(x) for x in jax.tree.leaves(first)))

        def whole(index, microbatch):
            return gradient(params, microbatch, jax.random.fold_in(key, index))

        def by_device(index, microbatch):
            cut = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), microbatch)
            return by_rows(lambda rows: whole(index, rows), along)(cut)

        def added_up(part_of):
            def body(total, index_and_batch):
                return jax.tree.map(jnp.add, total, part_of(*index_and_batch)), None

            shapes = jax.eval_shape(part_of, 0, first)
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            return jax.lax.scan(body, zeros, (jnp.arange(count), microbatches))[0]

        if parts == 1 or draws_rows(jax.make_jaxpr(by_device)(0, first).jaxpr):
            return added_up(whole)
        grads, loss, sums = added_up(by_device)
        loss, sums = jax.tree.map(lambda x: x.sum(0), (loss, sums))
        return jax.tree.map(lambda g: _summed(g, sent), grads), loss, sums

    return accumulated


def _summed(x: jax.Array, sent: Any) -> jax.Array:
    narrow = x if sent is None else _cast(x, sent)
    return jax.lax.reduce(narrow, jnp.zeros((), narrow.dtype), jax.lax.add, (0,)).astype(x.dtype)


def _zero_unless(condition: jax.Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), tree)


def _split_rows(x: jax.Array, count: int) -> jax.Array:
    """Reshapes [rows, ...] to [count, rows / count, ...], by every count-th row: no row moves device."""
    rows = x.shape[0]
    if rows % count:
        raise ValueError(f"a batch of {rows} rows cannot be accumulated in {count} equal parts")
    return x.reshape(rows // count, count, *x.shape[1:]).swapaxes(0, 1)


def _average(ema: Any, params: Any, decay: Any, step: jax.Array) -> Any:
    if ema is None:
        raise ValueError("ema_decay is set but the state has no average: init_state(.., ema=True)")
    done = step.astype(jnp.float32)
    decay = jnp.minimum(decay, (1.0 + done) / (10.0 + done))
    return jax.tree.map(lambda old, new: old + (1.0 - decay) * (new - old), ema, params)
