"""Converts g2p-en to a checkpoint: tensors, a config with the phonemes, a tokenizer of letters."""

import ast
import json
from pathlib import Path

import numpy as np

from crossattn.weights.formats import safetensors
from experiments import launch

_PROGRAM = "g2p.py"


def convert(source: Path, target: Path) -> None:
    """Writes the model in the folder of the package's files as a checkpoint folder."""
    with np.load(source / "checkpoint20.npz", allow_pickle=False) as file:
        tensors = {name: np.ascontiguousarray(file[name]) for name in file.files}
    letters, phonemes = tokens((source / _PROGRAM).read_text(encoding="utf-8"))
    config = {
        "model_type": "g2p-en",
        "hidden_size": tensors["enc_emb"].shape[1],
        "source_vocab_size": len(letters),
        "vocab_size": len(phonemes),
        "phonemes": phonemes,
        "pad_token_id": phonemes.index("<pad>"),
        "decoder_start_token_id": phonemes.index("<s>"),
        "eos_token_id": phonemes.index("</s>"),
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _letter_tokenizer(letters).save(str(target / "tokenizer.json"))
    safetensors.write(target / safetensors.WEIGHTS, tensors)


def tokens(program: str) -> tuple[list[str], list[str]]:
    """Reads the letters and the phonemes off the package's program, which is not run."""
    found = {}
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            if node.targets[0].attr in ("graphemes", "phonemes"):
                found[node.targets[0].attr] = _texts(node.value)
    return found["graphemes"], found["phonemes"]


def _texts(node: ast.AST) -> list[str]:
    """Returns the elements of a list, of a sum of lists, or of ``list("abc")``."""
    if isinstance(node, ast.BinOp):
        return _texts(node.left) + _texts(node.right)
    if isinstance(node, ast.Call):
        return list(ast.literal_eval(node.args[0]))
    return ast.literal_eval(node)


def _letter_tokenizer(letters: list[str]):
    """Returns a tokenizer of the letters of a word in lower case, with ``</s>`` after them."""
    try:
        from tokenizers import (
            Regex,
            Tokenizer,
            decoders,
            models,
            normalizers,
            pre_tokenizers,
            processors,
        )
    except ImportError:
        raise launch.Refused(
            "a tokenizer of letters needs tokenizers: pip install 'crossattn[weights]'"
        ) from None

    ids = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<pad>", "<unk>", "</s>"])
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    ending = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", ids["</s>"])])
    tokenizer.post_processor = ending
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
