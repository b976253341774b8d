"""The adapter of an architecture of this library, or of a module of one's own, for the suite of models.

    found = xa.models.find("transformer")
    models.conformance(architectures.adapter(found))

It is made from what the architecture's file says: ``tiny``, ``example``, the signatures of the model and of
its ``prefill``. A sequence is what ``example`` makes longer for padding; segments name the one they mask.
"""

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn import functional
from crossattn.testing.models import Model, NotOffered

ONE_TEXT_A_ROW = {"perceiver_io"}
"""Models with positions and segments as arguments whose rows are read as one input all the same."""


def random_params(build: functional.Build, seed: int = 0) -> Any:
    """Draws parameters of ``build``'s shapes where every bias and scale matters; nothing is compiled."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> Any:
        name = path[-1].key
        noise = rng.normal(size=leaf.shape)
        if name == "running_var":
            noise = 1 + np.abs(noise)
        if name == "kernel":
            noise *= 2 / np.sqrt(np.prod(leaf.shape[-2:]))
        return ((1 + 0.2 * noise) if name == "scale" else 0.5 * noise).astype(leaf.dtype)

    # The same abstract module that ``bind`` asks for, which is made once for a build.
    return jax.tree_util.tree_map_with_path(draw, functional.shapes(build))


def adapter(
    architecture: Any,
    method: str = "__call__",
    build: functional.Build | None = None,
    params: Any = None,
) -> Model:
    """Makes the adapter of an ``xa.models.Architecture`` in its tiny config.

    Args:
      architecture: of ``xa.models.find``.
      method: the method that is called, ``hidden`` for the vectors before an output layer.
      build: makes another shape than the tiny one, with the same inputs.
      params: of ``build``; None draws them.
    """
    module, config = architecture.module, architecture.tiny()
    build = build or (lambda rngs: module(config, rngs=rngs))
    params = random_params(build) if params is None else params
    example = partial(architecture.example, config)

    @jax.jit
    def run(params: Any, given: Any) -> Any:
        return _joined(functional.apply(build, params, **given, method=method))

    short, long = example(2), example(2, padding=1)
    out, grown = (jax.eval_shape(run, params, given) for given in (short, long))
    roles = _roles(short, long, "target" if out.shape != grown.shape else "source")
    square = out.shape == (2, 2) and jax.eval_shape(run, params, example(3)).shape == (3, 3)
    segments = {f"{prefix}segment_ids" for _, prefix in roles.values()}
    inside = {name for names, _ in roles.values() for name in names}
    named = inspect.signature(getattr(module, "hidden", module.__call__)).parameters
    takes = {*roles, *short} - segments - (inside - {*roles})
    for role, (_, prefix) in roles.items():
        if f"{prefix}positions" in named:
            takes |= {f"{role}_positions"}
        packs = role + "_positions" in takes and architecture.name not in ONE_TEXT_A_ROW
        takes |= {f"{role}_segments" if packs else f"{role}_mask"}

    def draw(rows: int) -> dict[str, Any]:
        given = example(rows)
        rest = {name: x for name, x in given.items() if name not in segments | inside}
        return rest | {role: {n: given[n] for n in names} for role, (names, _) in roles.items()}

    def call(**given: Any) -> Any:
        found = run(params, _own(roles, given))
        return jnp.diagonal(found) if square else found  # a picture's score beside its own text

    model = Model(call, draw, causal=False, convert=jnp.asarray, takes=takes)
    if not hasattr(module, "prefill") or (method == "__call__" and hasattr(module, "refine")):
        return model  # nothing is generated, or what is called reads all that was
    return _generating(model, module, build, params, method, roles)


def _roles(short: dict, long: dict, ends_in: str) -> dict[str, tuple[list[str], str]]:
    """Returns, of source and target, the names of their arrays and the prefix of their segments."""
    longer = {name for name, x in short.items() if np.shape(x) != np.shape(long[name])}
    segments = {name for name in longer if name.endswith("segment_ids")}
    longer, roles = longer - segments, {}
    for ids in sorted(segments, key=len, reverse=True):  # the one without a prefix has the rest
        prefix = ids.removesuffix("segment_ids")
        names = sorted(name for name in longer if name.startswith(prefix.rstrip("_")))
        longer -= {*names}
        roles[ends_in if prefix in ("", "target_") else "source"] = names, prefix
    return roles


def _own(roles: dict, given: dict[str, Any]) -> dict[str, Any]:
    """Gives arguments the names that the module has for them."""
    named = dict(given)
    for role, (_, prefix) in roles.items():
        named |= named.pop(role, {})
        for theirs, ours in (
            ("mask", "segment_ids"),
            ("segments", "segment_ids"),
            ("positions", "positions"),
        ):
            if f"{role}_{theirs}" in named:
                named[prefix + ours] = named.pop(f"{role}_{theirs}")
    return named


def _generating(
    model: Model, module: Any, build: Any, params: Any, method: str, roles: dict
) -> Model:
    """Adds the steps of a model that generates."""
    ((written,), _) = roles["target"]
    step_method = "decode_step" if method == "__call__" else "decode_hidden"
    reads = {*inspect.signature(module.prefill).parameters}

    @partial(jax.jit, static_argnames=("rows", "length"))
    def prefill(params: Any, given: Any, rows: int, length: int) -> Any:
        return functional.apply(build, params, rows, 1, length, **given, method="prefill")

    @jax.jit
    def decode(params: Any, tokens: Any, state: Any) -> Any:
        out, state = functional.apply(build, params, tokens[:, None], state, method=step_method)
        return _joined(out)[:, 0], state

    def begin(rows: int, length: int, padding: Any = None, **given: Any) -> Any:
        given = {name: x for name, x in _own(roles, given).items() if name in reads}
        state = prefill(params, given, rows, length)
        if padding is None:
            return state
        if not hasattr(state, "pad_left"):
            raise NotOffered("its states have no pad_left")
        return state.pad_left(padding)

    def step(target: Any, state: Any) -> Any:
        return decode(params, target[written], state)

    begins = {name for name in model.takes or () if not name.startswith("target")}
    begins |= {"rows", "length", "padding"}
    return replace(model, causal=True, begin=begin, step=step, begins=begins)


def _joined(found: Any) -> Any:
    """Returns outputs in one array: vectors of frames beside the logit that each is the last."""
    first, *more = jax.tree.leaves(found)
    return jnp.concatenate([first, *(x[..., None] for x in more)], axis=-1) if more else first
