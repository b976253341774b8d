"""Initialises parameters from runs or from published weights: ``config.init``.

A parameter that only one of sources and model has, or that has another shape, is refused unless
``init.take`` or ``init.new`` names it. No parameter is taken from two sources.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from crossattn.functional import flatten, nest
from crossattn.train import processes
from crossattn.train.storage import Folder
from experiments.errors import SettingsError
from experiments.runs import find_run, parameters_of

_LOG = logging.getLogger(__name__)
_NAMED = 5  # the most names in a message


def run_begun_with(config: Any) -> Folder | None:
    """Returns the first run that ``init.from`` names, whose ``assets`` have tokenizers; None for weights."""
    source = config.get("init", {}).get("from")
    return find_run(source.partition(",")[0]) if source else None


def assets_begun_with(config: Any) -> Folder | None:
    """Returns the folder of tokenizers of ``run_begun_with``, or None."""
    run = run_begun_with(config)
    return None if run is None else run / "assets"


def initial(config: Any, task: Any) -> Callable[[Any], Any] | None:
    """Returns a function of fresh parameters that gives a run's first ones; None to use them as they are.

    Raises:
      SettingsError: the source does not fit the model under the rules of ``config.init``.
    """
    section = config.get("init", {})
    if not section.get("from"):
        return None
    first = run_begun_with(config)
    if config.get("tokenizer", {}).get("new") and first is None:
        raise SettingsError(
            f"config.tokenizer.new is {config.tokenizer.new!r}, but init.from names {section['from']}, no run"
            " that has the other side's tokenizer."
        )
    taken, tokenized = dict[str, Any](), set[str]()
    for source in section["from"].split(","):
        given = _renamed(flatten(parameters_of(source, section.get("step"))), section.get("rename"))
        own = _taken(given, section.get("take"))
        if twice := own.keys() & taken.keys():
            raise SettingsError(
                f"config.init.from is {section['from']!r}, of which two have {_some(sorted(twice))}; say by"
                " init.take which is taken."
            )
        if first is not None and not taken:
            tokenized = {name for name in own if not _is_new(name, config)}  # as in this run
        taken |= own
    shapes = flatten(jax.eval_shape(task.init, jax.random.key(0)))
    begun = _begun(shapes, taken, section.get("new"), section["from"])
    if task.checkpoint is None:
        _refuse_tables([name for name in begun if name not in tokenized], task, section["from"])

    def begin(fresh: Any) -> Any:
        flat = flatten(fresh)
        return nest(
            {name: _put(begun[name], x) if name in begun else x for name, x in flat.items()}
        )

    return begin


def _is_new(name: str, config: Any) -> bool:
    """Returns whether a parameter belongs to the side whose tokenizer is made for this run."""
    new = config.get("tokenizer", {}).get("new")
    return new is not None and name.startswith("source_") == (new == "source")


def _renamed(given: Mapping[str, Any], rules: str | None) -> dict[str, Any]:
    renamed = dict(given)
    for rule in (rules or "").split(","):
        pattern, sign, text = rule.partition("=")
        if not rule:
            continue
        if not sign:
            raise SettingsError(f"config.init.rename has {rule!r}; expected PATTERN=TEXT.")
        renamed = {_compiled("rename", pattern).sub(text, name): x for name, x in renamed.items()}
    if len(renamed) != len(given):
        raise SettingsError("config.init.rename gives several parameters the same name.")
    return renamed


def _taken(given: Mapping[str, Any], pattern: str | None) -> dict[str, Any]:
    if pattern is None:
        return dict(given)
    chosen = _compiled("take", pattern)
    taken = {name: x for name, x in given.items() if chosen.search(name)}
    if not taken:
        raise SettingsError(
            f"config.init.take is {pattern!r}, which is found in no name; names are such as"
            f" {_some(given)}."
        )
    return taken


def _begun(
    fresh: Mapping[str, Any], taken: Mapping[str, Any], new: str | None, source: str
) -> dict[str, Any]:
    is_new = _compiled("new", new).search if new is not None else lambda name: None
    if unknown := [name for name in taken if name not in fresh]:
        raise SettingsError(
            f"{source} has {_some(unknown)}, which the model has not; say what is taken by init.take, or"
            " how it is called here by init.rename."
        )
    if missing := [name for name in fresh if name not in taken and not is_new(name)]:
        raise SettingsError(
            f"{source} lacks {_some(missing)}; say by init.new what begins afresh, or by init.rename how it"
            " is called there."
        )
    for name, value in taken.items():
        if not is_new(name) and value.shape != fresh[name].shape:
            raise SettingsError(
                f"{source} has {name} of shape {list(value.shape)}, the model"
                f" {list(fresh[name].shape)}; say by init.new that it begins afresh, or give the model the"
                " other's sizes."
            )
    begun = {name: x for name, x in taken.items() if not is_new(name)}
    if processes.is_main():
        _LOG.info("%d of %d parameters begin as in %s", len(begun), len(fresh), source)
    return begun


def _refuse_tables(begun: Sequence[str], task: Any, source: str) -> None:
    """Refuses tables of tokens whose tokenizer is not the task's."""
    axes = flatten(task.logical_axes())
    if tables := [name for name in begun if "vocab" in axes[name]]:
        raise SettingsError(
            f"{_some(tables)} of {source} belong to its tokenizer, and config.tokenizer makes another; let"
            f" them begin afresh, init.new='{tables[0]}'."
        )


def _put(value: Any, like: jax.Array) -> jax.Array:
    """Returns a value with the sharding and dtype of a fresh parameter."""
    if isinstance(value, jax.Array):
        return jax.device_put(value.astype(like.dtype), like.sharding)
    whole = np.asarray(value).astype(like.dtype)
    return jax.make_array_from_callback(whole.shape, like.sharding, lambda index: whole[index])


def _compiled(key: str, pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SettingsError(
            f"config.init.{key} is {pattern!r}, no regular expression: {error}."
        ) from None


def _some(names: Any) -> str:
    listed = list(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + more
