"""int8 weights: what is rounded and by how much, and that models run on them unchanged."""

import functools
import gc
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.decode import greedy
from crossattn.models import Transformer, transformer
from crossattn.nn.stack import stack_layers
from crossattn.weights import CheckpointError, quantize
from tests import numpy_model as oracle
from tests.closeness import close
from tests.peers import package
from tests.weights import checkpoints

package("qwix", "weights")

KINDS = ["bart", "bert", "gpt2", "t5", "whisper"]
# The end of a parameter's path -> the axes that its products sum over.
SUMMED = {
    **dict.fromkeys(
        ("query.kernel", "key.kernel", "value.kernel", "up.kernel", "down.kernel"), (0,)
    ),
    **dict.fromkeys(("dense.kernel", "pooler.kernel", "next_sentence.kernel"), (0,)),
    **dict.fromkeys(("out.kernel", "first.kernel", "second.kernel"), (0, 1)),
    **dict.fromkeys(("embedding.table", "output.table"), (1,)),
}


def initial(model):
    """Fresh parameters, of one program."""
    return jax.jit(functools.partial(xa.init, model))(jax.random.key(0))


def summed(path):
    """Returns the summed axes of a matrix; None for another parameter."""
    return next((axes for end, axes in SUMMED.items() if path.endswith(end)), None)


def step(path, array):
    """Returns the distance between neighbouring int8 values of each output, in numpy."""
    return np.abs(np.asarray(array, np.float32)).max(axis=summed(path), keepdims=True) / 127.5


def multiplied(held):
    """Returns the numbers of int8 values and scales."""
    return np.asarray(held.qvalue, np.float32) * np.asarray(held.scale)


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    """Returns (model, float32 parameters, int8 ones)."""
    model = xa.weights.describe(checkpoints.ALL[request.param])
    params = initial(model)
    return model, params, quantize(model, params)


def inputs(model):
    """Arguments of a call."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 20, (2, 5)))
    kind = model.settings["model_type"]
    if kind == "whisper":
        return jax.random.normal(jax.random.key(1), (2, 12, 4)), tokens
    return (tokens,) if kind in ("bert", "gpt2") else (tokens, tokens)


@pytest.mark.slow
def test_a_matrix_takes_a_quarter_of_the_bytes_and_moves_by_at_most_half_a_step_of_its_output(pair):
    _, params, small = pair
    held = xa.functional.flatten(small)
    for path, array in xa.functional.flatten(params).items():
        if summed(path) is None:
            assert any(word in path for word in ("norm", "bias", "positions", "learned", "types"))
            assert held[path] is array
            continue
        assert held[path].qvalue.dtype == jnp.int8 and held[path].scale.dtype == jnp.float32
        assert 4 * held[path].qvalue.nbytes == array.nbytes
        channels = array.size // np.prod([array.shape[axis] for axis in summed(path)])
        assert held[path].scale.size == channels
        close(held[path].scale, step(path, array))
        moved = np.abs(multiplied(held[path]) - array)
        assert np.all(moved <= 0.5001 * step(path, array)) and moved.any()


@pytest.mark.quick(1)
def test_logits_are_those_of_the_rounded_weights_and_near_the_whole_ones(pair):
    model, params, small = pair
    flat = xa.functional.flatten(small)
    by_hand = xa.functional.nest(
        {path: multiplied(x) if summed(path) else x for path, x in flat.items()}
    )
    call = jax.jit(lambda p: xa.apply(model, p, *inputs(model)))
    whole, found, expected = (np.asarray(call(p)) for p in (params, small, by_hand))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    error = np.sqrt(np.mean((found - whole) ** 2) / np.mean(whole**2))
    assert 0 < error < 0.05


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["t5", "whisper", "gpt2"])
def test_a_search_under_jit_reads_int8_weights(kind):
    model = xa.weights.describe(checkpoints.ALL[kind])
    small = quantize(model, initial(model))
    dense = xa.functional.params_of(xa.functional.bind(model, small))

    @jax.jit
    def search(params):
        module = xa.functional.bind(model, params)
        read = {} if kind == "gpt2" else {"source": inputs(model)[0]}
        states = module.prefill(2, 1, 6, **read)
        return greedy(module.decode_step, states, batch=2, max_new_tokens=5)

    found, expected = search(small), search(dense)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)


@pytest.mark.slow
def test_scanned_layers_are_rounded_as_looped_ones_are():
    configs = [transformer.tiny(scan=scan, decoder_layers=1) for scan in (False, True)]
    looped, scanned = (lambda rngs, c=c: Transformer(c, rngs=rngs) for c in configs)
    params = oracle.random_params(looped)
    encoder, stack = params["encoder"], params["decoder"]["stack"]
    stacked = params | {"encoder": {"layers": stack_layers(encoder["layers"])}}
    stacked["decoder"] = params["decoder"] | {"stack": {"layers": stack_layers(stack["layers"])}}
    small, found = jax.device_get((quantize(looped, params), quantize(scanned, stacked)))
    for inner, outer in (
        (small["encoder"], found["encoder"]),
        (small["decoder"]["stack"], found["decoder"]["stack"]),
    ):
        jax.tree.map(np.testing.assert_array_equal, outer["layers"], stack_layers(inner["layers"]))


@pytest.mark.parametrize("method", ["absmax", "minmax"])
def test_arrays_of_qwix_itself_are_multiplied_out_as_qwix_does(method):
    import qwix

    build = lambda rngs: xa.nn.FeedForward(8, 12, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    held = qwix.quantize(jnp.asarray(params["up"]["kernel"]), jnp.int8, calibration_method=method)
    module = xa.functional.bind(build, params | {"up": params["up"] | {"kernel": held}})
    close(module.up.kernel[...], qwix.dequantize(held))


def test_a_checkpoint_is_rounded_as_it_is_loaded_and_twice_is_once(tmp_path):
    folder = checkpoints.fresh(checkpoints.T5, tmp_path / "t5")
    model, params, _ = xa.load(folder)
    _, small, _ = xa.load(folder, int8=True)
    jax.tree.map(np.testing.assert_array_equal, small, quantize(model, params))
    jax.tree.map(np.testing.assert_array_equal, small, quantize(model, small))


@pytest.mark.slow
def test_at_most_one_matrix_is_float_at_a_time(tmp_path):
    dim, inner = 8, 29  # a shape that nothing else has
    folder = checkpoints.fresh(checkpoints.T5 | dict(d_ff=inner, num_layers=3), tmp_path / "t5")
    device, most = jax.sharding.SingleDeviceSharding(jax.devices()[0]), []

    def place(axes, shape):
        gc.collect()
        alive = [x for x in jax.live_arrays() if x.shape in ((dim, inner), (inner, dim))]
        most.append(sum(x.dtype == jnp.float32 for x in alive))
        return device

    gc.collect()
    gc.freeze()  # what other tests left is not looked through each time
    try:
        _, small, _ = xa.load(folder, int8=True, place=place)
    finally:
        gc.unfreeze()
    assert max(most) <= 1
    jax.tree.map(np.testing.assert_array_equal, small, xa.load(folder, int8=True)[1])


def test_half_precision_is_rounded_with_scales_of_full_precision():
    model = xa.weights.describe(checkpoints.T5)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), initial(model))
    whole = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    jax.tree.map(np.testing.assert_array_equal, *(
        {n: x for n, x in xa.functional.flatten(quantize(model, p)).items() if summed(n)}
        for p in (half, whole)
    ))  # fmt: skip


def test_saving_them_is_refused(tmp_path):
    model = xa.weights.describe(checkpoints.T5)
    small = quantize(model, initial(model))
    with pytest.raises(CheckpointError, match="params are quantised, and checkpoints are not"):
        xa.save(tmp_path / "t5", model, small)
    assert not (tmp_path / "t5").exists()


def test_other_models_parameters_and_a_missing_package_are_told(monkeypatch):
    model = xa.weights.describe(checkpoints.T5)
    params = initial(model)
    with pytest.raises(ValueError, match="they belong to another"):
        quantize(xa.weights.describe(checkpoints.GPT2), params)
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ImportError, match=r"need qwix: pip install 'crossattn\[weights\]'"):
        quantize(model, params)
