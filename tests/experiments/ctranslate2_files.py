"""CTranslate2 models of random numbers, written as its own converter lays them out."""

import json
import struct

import numpy as np

from tests import whisper_vocabulary

_KINDS = {"<f4": 0, "<i1": 1, "<i2": 2, "<i4": 3, "<f2": 4}


def pack(tensors, aliases=(), version=6) -> bytes:
    """Returns a model file."""

    def text(name):
        raw = name.encode() + b"\0"
        return struct.pack("<H", len(raw)) + raw

    out = struct.pack("<I", version) + text("WhisperSpec") + struct.pack("<II", 3, len(tensors))
    for name, x in tensors.items():
        out += text(name) + struct.pack(f"<B{x.ndim}I", x.ndim, *x.shape)
        out += struct.pack("<BI", _KINDS[x.dtype.str.replace("|", "<")], x.nbytes) + x.tobytes()
    out += struct.pack("<I", len(aliases))
    for name, target in aliases:
        out += text(name) + text(target)
    return out


def whisper(dim=64, layers=2, mels=80, positions=50, text=64, seed=0) -> dict[str, np.ndarray]:
    """Returns tensors of a small Whisper with heads of 64, as CTranslate2 names and fuses them."""
    rng = np.random.default_rng(seed)
    found = {"decoder/activation": np.array(3, np.int8)}

    def add(name, *shape):
        found[name] = (rng.standard_normal(shape) * 0.05).astype(np.float16)

    def norm(name):
        add(f"{name}/gamma", dim)
        add(f"{name}/beta", dim)
        found[f"{name}/gamma"] += np.float16(1)

    def linear(name, outputs, inputs, keys=None):
        add(f"{name}/weight", outputs, inputs)
        add(f"{name}/bias", outputs)
        if keys is not None:
            found[f"{name}/bias"][keys : keys + dim] = 0

    add("encoder/conv1/weight", dim, mels, 3)
    add("encoder/conv1/bias", dim)
    add("encoder/conv2/weight", dim, dim, 3)
    add("encoder/conv2/bias", dim)
    add("decoder/embeddings/weight", whisper_vocabulary.VOCABULARY, dim)
    for side, length in (("encoder", positions), ("decoder", text)):
        add(f"{side}/position_encodings/encodings", length, dim)
        norm(f"{side}/layer_norm")
        for layer in range(layers):
            own = f"{side}/layer_{layer}"
            norm(f"{own}/self_attention/layer_norm")
            linear(f"{own}/self_attention/linear_0", 3 * dim, dim, keys=dim)
            linear(f"{own}/self_attention/linear_1", dim, dim)
            if side == "decoder":
                norm(f"{own}/attention/layer_norm")
                linear(f"{own}/attention/linear_0", dim, dim)
                linear(f"{own}/attention/linear_1", 2 * dim, dim, keys=0)
                linear(f"{own}/attention/linear_2", dim, dim)
            norm(f"{own}/ffn/layer_norm")
            linear(f"{own}/ffn/linear_0", 2 * dim, dim)
            linear(f"{own}/ffn/linear_1", dim, 2 * dim)
    return found


def write_folder(folder) -> None:
    """Writes a packed model: model.bin, config.json, tokenizer.json."""
    aliases = [("decoder/projection/weight", "decoder/embeddings/weight")]
    (folder / "model.bin").write_bytes(pack(whisper(), aliases))
    (folder / "config.json").write_text(json.dumps({"alignment_heads": [[0, 0], [1, 0]]}))
    whisper_vocabulary.save(folder)
