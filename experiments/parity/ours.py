"""What this library computes of a case, from the checkpoint that ``transformers`` wrote."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import crossattn as xa
from crossattn import functional
from crossattn.decode import penalties, stopping
from crossattn.decode.target import Target
from experiments.parity.cases import (
    BEAMS,
    NEW_TOKENS,
    PAD,
    PENALTY,
    ROWS,
    SEARCHED,
    Case,
    compared,
    inputs,
)


def measure(case: Case, folder: Path, gradients: list[str]) -> dict[str, np.ndarray]:
    """The same entries that ``reference.measure`` gives.

    Args:
      gradients: the names of the tensors by which the loss is differentiated.
    """
    model, params, _ = xa.load(folder)
    data = {name: jnp.asarray(array) for name, array in inputs(case).items()}
    few = {name: array[:ROWS] for name, array in data.items()}

    def loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        logits, weights, labels = _forward(case, model, params, few)
        return _cross_entropy(logits, labels), (logits, weights)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, (logits, weights)), grads = run(params)
    found: dict[str, Any] = {"logits": logits, "loss": value}
    if weights is not None:
        found["weights"] = weights
    by_name: Mapping[str, np.ndarray] = xa.weights.Tensors.of(model, grads)
    # A file may call a tensor otherwise than the family's rules do.
    known = {k: v for names in model.layout.files.values() for k, v in names.items()}
    found |= {f"gradient of {name}": by_name[known[name]] for name in gradients}
    if case.search:
        found["greedy"] = _generate(case, model, params, data, beams=1)
        found["beams"] = _generate(case, model, params, data, beams=BEAMS)
    return compared(case, {name: np.asarray(array) for name, array in found.items()})


def _forward(case: Case, model: Any, params: Any, data: dict[str, jax.Array]) -> tuple:
    """Logits, cross-attention weights, and the labels of the logits."""
    labels = data["labels"]
    if case.kind == "encoder":
        logits = xa.apply(model, params, data["source"], data["present"], types=data["types"])
        return logits, None, labels
    if case.kind == "decoder":
        tokens = jnp.maximum(labels, PAD)
        if not case.reads:
            logits, weights = xa.apply(model, params, tokens), None
        else:
            reading = dict(memory=data["memory"], memory_segments=data["present"])
            logits, weights = xa.apply(model, params, tokens, **reading, return_weights=True)
        ignored = jnp.full_like(labels[:, :1], -100)
        return logits, weights, jnp.concatenate([labels[:, 1:], ignored], axis=1)
    source, present = _source(data)
    options = dict(source_segments=present, return_weights=True)
    logits, weights = xa.apply(model, params, source, model.target_in(labels), **options)
    return logits, weights, labels


def _source(data: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
    return data["frames" if "frames" in data else "source"], data.get("present")


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over the labels that count."""
    counts = labels >= 0
    log_p = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.sum(picked * counts) / jnp.sum(counts)


def _generate(
    case: Case, model: Any, params: Any, data: dict[str, jax.Array], beams: int
) -> jax.Array:
    """The best hypothesis of each row, [B T]."""
    target: dict[str, Any] = dict(batch=SEARCHED, max_length=NEW_TOKENS, **model.ids)
    if case.kind == "decoder":
        target["prefix"] = data["prompts"]
    room = Target(**target).room

    def run(params: Any) -> jax.Array:
        module = functional.bind(model, params)
        if case.kind == "decoder":
            states = module.start(SEARCHED, beams, room)
        else:
            states = module.start(*_source(data), beams, room)
        if beams == 1:
            return xa.decode.greedy(module.step, states, **target).tokens[:, 0]
        found = xa.decode.beam_search(
            module.step,
            states,
            beams=beams,
            length_penalty=penalties.power(PENALTY),
            stopping=stopping.transformers(length_penalty=PENALTY),
            **target,
        )
        return found.tokens[:, 0]

    return jax.jit(run)(params)
