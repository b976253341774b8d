"""CTranslate2's file: read whole, taken apart rightly, refused when it is damaged."""

import numpy as np
import pytest

from crossattn.weights import CheckpointError
from crossattn.weights.formats import ctranslate2
from tests.weights import ctranslate2_files


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
        (
            lambda t: t.update({"encoder/conv1/weight_scale": np.ones(3)}),
            "has encoder/conv1/weight_s",
        ),
        (lambda t: t.update({"other": np.zeros(3, np.float32)}), "has other besides"),
        (
            lambda t: t["encoder/layer_0/self_attention/linear_0/bias"].fill(1),
            "has a bias on its keys",
        ),
    ],
)
def test_what_is_no_whisper_is_refused(change, message):
    tensors = ctranslate2_files.whisper()
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        ctranslate2.whisper(tensors)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "model.bin"
    raw = ctranslate2_files.pack({"a": np.ones((3, 2), np.float32)})
    for size in (0, 3, 20, 30, len(raw) - 10, len(raw) - 1):
        path.write_bytes(raw[:size])
        with pytest.raises(CheckpointError, match=r"model\.bin is cut short"):
            ctranslate2.read(path)
    path.write_bytes(ctranslate2_files.pack({}, version=7))
    with pytest.raises(CheckpointError, match="begins with version 7"):
        ctranslate2.read(path)
    path.write_bytes(raw.replace(b"\x00\x18\x00\x00\x00", b"\x09\x18\x00\x00\x00"))
    with pytest.raises(CheckpointError, match="a has the unknown type 9"):
        ctranslate2.read(path)
    path.write_bytes(raw.replace(b"\x00\x18\x00\x00\x00", b"\x00\x17\x00\x00\x00"))
    with pytest.raises(CheckpointError, match=r"a of shape \[3, 2\] has 23 bytes"):
        ctranslate2.read(path)
    path.write_bytes(ctranslate2_files.pack({}, aliases=[("b", "c")]))
    with pytest.raises(CheckpointError, match="b stands for c, which is not in the file"):
        ctranslate2.read(path)
