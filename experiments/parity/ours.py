"""Measures a case in this library, from the checkpoint that ``transformers`` wrote."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import crossattn as xa
from crossattn import functional
from crossattn.decode import penalties, stopping
from crossattn.train.losses import cross_entropy
from crossattn.weights.labels import IGNORED
from experiments.parity import cases
from experiments.parity.cases import PAD, ROWS, Case, compared, inputs

_GRADIENT = "gradient of "


def gradients_of(measured: Iterable[str]) -> list[str]:
    """Returns the tensors whose gradients are among these entries."""
    return [name.removeprefix(_GRADIENT) for name in measured if name.startswith(_GRADIENT)]


def measure(case: Case, folder: Path, gradients: list[str]) -> dict[str, np.ndarray]:
    """Measures the entries of ``reference.measure``, with the gradients of these tensors."""
    model, params, _ = xa.load(folder)
    data = {name: jnp.asarray(array) for name, array in inputs(case).items()}
    few = {name: array[:ROWS] for name, array in data.items()}

    def loss(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        measured = _forward(case, model, params, few)
        return measured["loss"], measured

    (_, measured), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    by_name: Mapping[str, np.ndarray] = xa.weights.Tensors.of(model, grads)
    # Names of a file may differ from those of the family's rules.
    known = {k: v for names in model.layout.files.values() for k, v in names.items()}
    measured |= {_GRADIENT + name: by_name[known[name]] for name in gradients}
    if case.search:
        measured["greedy"] = _generate(case, model, params, data, num_beams=1)
        measured["beams"] = _generate(case, model, params, data, num_beams=cases.BEAMS)
    return compared(case, {name: np.asarray(array) for name, array in measured.items()})


def outputs(case: Case, model: Any, params: Any) -> dict[str, np.ndarray]:
    """Measures one pass, as ``reference.outputs`` does."""
    few = {name: jnp.asarray(array[:ROWS]) for name, array in inputs(case).items()}
    measured = jax.jit(lambda params: _forward(case, model, params, few))(params)
    return compared(case, {name: np.asarray(array) for name, array in measured.items()})


def _forward(
    case: Case, model: Any, params: Any, data: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Computes logits, cross-attention weights if there are any, and the loss."""
    if case.kind == "encoder":
        return _encode(functional.bind(model, params), model.config, data)
    if case.kind == "picture":
        return _classify(functional.bind(model, params), model.config, data)
    if case.kind == "picture and text":
        logits = xa.apply(model, params, data["image"], data["source"])
        ways, pairs = (logits, logits.T), jnp.arange(len(logits))
        return {"logits": logits, "loss": (_loss(ways[0], pairs) + _loss(ways[1], pairs)) / 2}
    if case.kind in ("latents of picture", "bytes"):
        return _perceive(model, params, data)
    if case.kind == "prompt":
        return _prompted(model, params, data)
    if case.kind == "said":
        return _say(functional.bind(model, params), data)
    labels, measured = data["labels"], {}
    if case.kind == "decoder":
        tokens, reading = jnp.maximum(labels, PAD), _memory(case, data)
        if case.reads:
            out = xa.apply(model, params, tokens, **reading, return_weights=True)
            measured["logits"], measured["weights"] = out
        else:
            measured["logits"] = xa.apply(model, params, tokens)
        return measured | {"loss": _loss(measured["logits"][:, :-1], labels[:, 1:])}
    source, present = _source(data)
    options: Any = dict(source_segment_ids=present, return_weights=True)
    logits, weights = xa.apply(model, params, source, model.target_in(labels), **options)
    return {"logits": logits, "weights": weights, "loss": _loss(logits, labels)}


def _perceive(model: Any, params: Any, data: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Computes a Perceiver's logits, and the weights of both cross-attentions."""
    given: Any = dict(tokens=data.get("source"), image=data.get("image"))
    given |= dict(segment_ids=data.get("present"), return_weights=True)
    logits, inputs, latents = xa.apply(model, params, **given)
    weights = {"weights of inputs": inputs, "weights of latents": latents}
    return weights | {"logits": logits, "loss": _loss(logits, data["labels"])}


def _prompted(model: Any, params: Any, data: dict[str, jax.Array]) -> dict[str, jax.Array]:
    tokens = data["prompts"]
    given: Any = dict(images=data["image"], image_positions=data["starts"])
    logits = xa.apply(model, params, tokens, **given)
    labels = jnp.where(tokens == cases.IMAGE_ID, IGNORED, tokens)
    return {"logits": logits, "loss": _loss(logits[:, :-1], labels[:, 1:])}


def _say(module: Any, data: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Computes frames [B T M] after the given ones, and cross-attention weights."""
    rows, _, mels = data["frames"].shape
    # The class reads the last frame of each group alone.
    groups = jnp.pad(data["frames"], [(0, 0), (0, 0), ((module.group - 1) * mels, 0)])
    read = dict(source_segment_ids=data["present"], speaker=data["speaker"], return_weights=True)
    hidden, weights = module.hidden(data["source"], groups, **read)
    frames = module.refine(module.logits(hidden)[0]).reshape(rows, -1, mels)
    return {"frames": frames, "weights": weights, "loss": frames.mean()}


def _encode(module: Any, config: Any, data: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Computes logits of a BERT's heads; without heads, vectors, the pooled vector and its mean as loss."""
    vectors = module.encode(data["source"], data["present"], types=data["types"]).vectors
    if not config.masked_lm:
        pooled = module.pooled(vectors)
        return {"vectors": vectors, "pooled": pooled, "loss": pooled.mean()}
    logits = module(data["source"], data["present"], types=data["types"])
    measured = {"logits": logits, "loss": _loss(logits, data["labels"])}
    if config.next_sentence:
        measured["next sentence"] = module.follows(vectors)
        measured["loss"] += _loss(measured["next sentence"], data["follows"])
    return measured


def _classify(module: Any, config: Any, data: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Computes logits of a ViT; without heads, vectors, the pooled vector and its mean as loss."""
    if config.num_classes is None:
        vectors = module.encode(data["image"]).vectors
        own = module.pooler is None  # CLIP's is the norm of the class token's vector
        pooled = module.hidden(data["image"]) if own else module.pooled(vectors)
        return {"vectors": vectors, "pooled": pooled, "loss": pooled.mean()}
    logits = module(data["image"])
    taught = config.distillation_output
    return {"logits": logits, "loss": logits.mean() if taught else _loss(logits, data["labels"])}


def _source(data: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
    [name] = {"frames", "source", "image"} & data.keys()
    return data[name], data.get("present")


def _memory(case: Case, data: dict[str, jax.Array]) -> dict[str, Any]:
    """Returns the vectors that a decoder reads."""
    if not case.reads:
        return {}
    return {"memory": data["memory"], "memory_segment_ids": data["present"]}


def _loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean over the labels that count."""
    total, sums = cross_entropy(logits, labels, labels != IGNORED)
    return total / sums["weight"]


def _generate(
    case: Case, model: Any, params: Any, data: dict[str, jax.Array], num_beams: int
) -> jax.Array:
    """Generates the best hypothesis of each row, [B T]."""
    options: dict[str, Any] = dict(
        batch=cases.SEARCHED, max_new_tokens=cases.NEW_TOKENS, **model.ids
    )
    if num_beams > 1:
        options |= dict(
            num_beams=num_beams,
            length_penalty=penalties.power(cases.PENALTY),
            stopping=stopping.transformers(length_penalty=cases.PENALTY),
        )
    if case.kind == "decoder":
        options["prefix"] = data["prompts"]
        options["inputs"] = _memory(case, data)
    if case.kind == "prompt":
        rows = zip(np.asarray(data["prompts"]).tolist(), data["lengths"], strict=True)
        options["prefix"] = [row[:length] for row, length in rows]
        options["inputs"] = {"images": data["image"], "image_positions": data["starts"]}
    source = () if case.kind in ("decoder", "prompt") else _source(data)

    def run(params: Any) -> Any:
        hypotheses = xa.decode.generate(functional.bind(model, params), *source, **options)
        return hypotheses.tokens[:, 0]

    return jax.jit(run)(params)
