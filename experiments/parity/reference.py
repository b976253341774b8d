"""The results of ``transformers`` for a case, and its checkpoint."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from experiments.parity.cases import (
    BEAMS,
    EOS,
    IGNORED,
    IMAGE_ID,
    LENGTH,
    NEW_TOKENS,
    PAD,
    PENALTY,
    ROWS,
    Case,
    chosen_gradients,
    compared,
    inputs,
)
from experiments.parity.weights import lively

_OUTPUTS = {
    "logits": "logits",
    "logits_per_image": "logits",
    "prediction_logits": "logits",
    "seq_relationship_logits": "next sentence",
    "last_hidden_state": "vectors",
    "pooler_output": "pooled",
}


def build(case: Case, folder: Path) -> Any:
    """The model of a case, its weights ``lively``, saved in the folder."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    cls = getattr(transformers, case.model)
    config = cls.config_class(**case.config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls(config).eval()
    model.set_attn_implementation("eager")  # which gives its weights
    for name in case.untied:
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(torch.empty(1)))
        owner = model.get_submodule(module)
        getattr(owner, leaf).data = torch.zeros(owner.out_features, owner.in_features)
    model.save_pretrained(folder)
    # Tables of sinusoids are frozen, and stay; buffers (a bias of logits) do not.
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    state, own = model.state_dict(), _own_names(model, folder)
    with torch.no_grad():
        for name, shape in saved_shapes(folder).items():
            if own[name] not in frozen:
                state[own[name]].copy_(torch.from_numpy(lively(name, shape, case.search)))
    model.save_pretrained(folder)
    return model


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a checkpoint of one file."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


def _own_names(model: Any, folder: Path) -> dict[str, str]:
    """The names of a checkpoint's tensors -> those of the model, which for some families are others.

    A tensor of another name is found by what is in it: the model is saved once with numbers for weights.
    """
    import torch
    from safetensors.numpy import load_file

    names, state = saved_shapes(folder), model.state_dict()
    if names.keys() <= state.keys():
        return {name: name for name in names}
    kept = {name: tensor.clone() for name, tensor in state.items()}
    with torch.no_grad(), tempfile.TemporaryDirectory() as numbered:
        for number, tensor in enumerate(state.values()):
            tensor.fill_(number)
        model.save_pretrained(numbered)
        found = load_file(Path(numbered) / "model.safetensors")
        for name, tensor in state.items():
            tensor.copy_(kept[name])
    own = list(state)
    return {n: n if n in state else own[round(found[n].flat[0])] for n in names}


def measure(case: Case, model: Any, folder: Path) -> dict[str, np.ndarray]:
    """Logits, cross-attention weights, loss, three gradients, generated tokens."""
    measured = outputs(case, model)
    measured["loss"].backward()
    parameters, own = dict(model.named_parameters()), _own_names(model, folder)
    for name in chosen_gradients(saved_shapes(folder)):
        measured[f"gradient of {name}"] = parameters[own[name]].grad
    if case.search:
        data = _tensors(case)
        measured["greedy"] = _generate(case, model, data, num_beams=1)
        measured["beams"] = _generate(case, model, data, num_beams=BEAMS, length_penalty=PENALTY)
    return arrays(case, measured)


def outputs(case: Case, model: Any) -> dict[str, Any]:
    """The results of one pass: logits, cross-attention weights, the loss."""
    import torch

    data = _tensors(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of pairs, about an older version's loss
        out = model(**_call(case, data), output_attentions=True)
    measured = {name: out[key] for key, name in _OUTPUTS.items() if key in out}
    # A model without heads has no loss, nor has one with a teacher; a mean stands in for one.
    measured["loss"] = out.loss if "loss" in out else out[_without_loss(out)].mean()
    if case.kind in ("latents of picture", "bytes"):
        measured |= _read_and_written(case, out, data)
    elif out.get("cross_attentions"):
        measured["weights"] = torch.stack(out.cross_attentions)
    return measured


def arrays(case: Case, measured: dict[str, Any]) -> dict[str, np.ndarray]:
    """The measurements as arrays, as they are compared."""
    return compared(case, {name: tensor.detach().numpy() for name, tensor in measured.items()})


def _tensors(case: Case) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in inputs(case).items()}


def _read_and_written(case: Case, out: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Weights of both cross-attentions; and logits of the bytes that there are, not of all positions."""
    inputs, latents = out.cross_attentions
    measured = {"weights of inputs": inputs, "weights of latents": latents}
    if case.model == "PerceiverForMaskedLM":
        size = data["source"].shape[1]
        measured |= {"weights of latents": latents[:, :, :size], "logits": out.logits[:, :size]}
    return measured


def _without_loss(out: Any) -> str:
    return "logits" if "logits" in out else "pooler_output"


def _call(case: Case, data: dict[str, Any]) -> dict[str, Any]:
    import torch

    few = {name: tensor[:ROWS] for name, tensor in data.items()}
    names = {"labels": "labels", "types": "token_type_ids", "follows": "next_sentence_label"}
    call = {names[key]: tensor.long() for key, tensor in few.items() if key in names}
    if case.kind == "speech":
        return call | {"input_features": few["frames"].transpose(1, 2)}
    if case.model in ("ViTModel", "DeiTModel", "CLIPVisionModel") or case.model.endswith(
        "WithTeacher"
    ):
        del call["labels"]
    if case.kind == "prompt":
        prompts, pictures = few["prompts"], _pictures(few)
        return {
            "input_ids": prompts,
            "pixel_values": pictures,
            "labels": prompts.masked_fill(prompts == IMAGE_ID, IGNORED),
        }
    if case.kind == "picture and text":
        call |= {"input_ids": few["source"], "return_loss": True}
    if "image" in few:
        return call | {"pixel_values": few["image"].permute(0, 3, 1, 2)}
    if case.model == "PerceiverForMaskedLM":
        more = case.config["max_position_embeddings"] - LENGTH
        call["labels"] = torch.nn.functional.pad(call["labels"], (0, more), value=IGNORED)
    if case.kind == "decoder":
        return call | _memory(few) | {"input_ids": call["labels"].clamp(min=PAD)}
    return call | {"input_ids": few["source"].long(), "attention_mask": few["present"]}


def _pictures(data: dict[str, Any]) -> Any:
    """Those that stand somewhere, of all rows one after the other."""
    return data["image"][data["starts"] >= 0].permute(0, 3, 1, 2)


def _left_padded(data: dict[str, Any]) -> dict[str, Any]:
    import torch

    P = data["prompts"].shape[1]
    rows = zip(data["prompts"].tolist(), data["lengths"].tolist(), strict=True)
    prompts = [[PAD] * (P - length) + row[:length] for row, length in rows]
    present = torch.arange(P) >= P - data["lengths"][:, None]
    return {"input_ids": torch.tensor(prompts), "attention_mask": present.long()}


def _memory(data: dict[str, Any]) -> dict[str, Any]:
    if "memory" not in data:
        return {}
    return {"encoder_hidden_states": data["memory"], "encoder_attention_mask": data["present"]}


def _generate(case: Case, model: Any, data: dict[str, Any], **options: Any) -> Any:
    """Generated tokens [B T], without what they began with."""
    import torch
    from transformers.generation.utils import GenerationMixin

    given = {
        "speech": lambda: {"input_features": data["frames"].transpose(1, 2)},
        "caption": lambda: {"pixel_values": data["image"].permute(0, 3, 1, 2)},
        "decoder": lambda: {
            "input_ids": data["prompts"].long(),
            "attention_mask": torch.ones_like(data["prompts"]),
            **_memory(data),
        },
        "prompt": lambda: _left_padded(data) | {"pixel_values": _pictures(data)},
        "pair": lambda: {
            "input_ids": data["source"].long(),
            "attention_mask": data["present"],
        },
    }[case.kind]()
    if case.reads:
        given["use_cache"] = False  # its cache would have no place for what it reads
    start = data["prompts"].shape[1] if case.kind in ("decoder", "prompt") else 1
    # Whisper's own generate() is about long recordings; this is what it calls for each piece.
    tokens = GenerationMixin.generate(
        model, **given, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=PAD,
        eos_token_id=EOS, **options,
    )[:, start:]  # fmt: skip
    padded = torch.full((len(tokens), NEW_TOKENS), PAD)
    padded[:, : tokens.shape[1]] = tokens
    return padded
