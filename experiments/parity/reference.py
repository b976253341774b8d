"""Measures a case in ``transformers``, and writes its checkpoint."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from experiments.parity import cases
from experiments.parity.cases import (
    EOS,
    IGNORED,
    PAD,
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
    "spectrogram": "frames",
    "last_hidden_state": "vectors",
    "pooler_output": "pooled",
}


def build(case: Case, folder: Path) -> Any:
    """Builds the model of a case with ``lively`` weights, and saves it in the folder."""
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
    """Reads names and shapes of the tensors in a checkpoint of one file."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


def _own_names(model: Any, folder: Path) -> dict[str, str]:
    """Returns names of a checkpoint's tensors -> names in the model, which differ for some families.

    The model is saved once with the tensors' numbers as weights, which tell where each tensor is.
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
    """Measures logits, cross-attention weights, loss, three gradients and generated tokens."""
    measured = outputs(case, model)
    measured["loss"].backward()
    parameters, own = dict(model.named_parameters()), _own_names(model, folder)
    for name in chosen_gradients(saved_shapes(folder)):
        measured[f"gradient of {name}"] = parameters[own[name]].grad
    if case.search:
        data = _tensors(case)
        measured["greedy"] = _generate(case, model, data, num_beams=1)
        measured["beams"] = _generate(
            case, model, data, num_beams=cases.BEAMS, length_penalty=cases.PENALTY
        )
    return arrays(case, measured)


def outputs(case: Case, model: Any) -> dict[str, Any]:
    """Measures one pass: logits, cross-attention weights, the loss."""
    import torch

    data = _tensors(case)
    if case.kind == "said":
        without_dropout(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of pairs, about an older version's loss
        out = model(**_call(case, data), output_attentions=True)
    measured = {name: out[key] for key, name in _OUTPUTS.items() if key in out}
    # Instead of a missing loss, a mean is differentiated.
    differentiated = ("loss", "logits", "spectrogram", "pooler_output")
    measured["loss"] = out[next(key for key in differentiated if key in out)].mean()
    if case.kind in ("latents of picture", "bytes"):
        measured |= _read_and_written(case, out, data)
    elif out.get("cross_attentions"):
        measured["weights"] = torch.stack(out.cross_attentions)
    return measured


def without_dropout(model: Any) -> None:
    """Takes out the dropout of a SpeechT5's prenet, which is drawn in evaluation too."""
    model.speecht5.decoder.prenet._consistent_dropout = lambda x, p: x


def arrays(case: Case, measured: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the measurements as arrays for the comparison."""
    return compared(case, {name: tensor.detach().numpy() for name, tensor in measured.items()})


def _tensors(case: Case) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in inputs(case).items()}


def _read_and_written(case: Case, out: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Returns weights of both cross-attentions, and the logits of bytes without those of padding."""
    inputs, latents = out.cross_attentions
    measured = {"weights of inputs": inputs, "weights of latents": latents}
    if case.model == "PerceiverForMaskedLM":
        size = data["source"].shape[1]
        measured |= {"weights of latents": latents[:, :, :size], "logits": out.logits[:, :size]}
    return measured


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
            "labels": prompts.masked_fill(prompts == cases.IMAGE_ID, IGNORED),
        }
    if case.kind == "picture and text":
        call |= {"input_ids": few["source"], "return_loss": True}
    if "image" in few:
        return call | {"pixel_values": few["image"].permute(0, 3, 1, 2)}
    if case.model == "PerceiverForMaskedLM":
        more = case.config["max_position_embeddings"] - cases.LENGTH
        call["labels"] = torch.nn.functional.pad(call["labels"], (0, more), value=IGNORED)
    if case.kind == "decoder":
        return call | _memory(few) | {"input_ids": call["labels"].clamp(min=PAD)}
    if case.kind == "said":
        call |= {"decoder_input_values": few["frames"], "speaker_embeddings": few["speaker"]}
    return call | {"input_ids": few["source"].long(), "attention_mask": few["present"]}


def _pictures(data: dict[str, Any]) -> Any:
    """Returns the pictures of all rows that have a position, one after the other."""
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
    """Generates tokens [B T], without their prompts."""
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
        given["use_cache"] = False  # which has no place for the memory
    start = data["prompts"].shape[1] if case.kind in ("decoder", "prompt") else 1
    # Whisper's own generate() cuts long recordings and calls this for each piece.
    tokens = GenerationMixin.generate(
        model, **given, do_sample=False, max_new_tokens=cases.NEW_TOKENS, pad_token_id=PAD,
        eos_token_id=EOS, **options,
    )[:, start:]  # fmt: skip
    padded = torch.full((len(tokens), cases.NEW_TOKENS), PAD)
    padded[:, : tokens.shape[1]] = tokens
    return padded
