"""Converts ANNalog to a checkpoint: tensors, a config, a tokenizer of SMILES."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from crossattn.weights.formats import safetensors
from experiments import launch
from experiments.fetch_weights import torch_file
from experiments.fetch_weights.whisper import stack_sizes

_HEADS = 8
# An atom in brackets, the number of a ring, an atom of two letters, any other.
_PIECES = r"\[[^\]]*\]|%\d{2}|Br|Cl|."


def convert(source: Path, target: Path) -> None:
    """Writes the model in the folder of the package's files as a checkpoint folder."""
    tensors = torch_file.read_tensors(source / "Lev_extended.pt")
    words = torch_file.read_plain(source / "stereo_experiment_vocab_ttf.pkl")["itos"]
    smiles_tokenizer(words).save(str(target / "tokenizer.json"))
    config = json.dumps(model_config(tensors, words), indent=2) + "\n"
    (target / "config.json").write_text(config, encoding="utf-8")
    safetensors.write(target / safetensors.WEIGHTS, tensors)


def model_config(tensors: dict[str, np.ndarray], words: list[str]) -> dict[str, Any]:
    """Returns ``config.json``: sizes from the tensors, ids from the vocabulary."""
    length, dim = tensors["encoder.pos_embedding.weight"].shape
    return {
        "model_type": "annalog",
        "activation_function": "relu",
        "vocab_size": len(words),
        "d_model": dim,
        "max_position_embeddings": length,
        **stack_sizes(tensors, "", _HEADS, "positionwise_feedforward.fc_1.bias"),
        "pad_token_id": words.index("<pad>"),
        "bos_token_id": words.index("<sos>"),
        "eos_token_id": words.index("<eos>"),
    }


def smiles_tokenizer(words: list[str]) -> Any:
    """Returns a tokenizer that splits a SMILES into atoms, bonds, branches and rings.

    Args:
      words: the vocabulary in order of its ids, with ``<unk>``, ``<sos>`` and ``<eos>``.

    Raises:
      Refused: the package ``tokenizers`` is missing.
    """
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    except ImportError:
        raise launch.Refused(
            "a tokenizer of SMILES needs tokenizers: pip install 'crossattn[weights]'"
        ) from None

    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<pad>", "<sos>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<sos> $A <eos>", special_tokens=[(x, ids[x]) for x in ("<sos>", "<eos>")]
    )
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
