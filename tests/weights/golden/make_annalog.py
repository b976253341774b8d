"""Makes annalog.npz again: what ANNalog's own code computes, with random small weights and with its own.

    python -m tests.weights.golden.make_annalog FOLDER

needs torch, and the package's wheel unpacked in the folder.
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np

from experiments.parity.weights import weight

PATH = Path(__file__).with_name("annalog.npz")
VOCAB, DIM, LAYERS, HEADS, HIDDEN, LENGTH = 13, 16, 2, 4, 24, 12
PAD, BEGIN, END = 1, 2, 3
MOLECULES = ("CC(=O)Oc1ccccc1C(=O)O", "CN1CCC[C@H]1c1cccnc1", "Clc1ccc(Br)cc1")
NEW_TOKENS = 40


def small_batch():
    """Returns source and target tokens [3 S], [3 T]; rows of unequal length."""
    random = np.random.RandomState(0)
    source, target = (random.randint(4, VOCAB, (3, length)) for length in (7, 5))
    source[1, 4:], target[2, 3:] = PAD, PAD
    target[:, 0] = BEGIN
    return source, target


def _own_code(folder: Path):
    """Imports the modules of layers and of tokens, without their package, which imports chemistry."""
    sys.path.insert(0, str(folder / "annalog"))
    return importlib.import_module("model_files.seq2seq_attention"), importlib.import_module(
        "model_files.vocabulary"
    )


def _model(code, vocab, dim, layers, heads, hidden, length):
    sizes = (vocab, dim, layers, heads, hidden, 0.0, "cpu", length)
    return code.Seq2Seq(code.Encoder(*sizes), code.Decoder(*sizes), PAD, PAD, "cpu").eval()


def main(folder: Path) -> None:
    import torch

    code, vocabulary = _own_code(folder)
    small = _model(code, VOCAB, DIM, LAYERS, HEADS, HIDDEN, LENGTH)
    shapes = {name: tuple(x.shape) for name, x in small.state_dict().items()}
    small.load_state_dict({name: torch.from_numpy(weight(name, s)) for name, s in shapes.items()})
    logits, attention = small(*(torch.from_numpy(x) for x in small_batch()))
    found = {"logits": logits, "attention": attention}

    files = folder / "annalog" / "ckpt_and_vocab"
    words = np.load(files / "stereo_experiment_vocab_ttf.pkl", allow_pickle=True)["itos"]
    real = _model(code, len(words), 256, 3, 8, 512, 102)
    weights = torch.load(files / "Lev_extended.pt", weights_only=True, map_location="cpu")
    real.load_state_dict(weights)
    split = vocabulary.SMILESTokenizer().tokenize
    for index, molecule in enumerate(MOLECULES):
        source = torch.tensor([[BEGIN, *map(words.index, split(molecule)), END]])
        with torch.no_grad():
            tokens = torch.tensor([[BEGIN]])
            for _ in range(NEW_TOKENS):
                logits, attention = real(source, tokens)
                following = logits[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, following], 1)
                if following == END:
                    break
        found |= {
            f"source {index}": source,
            f"tokens {index}": tokens[:, 1:],
            f"logits {index}": logits,
            f"attention {index}": attention,
        }
    arrays = {name: x.detach().numpy() for name, x in found.items()}
    np.savez_compressed(PATH, shapes=np.array(json.dumps(shapes)), **arrays)
    print(f"{PATH}: {PATH.stat().st_size / 1e3:.0f} kB")
    for index, molecule in enumerate(MOLECULES):
        print(molecule, "".join(words[t] for t in found[f"tokens {index}"][0]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
