"""CTranslate2's file: read whole, taken apart rightly, refused when it is damaged."""

import re
import struct

import numpy as np
import pytest

from crossattn.weights import CheckpointError
from experiments.fetch_weights import ctranslate2
from tests.experiments import ctranslate2_files
from tests.weights.checkpoints import refused


def test_every_tensor_comes_back(tmp_path):
    tensors = ctranslate2_files.whisper()
    aliases = [("decoder/projection/weight", "decoder/embeddings/weight")]
    (tmp_path / "model.bin").write_bytes(ctranslate2_files.pack(tensors, aliases))
    found = ctranslate2.read(tmp_path / "model.bin")
    assert found.keys() - tensors.keys() == {"decoder/projection/weight"}
    for name, x in tensors.items():
        np.testing.assert_array_equal(found[name], x)


def test_fused_projections_are_taken_apart():
    tensors = ctranslate2_files.whisper()
    found = ctranslate2.whisper(tensors)
    fused = tensors["decoder/layer_1/attention/linear_1/weight"].astype(np.float32)
    base = "model.decoder.layers.1.encoder_attn"
    np.testing.assert_array_equal(found[f"{base}.k_proj.weight"], fused[:64])
    np.testing.assert_array_equal(found[f"{base}.v_proj.weight"], fused[64:])
    assert f"{base}.k_proj.bias" not in found
    total = sum(x.size for x in tensors.values() if x.ndim)
    keys = 64 * 2 * (1 + 2)  # biases of keys, which are 0: in each layer one and two
    assert sum(x.size for x in found.values()) == total - keys


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"encoder/conv1/weight_scale": np.ones(3)}), "has encoder/conv1/weight_s"),
        (lambda t: t.update({"other": np.zeros(3, np.float32)}), "has other besides"),
        (lambda t: t["encoder/layer_0/self_attention/linear_0/bias"].fill(1), "has a bias on its keys"),
    ],
)  # fmt: skip
def test_what_is_no_whisper_is_refused(change, message):
    tensors = ctranslate2_files.whisper()
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        ctranslate2.whisper(tensors)


def test_a_damaged_file_is_refused_in_little_memory(tmp_path):
    raw = ctranslate2_files.pack({"a": np.ones((3, 2), np.float32)})
    head = b"\x00\x18\x00\x00\x00"  # type 0, 24 bytes
    sizes = struct.pack("<II", 3, 2)
    start = raw.index(b"\x02\0a\0")
    deep = raw[: start + 4] + b"\xff" + struct.pack("<255I", *[1] * 255) + raw[start + 13 :]
    two = ctranslate2_files.pack({"a": np.ones(1, np.float32), "b": np.ones(1, np.float32)})
    contents = [(raw[:size], r"model\.bin is cut short") for size in (0, 3, 20, 30, len(raw) - 1)]
    contents += [
        (ctranslate2_files.pack({}, version=7), "begins with version 7"),
        (raw.replace(head, b"\x09\x18\x00\x00\x00"), "a has the unknown type 9"),
        (raw.replace(head, b"\x00\x17\x00\x00\x00"), r"a of shape \[3, 2\] has 23 bytes"),
        (raw.replace(sizes, struct.pack("<II", 2**31, 2**31)), r"a of shape \[\d+, \d+\] has 24"),
        (raw.replace(sizes, struct.pack("<II", 2**32 - 1, 3)), r"a of shape \[\d+, \d+\] has 24"),
        (deep, "a of shape"),
        (two.replace(b"\x02\0b\0", b"\x02\0a\0"), "two tensors a"),
        (ctranslate2_files.pack({}, aliases=[("b", "c")]), "b stands for c, which is not in"),
    ]
    for content, said in contents:
        (tmp_path / "model.bin").write_bytes(content)
        assert re.search(said, refused(ctranslate2.read, tmp_path / "model.bin"))
    assert "cannot be read" in refused(ctranslate2.read, tmp_path / "nothing")
