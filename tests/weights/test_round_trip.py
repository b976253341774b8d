"""A checkpoint that is loaded and saved again has the same files, to the bit."""

import filecmp
import itertools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import crossattn as xa
from crossattn.weights import CheckpointError
from tests.weights import checkpoints


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def same_files(folder, tmp_path):
    """Loads, saves elsewhere, and compares every file that the checkpoint has."""
    model, params, _ = xa.load(folder)
    again = xa.save(tmp_path / "again", model, params)
    names = files(folder)
    assert files(again) == names
    _, different, unreadable = filecmp.cmpfiles(folder, again, names, shallow=False)
    assert different == unreadable == []
    return model, params


def same_params(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture
def bart(tmp_path):
    return checkpoints.fresh(checkpoints.BART, tmp_path / "bart")


@pytest.mark.parametrize("kind", checkpoints.ALL)
def test_every_family_makes_the_same_file_again(kind, tmp_path):
    same_files(checkpoints.fresh(checkpoints.ALL[kind], tmp_path / kind), tmp_path)


PERCEIVERS = ("ForImageClassificationFourier", "ForImageClassificationLearned", "ForSequenceClassification",
              "ForMaskedLM")  # fmt: skip


@pytest.mark.parametrize(("name", "other"), list(itertools.pairwise(PERCEIVERS)))
def test_every_kind_of_perceiver_makes_the_same_file_again(name, other, tmp_path):
    config = checkpoints.PERCEIVER | dict(image_size=4)
    own = config | dict(architectures=[f"Perceiver{name}"])
    folder = checkpoints.fresh(own, tmp_path / "perceiver")
    same_files(folder, tmp_path)
    others = config | dict(architectures=[f"Perceiver{other}"])
    (folder / "config.json").write_text(json.dumps(others))
    with pytest.raises(CheckpointError, match="do not fit its config.json"):
        xa.load(folder)


def test_each_dropout_of_a_gpt2_has_its_own_rate():
    def rates(**given):
        model = xa.weights.describe(checkpoints.GPT2 | given)
        layer = nnx.eval_shape(lambda: model(nnx.Rngs(0)))
        block = model.config.block
        return layer.input.dropout_rate, block.attention.dropout_rate, block.dropout_rate

    assert rates(embd_pdrop=0.0, attn_pdrop=0.2, resid_pdrop=0.3) == (0.0, 0.2, 0.3)
    assert rates(resid_pdrop=0.0) == (0.1, 0.1, 0.0)  # what it does not name is 0.1 in transformers


def test_several_files_stay_several_files(bart, tmp_path):
    _, whole, _ = xa.load(bart)
    _, parts = same_files(checkpoints.shard(bart), tmp_path)
    same_params(parts, whole)


def test_what_was_saved_before_in_the_folder_is_not_read(bart, tmp_path):
    """Weights in one file would be read in place of those in several."""
    model, params, _ = xa.load(bart)
    used = xa.save(tmp_path / "used", model, jax.tree.map(jnp.zeros_like, params))
    (used / "model_ema.safetensors").write_text("stays")
    again, parts, _ = xa.load(checkpoints.shard(bart))
    xa.save(used, again, parts)
    same_params(xa.load(used)[1], parts)
    assert not (used / "model.safetensors").exists() and (used / "model_ema.safetensors").exists()


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_stays_half_precision_and_computes_in_full(dtype, bart, tmp_path):
    def half(tensors):
        tensors.update({name: tensor.astype(dtype) for name, tensor in tensors.items()})

    model, params = same_files(checkpoints.rewrite(bart, half), tmp_path)
    assert {x.dtype for x in xa.functional.flatten(params).values()} == {jnp.dtype(dtype)}
    tokens = jnp.ones((1, 3), jnp.int32)
    assert xa.apply(model, params, tokens, tokens).dtype == jnp.float32


def test_a_tensor_that_is_there_twice_is_saved_twice(bart, tmp_path):
    def repeat(tensors):
        for name in ("model.encoder.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors["model.shared.weight"]

    same_files(checkpoints.rewrite(bart, repeat), tmp_path)


def test_what_the_model_computes_itself_is_checked_and_saved_to_the_last_bit(tmp_path):
    angles = np.arange(10)[:, None] / 10000 ** (2 * np.arange(4) / 8)
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
    folder, name = tmp_path / "marian", "model.encoder.embed_positions.weight"
    checkpoints.fresh(checkpoints.MARIAN, folder)
    for stored in (table, np.nextafter(table, np.float32(2))):
        same_files(checkpoints.rewrite(folder, lambda t, x=stored: t.update({name: x})), tmp_path)
    spoilt = checkpoints.rewrite(folder, lambda t: t.update({name: table + 0.1}))
    with pytest.raises(CheckpointError, match="embed_positions.weight .* what the model"):
        xa.load(spoilt)


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.decoder.embed_tokens.weight"])
def test_a_file_may_have_another_name_for_what_is_tied(kept, bart, tmp_path):
    def rename(tensors):
        tensors[kept] = tensors.pop("model.shared.weight")

    _, expected, _ = xa.load(bart)
    _, params = same_files(checkpoints.rewrite(bart, rename), tmp_path)
    same_params(params, expected)


def test_the_tokenizer_goes_with_the_model(tmp_path):
    folder = checkpoints.fresh(checkpoints.BERT, tmp_path / "bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s"]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    for name in ("special_tokens_map.json", "added_tokens.json", "preprocessor_config.json"):
        (folder / name).write_text("{}")
    same_files(folder, tmp_path)
    _, _, tokenizer = xa.load(folder)
    _, _, again = xa.load(tmp_path / "again")
    assert again.to_str() == tokenizer.to_str()
    assert again.encode("the cats").tokens == ["[CLS]", "the", "cat", "##s", "[SEP]"]


def test_the_names_of_older_files_are_known(tmp_path):
    """BERT's norms had gammas and betas, GPT-2's files the causal mask, TrOCR's the type of its sinusoids
    in a number; bare models have no prefix."""

    def bert(tensors):
        for name in list(tensors):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            tensors[old.replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = np.arange(10)[None]

    def gpt2(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors.pop("lm_head.weight", None)
        tensors["h.0.attn.bias"] = np.tri(10, dtype=np.float32)[None, None]
        tensors["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)

    def trocr(tensors):
        tensors["model.decoder.embed_positions._float_tensor"] = np.zeros(1, np.float32)

    sinusoids = checkpoints.TROCR | dict(use_learned_position_embeddings=False)
    for config, change in ((checkpoints.BERT, bert), (checkpoints.GPT2, gpt2), (sinusoids, trocr)):
        folder = checkpoints.fresh(config, tmp_path / config["model_type"] / "old")
        same_files(checkpoints.rewrite(folder, change), tmp_path / config["model_type"])


def test_each_tensor_is_placed_once_and_as_it_is_read(tmp_path, monkeypatch):
    """At most one tensor waits on the host for its device."""
    device = jax.devices()[0]
    folder = checkpoints.fresh(checkpoints.GPT2, tmp_path / "gpt2")
    asked, put = [], []
    real = jax.device_put

    def place(axes, shape):
        assert len(axes) == len(shape) and len(asked) == len(put)
        asked.append(axes)
        return jax.sharding.SingleDeviceSharding(device)

    def device_put(x, where):
        assert isinstance(where, jax.sharding.SingleDeviceSharding)
        put.append(x.shape)
        return real(x, where)

    monkeypatch.setattr(jax, "device_put", device_put)
    model, params, _ = xa.load(folder, place=place)
    assert len(put) == len(xa.functional.flatten(params))
    assert ("embed", "heads", "head_dim") in asked


def header_of(path):
    """Returns the header of a safetensors file and its data."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def test_several_keys_of_metadata_and_the_order_of_the_writer_stay(bart, tmp_path):
    """The order of the tensors is neither that of their names nor that of the header."""
    path = bart / "model.safetensors"
    header, data = header_of(path)
    metadata = {"z": "1", "format": "pt", "a": "\u00fc", "b": ""}
    names = [name for name in header if name != "__metadata__"][::-1]
    moved, parts, end = {}, [], 0
    for name in names:
        begin, stop = header[name]["data_offsets"]
        parts.append(data[begin:stop])
        moved[name] = header[name] | {"data_offsets": [end, end := end + stop - begin]}
    shuffled = {name: moved[name] for name in sorted(names, key=lambda name: name[::-1])}
    # No writer of safetensors indents it.
    text = json.dumps({**shuffled, "__metadata__": metadata}, indent=1).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
    model, params = same_files(bart, tmp_path)

    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    again = xa.save(tmp_path / "half", model, half)
    found, _ = header_of(again / "model.safetensors")
    assert list(found) == [*shuffled, "__metadata__"] and found["__metadata__"] == metadata
    assert {entry["dtype"] for name, entry in found.items() if name in moved} == {"BF16"}
    same_params(xa.load(again)[1], half)


@pytest.mark.parametrize("kind", ["bart", "gpt2"])
def test_float64_stays_float64_but_for_what_has_changed(kind, tmp_path):
    """GPT-2's tensors are of several parameters."""

    def widen(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor.astype(np.float64) * (1 + 1e-12)

    path = tmp_path / kind
    folder = checkpoints.rewrite(checkpoints.fresh(checkpoints.ALL[kind], path), widen)
    model, params = same_files(folder, tmp_path)
    assert {x.dtype for x in xa.functional.flatten(params).values()} == {jnp.dtype("float32")}

    flat = xa.functional.flatten(params)
    [name] = [n for n in flat if n.endswith("layers.0.attention.query.kernel") and "enc" not in n]
    flat[name] = flat[name].at[0, 0, 0].add(1.0)
    again = xa.save(tmp_path / "trained", model, xa.functional.nest(flat))
    before, after = (load_file(f / "model.safetensors") for f in (folder, again))
    changed = {name: (before[name] != after[name]).sum() for name in before}
    assert sum(changed.values()) == 1
    assert {tensor.dtype for tensor in after.values()} == {np.dtype(np.float64)}


def test_a_repetition_in_another_type_or_with_other_zeros_stays(bart, tmp_path):
    def repeat(tensors):
        shared = tensors["model.shared.weight"]
        shared[3] = 0.0
        tensors["model.shared.weight"] = shared = shared.astype(np.float16)
        tensors["lm_head.weight"] = shared.astype(np.float32)
        tensors["model.encoder.embed_tokens.weight"] = np.where(shared == 0, -shared, shared)

    same_files(checkpoints.rewrite(bart, repeat), tmp_path)


def test_line_ends_empty_settings_and_chat_templates_stay(bart, tmp_path):
    folder = checkpoints.shard(bart)
    for name in ("config.json", "model.safetensors.index.json"):
        path = folder / name
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_bytes(b"{\r\n}")
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    same_files(folder, tmp_path)
