"""A stack of repeated blocks, looped in Python or scanned by XLA, with the same results.

A loop compiles each layer and runs fastest on a CPU; a scan compiles one layer for any depth. Their
parameters differ in layout only: ``stack_layers`` and ``unstack_layers`` convert between them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.axes import placed
from crossattn.functional import Build, axes_of, check_build
from crossattn.nn.blocks import Block, BlockState, EncoderBlock, check_names
from crossattn.nn.edits import hand_out
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.sublayers import BlockConfig, split
from crossattn.rows import by_rows, for_each, row_axes
from crossattn.types import Array, Float, Key, Params

POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable")
"""Policies of ``remat``: blocks keep the results of all products, or of those with weights alone."""


class Stack(nnx.Module):
    """Blocks one after the other: a period of one block or several, repeated.

    Args:
      build: makes one block from ``nnx.Rngs``; or several such, the blocks of a period, in order. They are
        called as ``block(x, state, key, **shared)``, and give ``(x, state)``.
      periods: number of repeats of the period.
      share: all periods share the parameters of the first.
      scan: run as ``lax.scan`` over parameters stacked on a leading "layers" axis.
      remat: recompute each block's activations in the backward pass. True recomputes all; a name of
        ``POLICIES`` keeps those of this policy of ``jax.checkpoint_policies``.

    Raises:
      ValueError: the policy is unknown, or the period has no block.
      TypeError: build is no function, but a block or its config.
    Source: shared parameters, Dehghani et al. 2019 and Lan et al. 2020.
    """

    taps: tuple[tuple[str, str], ...] = ()
    """Sites whose activations [L ...] calls hand out, and the names of these; see ``Block.taps``."""

    def __init__(
        self,
        build: Build | Sequence[Build],
        periods: int,
        *,
        share: bool = False,
        scan: bool = False,
        remat: bool | str = False,
        rngs: nnx.Rngs,
    ):
        if isinstance(remat, str) and remat not in POLICIES:
            raise ValueError(
                f"remat is {remat!r}; expected True, False or one of {', '.join(POLICIES)}."
            )
        builds: Sequence[Build] = (
            list(build) if isinstance(build, Iterable) and not callable(build) else [build]
        )
        for each in builds:
            check_build(each)
        if not builds:
            raise ValueError("build is empty; expected at least one block in the period.")
        count = len(builds) * (1 if share else periods)
        blocks = [builds[i % len(builds)](rngs) for i in range(count)]
        layers: Any = nnx.List(blocks)
        if scan and not share:
            stacked = [_stacked(blocks[i :: len(builds)]) for i in range(len(builds))]
            layers = stacked[0] if callable(build) else nnx.List(stacked)
        self.layers: Any = layers
        self.period = None if callable(build) else len(builds)
        self.num_layers = len(builds) * periods
        self.share = share
        self.scan = scan
        self.remat = remat

    @on_any_mesh
    def __call__(
        self,
        x: Float[Array, "*#B T D"],
        states: Any = None,
        key: Key[Array, ""] | None = None,
        **shared: Any,
    ) -> tuple[Float[Array, "*B T D"], Any]:
        """Runs all layers.

        Args:
          x: [*B T D]; looped, also [T D] for blocks that read memories of several examples.
          states: of the layers: a tuple of L entries, with which also a scanned stack is looped; or one
            pytree with a leading axis of periods (scanned), a list of them for a period of several
            blocks; None for layers without states. See ``map`` and ``looped``.
          key: a dropout key, split over the layers.
          **shared: further arguments, the same for every layer: ``condition`` and ``capture`` among those
            of blocks.

        Returns:
          The output and the layers' new states, in the same form.

        Raises:
          ValueError: no block has a name of ``capture``, or reads the memory of a mask; or as the blocks do.
        """
        kinds = self.kinds()
        if all(isinstance(block, Block) for block in kinds):
            check_names(kinds, shared.get("capture", ()), shared.get("memory_masks"))
        asked = tuple(shared.get("capture", ()))
        if self.taps:
            shared["capture"] = (*asked, *(site for site, _ in self.taps))
        x, states = self._run_all(x, states, key, shared)
        if self.taps:
            hand_out({name: by_layer(states, site) for site, name in self.taps})
            states = jax.tree.map(partial(_without, asked), states, is_leaf=_is_state)
        return x, states

    def _run_all(self, x: Array, states: Any, key: Array | None, shared: dict[str, Any]) -> Any:
        """Runs all layers, looped or scanned."""
        keys: Any = split(key, self.num_layers)
        if self.scan and not isinstance(states, tuple):
            return self._scan(x, states, None if key is None else jnp.stack(keys), shared)
        states = [None] * self.num_layers if states is None else states
        new_states = []
        for block, state, layer_key in zip(self.blocks(), states, keys, strict=True):
            graph, params = nnx.split(block)
            x, state = self._run(graph)(params, x, state, layer_key, shared)
            new_states.append(state)
        return x, tuple(new_states)

    @on_any_mesh
    def repeat(
        self, x: Float[Array, "*B T D"], keys: Sequence[Key[Array, ""] | None]
    ) -> Float[Array, "*B T D"]:
        """Runs all layers once for each dropout key or None; blocks read ``x`` alone.

        On a mesh, each device adds up its gradients of all repeats before it sends them.
        """
        graph, params = nnx.split(self)

        def run(params: Any, x: Array) -> Array:
            stack = nnx.merge(graph, params)
            for key in keys:
                x, _ = stack(x, key=key)
            return x

        along, parts = row_axes(x, x.shape[0]) if len(keys) > 1 and x.ndim == 3 else ((), 1)
        if parts == 1:
            return run(params, x)
        own = jax.tree.map(lambda p: for_each(p, along, parts), params)
        rows = x.reshape(parts, -1, *x.shape[1:])
        return placed(by_rows(run, along)(own, rows).reshape(x.shape), "embed")

    def map(self, call: Callable[[Any], Any]) -> Any:
        """Applies ``call(block)`` to each layer; the result has the form of ``states``."""
        if not self.scan:
            return tuple(call(block) for block in self.blocks())
        periods = self.num_layers // (self.period or 1)
        if self.share:
            spread = lambda x: jnp.broadcast_to(x, (periods, *jnp.shape(x)))  # noqa: E731
            mapped = [jax.tree.map(spread, call(block)) for block in self.layers]
        else:
            mapped = [
                jax.lax.map(lambda p, graph=graph: call(nnx.merge(graph, p)), params)
                for graph, params in map(nnx.split, self.kinds())
            ]
        return mapped[0] if self.period is None else mapped

    def looped(self, states: Any) -> tuple[Any, ...]:
        """Returns states of ``map`` as a tuple, one a layer.

        Decoding uses these, because a scan would copy all caches for each token.
        """
        if isinstance(states, tuple):
            return states
        period = [states] if self.period is None else states
        return tuple(
            jax.tree.map(lambda x, i=i: x[i // len(period)], period[i % len(period)])
            for i in range(self.num_layers)
        )

    def unstack(self) -> None:
        """Gives scanned layers arrays of their own, in place; the stack is looped from then on."""
        if self.scan and not self.share:
            self.layers, self.period = nnx.List(self.blocks()), None
        self.scan = False

    def blocks(self) -> list[Any]:
        """Returns all layers, one by one; shared ones repeat."""
        if not self.scan or self.share:
            return [self.layers[i % len(self.layers)] for i in range(self.num_layers)]
        period = [nnx.split(block) for block in self.kinds()]
        return [
            nnx.merge(graph, jax.tree.map(lambda x, i=i: x[i // len(period)], params))
            for i in range(self.num_layers)
            for graph, params in [period[i % len(period)]]
        ]

    def kinds(self) -> list[Any]:
        """Returns the blocks that hold parameters; of a scanned stack, one period with a layers axis."""
        return list(self.layers) if isinstance(self.layers, nnx.List) else [self.layers]

    def _run(self, graph: nnx.GraphDef) -> Callable:
        def run(params, x, state, key, shared):
            block = nnx.merge(graph, params)
            return block(x, state, key, **_known(block, shared))

        # Closing over what is static (capture) is what static_argnums would do, without asking that every
        # shared value be hashable.
        if not self.remat:
            return run

        def run_again(params, x, state, key, shared):
            static = {name: value for name, value in shared.items() if _is_static(value)}
            arrays = {name: value for name, value in shared.items() if name not in static}
            policy = (
                getattr(jax.checkpoint_policies, self.remat) if self.remat in POLICIES else None
            )
            call = lambda p, x, s, k, a: run(p, x, s, k, a | static)  # noqa: E731
            inner = jax.checkpoint(call, policy=policy)
            return inner(params, x, state, key, arrays)

        return run_again

    def _scan(self, x, states, keys, shared):
        blocks = [nnx.split(block) for block in self.kinds()]
        runs = [self._run(graph) for graph, _ in blocks]
        own = [params for _, params in blocks]
        states = [states] if self.period is None or states is None else list(states)
        states = states * len(blocks) if states == [None] else states
        keys = None if keys is None else keys.reshape(-1, len(blocks), *keys.shape[1:])

        def body(x, layer):
            params, states, keys = layer
            params, new_states = own if self.share else params, []
            for i, run in enumerate(runs):
                key = None if keys is None else keys[i]
                x, state = run(params[i], x, states[i], key, shared)
                new_states.append(state)
            return x, new_states

        scanned = (None if self.share else own, states, keys)
        x, states = jax.lax.scan(body, x, scanned, length=self.num_layers // len(blocks))
        return x, states[0] if self.period is None else states


def encoder_stack(config: BlockConfig, num_layers: int, *, rngs: nnx.Rngs, **options: Any) -> Stack:
    """Makes a stack of encoder blocks; for the options see ``Stack``."""
    return Stack(lambda rngs: EncoderBlock(config, rngs=rngs), num_layers, **options, rngs=rngs)


def _known(block: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """Returns the shared arguments without the names to capture and the masks of other blocks."""
    if not isinstance(block, Block):
        return shared
    own, read = dict(shared), block.readers.values()
    if "capture" in own:
        own["capture"] = tuple(name for name in own["capture"] if name in block.capturable)
    if own.get("memory_masks"):
        own["memory_masks"] = {k: mask for k, mask in own["memory_masks"].items() if k in read}
    return own


def _is_static(value: Any) -> bool:
    return all(isinstance(leaf, str) for leaf in jax.tree.leaves(value))


def _stacked(blocks: Sequence[nnx.Module]) -> nnx.Module:
    """Stacks blocks to one module whose parameters have a leading layers axis."""
    graphs, states = zip(*(nnx.split(block) for block in blocks), strict=True)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    for _, variable in nnx.to_flat_state(stacked):
        inner = variable.get_value().ndim - 1
        variable.set_metadata("axes", ("layers", *axes_of(variable, inner)))
    return nnx.merge(graphs[0], stacked)


def stack_layers(layers: Params) -> Params:
    """Stacks {"0": layer, "1": layer, ...} to one layer with a leading axis L."""
    ordered = [layers[str(i)] for i in range(len(layers))]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *ordered)


def unstack_layers(layers: Params) -> Params:
    """Inverts ``stack_layers``."""
    depth = jax.tree.leaves(layers)[0].shape[0]
    return {str(i): jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(depth)}


def layer_weights(states: Any) -> Float[Array, "L ..."] | None:
    """Stacks the captured weights of attention to one array [L *B N T S], of the L layers that have any.

    A layer with several gives the last; the result is None if no weights were captured.

    Raises:
      ValueError: layers read memories of unlike lengths, or have unlike numbers of heads.
    """
    return _stacked_layers(states, lambda name: name.endswith(".weights"), "attention weights")


def by_layer(states: Any, name: str) -> Any:
    """Stacks what layers captured under a name to arrays [L ...], of the L layers that have it.

    Raises:
      ValueError: it is of another shape in another layer, or no layer has it.
    """
    found = _stacked_layers(states, lambda own: own == name, name)
    if found is None:
        raise ValueError(f"no layer captured {name}; expected it in capture.")
    return found


def _stacked_layers(states: Any, chosen: Callable[[str], bool], what: str) -> Any:
    each = states if isinstance(states, tuple | list) else [states]
    found = [[x for name, x in s.captured.items() if chosen(name)] for s in each]
    last = [own[-1] for own in found if own]
    if len(shapes := {jax.tree.leaves(own)[0].shape for own in last}) > 1:
        raise ValueError(
            f"layers have {what} of shapes {', '.join(map(str, sorted(shapes)))}, which one "
            "array cannot hold; leave return_weights and capture out."
        )
    if not last:
        return None
    # Each block of a scanned period has its own axis of periods.
    scanned = not isinstance(states, tuple)
    joined = lambda *x: jnp.concatenate(jnp.stack(x, 1)) if scanned else jnp.stack(x)  # noqa: E731
    return jax.tree.map(joined, *last)


def _is_state(value: Any) -> bool:
    return isinstance(value, BlockState)


def _without(asked: Collection[str], state: Any) -> Any:
    """Returns a state with only the captured activations that were asked for."""
    if not _is_state(state):
        return state
    return replace(state, captured={k: x for k, x in state.captured.items() if k in asked})
