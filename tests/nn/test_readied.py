"""Models made ready for the loop of decoding: the same numbers, from weights that are half as large."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.decode import generate
from crossattn.models import Transformer, transformer
from crossattn.nn import TokenOutput, for_decoding, in_compute_dtype

LAYERS = 2
SOURCE = jnp.asarray(np.random.default_rng(0).integers(3, 64, (2, 6)))
FORMS = pytest.mark.parametrize(
    "changes",
    [{}, {"tie_output": False}, {"scan": True}, {"positions": "relative", "scan": True}],
    ids=["looped", "untied", "scanned", "relative"],
)


def made(dtype, **changes):
    block = xa.nn.BlockConfig.of(dim=32, num_heads=4, mlp_dim=64, dtype=dtype)
    config = transformer.tiny(block=block, pad_id=0, decoder_layers=LAYERS, **changes)
    build = lambda rngs: Transformer(config, rngs=rngs)  # noqa: E731
    return build, xa.functional.init(build, jax.random.key(0))


def logits_of(model):
    states = model.prefill(2, 1, 4, source=SOURCE)
    return np.asarray(model.decode_step(SOURCE[:, None, :3], states)[0])


@pytest.mark.slow
@FORMS
def test_weights_that_were_rounded_before_give_the_same_logits_to_the_bit(changes):
    model = xa.functional.bind(*made("bfloat16", **changes))
    before = logits_of(model)
    np.testing.assert_array_equal(logits_of(in_compute_dtype(model)), before)
    np.testing.assert_array_equal(logits_of(for_decoding(model)), before)


@pytest.mark.quick(3)
@FORMS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loop_is_given_no_matrix_of_another_type_and_no_stacked_one(changes, dtype):
    build, params = made(dtype, **changes)

    def search(params):
        return generate(xa.functional.bind(build, params), SOURCE, max_new_tokens=4)

    [loop] = [e for e in jax.make_jaxpr(search)(params).eqns if e.primitive.name == "while"]
    weights = loop.invars[: loop.params["cond_nconsts"] + loop.params["body_nconsts"]]
    matrices = [x.aval for x in weights if x.aval.size >= 32 * 32]
    assert matrices and {x.dtype for x in matrices} == {jnp.dtype(dtype)}
    assert all(x.shape[0] != LAYERS for x in matrices)


def test_parameters_in_the_type_of_their_layers_stay_the_arrays_that_they_are():
    model = xa.functional.bind(*made("float32"))
    kept = xa.functional.params_of(in_compute_dtype(model))
    same = jax.tree.map(lambda a, b: a is b, xa.functional.params_of(model), kept)
    assert all(jax.tree.leaves(same))


def test_what_is_no_module_stays_as_it_is():
    model = object()
    assert for_decoding(model) is model


def test_an_output_layer_of_a_size_rounds_its_table_to_its_own_type():
    layer = TokenOutput(5, 8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert in_compute_dtype(layer).table[...].dtype == jnp.bfloat16
    assert in_compute_dtype(TokenOutput(5, 8, rngs=nnx.Rngs(0))).table[...].dtype == jnp.float32
