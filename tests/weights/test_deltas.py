"""Deltas: one file has what fine-tuning changed, and rows of a batch choose among several."""

import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import crossattn as xa
from crossattn.functional import flatten, nest
from crossattn.models import Transformer, transformer
from crossattn.train.losses import cross_entropy
from crossattn.weights import CheckpointError, deltas
from tests.peers import package
from tests.weights import checkpoints
from tests.weights.checkpoints import refused

BARTS = checkpoints.BART | dict(d_model=16, encoder_layers=2, decoder_layers=2)
CROSS = r"\.cross\."
SOURCE = jnp.array([[3, 7, 9, 4, 2], [5, 5, 8, 2, 1], [4, 3, 2, 1, 1], [9, 8, 7, 6, 2]])
TARGET = jnp.array([[2, 4, 6, 8], [2, 9, 9, 5], [2, 3, 4, 5], [2, 7, 3, 9]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Returns (folder, model, parameters) of a small BART."""
    model = xa.weights.describe(BARTS)
    params = xa.init(model, jax.random.key(0))
    folder = xa.save(tmp_path_factory.mktemp("base"), model, params)
    return folder, *xa.load(folder)[:2]


def tuned(params, pattern, seed):
    """Returns parameters of which those that the pattern finds are moved at random."""
    key, flat = jax.random.key(seed), flatten(params)
    return nest(
        {
            name: x + jax.random.normal(jax.random.fold_in(key, i), x.shape, x.dtype) / 2
            if re.search(pattern, name)
            else x
            for i, (name, x) in enumerate(flat.items())
        }
    )


def same_bits(actual, expected):
    """Checks that two nested dicts have the same names, types and bits."""
    actual, expected = flatten(actual), flatten(expected)
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert actual[name].dtype == x.dtype, name
        assert np.asarray(actual[name]).tobytes() == np.asarray(x).tobytes(), name


@pytest.mark.slow
def test_a_file_has_what_training_changed_and_gives_it_back_to_the_bit(base, tmp_path):
    folder, model, params = base
    trained: Any = {name: x for name, x in flatten(params).items() if ".cross." in name}
    optimizer = optax.adam(1e-2)
    state = optimizer.init(trained)

    def loss(trained):
        logits = xa.apply(model, nest(flatten(params) | trained), SOURCE, TARGET[:, :-1])
        return cross_entropy(logits, TARGET[:, 1:], jnp.ones((4, 3)))[0]

    for _ in range(2):
        updates, state = optimizer.update(jax.jit(jax.grad(loss))(trained), state)
        trained = optax.apply_updates(trained, updates)
    # A softmax does not see a bias of keys: its gradient is rounding, or 0.
    after = nest(flatten(params) | trained)
    file = xa.save(tmp_path / "new" / "mine.safetensors", model, after, delta_of=params)
    found = load_file(file)
    changed = {n for n in trained if not np.array_equal(flatten(after)[n], flatten(params)[n])}
    assert found.keys() == changed and {n for n in trained if "key.bias" not in n} <= changed
    loaded, again, _ = xa.load(file, base=folder)
    same_bits(again, after)
    assert loaded.config == model.config
    assert file.stat().st_size < (folder / "model.safetensors").stat().st_size / 2


def test_bits_that_compare_as_equal_or_as_nothing_are_kept(tmp_path):
    params = {"a": {"zero": jnp.zeros(3), "nan": jnp.full(2, jnp.nan)}, "b": jnp.ones((2, 0))}
    params |= {"half": jnp.ones(2, jnp.bfloat16), "scalar": jnp.float32(2)}
    after = {**params, "a": {"zero": -jnp.zeros(3), "nan": params["a"]["nan"]}}
    after["half"] = jnp.array([1, 1.0078125], jnp.bfloat16)
    delta = deltas.read(deltas.write(tmp_path / "d.safetensors", after, params))
    assert set(delta.changed) == {"a.zero", "half"}
    same_bits(delta.applied(params), after)
    none = deltas.read(deltas.write(tmp_path / "none.safetensors", params, params))
    assert not none.changed and deltas.share(none, params) == 0
    same_bits(none.applied(params), params)


def test_the_checksum_is_of_names_types_shapes_and_bits(tmp_path):
    params = {"w": {"kernel": jnp.arange(6.0).reshape(2, 3)}, "b": jnp.zeros(2)}
    by_hand = hashlib.sha256()
    for name, shape in (("b", "(2,)"), ("w.kernel", "(2, 3)")):
        by_hand.update(f"{name} float32 {shape}\n".encode())
        by_hand.update(np.asarray(flatten(params)[name], "<f4").tobytes())
    file = deltas.write(tmp_path / "d.safetensors", params, params)
    with safe_open(file, framework="numpy") as opened:
        assert opened.metadata()["base_sha256"] == by_hand.hexdigest()
    others = [
        {**params, "b": params["b"].at[1].set(-0.0)},
        {**params, "b": jnp.zeros((2, 1))},
        {**params, "b": jnp.zeros(2, jnp.int32)},
        {"v": params["w"], "b": params["b"]},
        {"w": {"kernel": params["w"]["kernel"].reshape(3, 2)}, "b": params["b"]},
    ]
    sums = {deltas.checksum(other) for other in [params, *others]}
    assert len(sums) == len(others) + 1


def test_a_delta_of_another_base_is_refused_in_one_line(base, tmp_path):
    folder, model, params = base
    file = xa.save(tmp_path / "d.safetensors", model, tuned(params, CROSS, 1), delta_of=params)
    other = xa.save(tmp_path / "other", model, tuned(params, r"output\.bias|norm\.bias", 2))
    said = refused(lambda: xa.load(file, base=other))
    assert str(file) in said and "give the base that it was saved with" in said
    other = xa.save(tmp_path / "gpt2", *_another())
    assert "is a delta of parameters with" in refused(lambda: xa.load(file, base=other))
    assert "params and delta_of have not the same parameters" in refused(
        lambda: deltas.difference(params, _another()[1])
    )
    assert "these have" in refused(lambda: deltas.stack(_another()[1], [deltas.read(file)]))


def _another():
    model = xa.weights.describe(checkpoints.GPT2)
    return model, xa.init(model, jax.random.key(0))


def test_what_is_no_delta_is_refused_in_one_line(base, tmp_path):
    folder, model, params = base
    file = xa.save(tmp_path / "d.safetensors", model, tuned(params, CROSS, 1), delta_of=params)
    assert "xa.load(file, base=...)" in refused(xa.load, file)
    assert "there is no file" in refused(lambda: xa.load(tmp_path / "none", base=folder))
    whole = folder / "model.safetensors"
    assert "is no delta" in refused(lambda: xa.load(whole, base=folder))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(file.read_bytes()[:-5])
    assert "cut short" in refused(lambda: xa.load(cut, base=folder))
    assert "ends in .safetensors" in refused(
        lambda: xa.save(tmp_path / "folder", model, params, delta_of=params)
    )
    package("qwix", "weights")
    small = xa.weights.quantize(model, params)
    assert "quantised" in refused(lambda: deltas.difference(small, params))
    assert "quantised" in refused(lambda: deltas.difference(params, small))


def test_a_parameter_of_another_shape_is_applied_alone_and_by_no_model_of_the_old_shape(
    base, tmp_path
):
    folder, _, params = base
    name = "target_input.embedding.table"
    longer = jnp.ones((25, flatten(params)[name].shape[1]))
    delta = deltas.difference(nest({**flatten(params), name: longer}), params)
    np.testing.assert_array_equal(flatten(delta.applied(params))[name], longer)
    assert "such a delta is applied alone" in refused(lambda: deltas.stack(params, [delta]))
    file = deltas.write(tmp_path / "d.safetensors", delta.applied(params), params)
    with pytest.raises(ValueError, match=rf"{name} has shape \(25, 16\); expected \(20, 16\)"):
        xa.load(file, base=folder)


def test_a_delta_comes_as_int8_and_on_the_devices_of_its_base(base, tmp_path):
    folder, model, params = base
    after = tuned(params, CROSS, 1)
    file = xa.save(tmp_path / "d.safetensors", model, after, delta_of=params)
    package("qwix", "weights")
    small = xa.load(file, base=folder, int8=True)[1]
    jax.tree.map(np.testing.assert_array_equal, small, xa.weights.quantize(model, after))
    last = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    placed = xa.load(file, base=folder, place=lambda axes, shape: last)[1]
    assert {x.sharding for x in jax.tree.leaves(placed)} == {last}
    same_bits(placed, after)


@pytest.mark.quick(1)
@pytest.mark.parametrize("pattern", [CROSS, "encoder", "norm|bias", "."])
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_rows_of_a_batch_equal_each_delta_alone(kind, pattern):
    """To the bit in one program; another program, as of one set of parameters, may round in another order."""
    model = xa.weights.describe({"bart": BARTS, "t5": checkpoints.T5}[kind])
    params = xa.init(model, jax.random.key(0))
    after = [tuned(params, pattern, seed) for seed in (1, 2, 3)]
    several = deltas.stack(params, [deltas.difference(x, params) for x in after])
    assert set(several.changed) == {n for n in flatten(params) if re.search(pattern, n)}
    call = jax.jit(lambda params, *batch: xa.apply(model, params, *batch))
    traces = []

    @jax.jit
    def rows(several, which, *batch):
        traces.append(which)
        return several.rows(lambda params, *row: xa.apply(model, params, *row), which, *batch)

    alone = np.stack([call(each, SOURCE, TARGET) for each in after])
    assert np.ptp(alone, axis=0).max() > 1e-2  # the deltas differ
    each = np.stack([rows(several, jnp.array([number] * 4), SOURCE, TARGET) for number in range(3)])
    np.testing.assert_allclose(each, alone, rtol=1e-4, atol=2e-5)
    for which in ([0, 1, 2, 1], [2, 2, 0, 0], [1, 1, 1, 1]):
        found = rows(several, jnp.array(which), SOURCE, TARGET)
        np.testing.assert_array_equal(found, each[which, np.arange(4)])
    assert len(traces) == 1


@pytest.mark.slow
def test_a_delta_may_leave_what_another_changes_or_everything():
    config = transformer.tiny()

    def build(rngs):
        return Transformer(config, rngs=rngs)

    params = xa.init(build, jax.random.key(0))
    after = [params, tuned(params, CROSS, 1), tuned(params, r"embedding", 2)]
    several = deltas.stack(params, [deltas.difference(x, params) for x in after])
    for number, each in enumerate(after):
        same_bits(several.params(number), each)
    call = jax.jit(lambda params, *batch: xa.apply(build, params, *batch))
    found = several.rows(call, jnp.arange(3), SOURCE[:3], TARGET[:3])
    for number, each in enumerate(after):
        whole = call(each, SOURCE[:3], TARGET[:3])
        np.testing.assert_allclose(found[number], whole[number], rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [1, 3])
def test_texts_of_each_row_are_those_of_its_delta(base, num_beams):
    _, model, params = base
    after = [tuned(params, ".", seed) for seed in (4, 5)]
    several = deltas.stack(params, [deltas.difference(x, params) for x in after])

    ids = model.ids | {"eos_id": ()}  # texts run on

    def written(params, source):
        bound = xa.functional.bind(model, params)
        return xa.decode.generate(
            bound, source, max_new_tokens=6, num_beams=num_beams, **ids
        ).tokens[:, 0]

    which = np.array([1, 0, 0, 1])
    alone = np.stack([jax.jit(written)(each, SOURCE) for each in after])
    assert (alone[0] != alone[1]).any(-1).all()
    found = jax.jit(lambda several, which: several.rows(written, which, SOURCE))(several, which)
    np.testing.assert_array_equal(found, alone[which, np.arange(4)])


def test_a_number_of_no_delta_is_refused_or_nothing_but_nan(base):
    _, model, params = base
    several = deltas.stack(params, [deltas.difference(tuned(params, CROSS, 1), params)] * 2)

    def logits(params, *row):
        return xa.apply(model, params, *row)

    def rows(which):
        return several.rows(logits, which, SOURCE, TARGET)

    for wrong in (2, -1):
        which = np.array([0, wrong, 1, 1])
        with pytest.raises(ValueError, match=f"^which has {wrong}; expected 0 to 1.$"):
            rows(which)
        found = jax.jit(rows)(which)
        np.testing.assert_array_equal(np.isnan(found).all((1, 2)), [False, True, False, False])
    with pytest.raises(ValueError, match="deltas is empty"):
        deltas.stack(params, [])


def test_the_share_counts_numbers(base):
    _, _, params = base
    delta = deltas.difference(tuned(params, CROSS, 1), params)
    flat = flatten(params)
    cross = sum(x.size for name, x in flat.items() if ".cross." in name)
    assert deltas.share(delta, params) == cross / sum(x.size for x in flat.values())
    with pytest.raises(CheckpointError, match="which its base has not"):
        deltas.Delta(delta.base, {"no.such": jnp.ones(1)}).applied(params)
