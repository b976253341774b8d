"""Parameters as plain dicts: three doors to the same module, and nothing is ever mutated."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossattn as xa
from crossattn.models import Transformer
from crossattn.models.transformer import tiny
from crossattn.nn import MultiHeadAttention
from tests import numpy_model as oracle

X = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)


def build(rngs):
    return MultiHeadAttention(8, num_heads=2, rngs=rngs)


@pytest.fixture
def params():
    return oracle.random_params(build)


def test_init_gives_a_plain_nested_dict_of_arrays_that_follows_the_key():
    first, again = (xa.init(build, jax.random.key(0)) for _ in range(2))
    other = xa.init(build, jax.random.key(1))
    assert type(first) is dict and set(first) == {"query", "key", "value", "out"}
    assert all(type(inner) is dict for inner in first.values())
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(first))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert np.any(first["query"]["kernel"] != other["query"]["kernel"])
    assert np.any(first["query"]["kernel"] != first["key"]["kernel"])


def test_three_doors_give_the_same_output(params):
    x = jnp.asarray(X)
    mask = xa.masks.causal()
    expected = oracle.attention(params, X, allowed=np.tri(3, dtype=bool))[0]

    module = build(nnx.Rngs(params=jax.random.key(3)))
    fresh = xa.functional.params_of(module)
    jax.tree.map(np.testing.assert_array_equal, fresh, xa.init(build, jax.random.key(3)))
    module = xa.functional.bind(build, fresh | params)
    np.testing.assert_allclose(module(x, mask=mask), expected, atol=1e-5)

    np.testing.assert_allclose(xa.apply(build, params, x, mask=mask), expected, atol=1e-5)

    linen = nnx.bridge.ToLinen(MultiHeadAttention, args=(8,), kwargs={"num_heads": 2})
    variables = linen.init(jax.random.key(0), x)
    variables = jax.tree.map(  # the boxes keep each parameter's metadata
        lambda box, value: (
            box.replace(value=jnp.asarray(value)) if hasattr(box, "replace") else value
        ),
        variables["params"],
        params,
        is_leaf=lambda leaf: hasattr(leaf, "unbox"),
    )
    out = linen.apply({"params": variables}, x, mask=mask)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_other_methods_are_applied_by_name(params):
    memory = xa.apply(build, params, jnp.asarray(X), method="memory")
    expected = np.einsum("bsd,dkh->bskh", X, params["key"]["kernel"]) + params["key"]["bias"]
    np.testing.assert_allclose(memory.keys, expected, atol=1e-5)


def test_a_plain_optax_loop_on_a_dict_learns(params):
    optimizer = optax.adam(1e-2)
    goal = np.roll(X, 1, axis=1)

    @jax.jit
    def step(params, state):
        loss = lambda p: jnp.mean((xa.apply(build, p, jnp.asarray(X)) - goal) ** 2)  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for _ in range(60):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.1 * losses[0]
    assert type(params) is dict


def test_a_call_changes_neither_the_parameters_nor_the_module(params):
    config = tiny(encoder_layers=1, decoder_layers=1)
    make = lambda rngs: Transformer(config, rngs=rngs)  # noqa: E731
    params = oracle.random_params(make)
    before = copy.deepcopy(params)
    model = xa.functional.bind(make, params)
    graph = nnx.graphdef(model)
    call = jax.jit(lambda *tokens: model(*tokens))
    tokens = np.array([[3, 4, 5]])
    first, second = call(tokens, tokens), call(tokens, tokens)
    np.testing.assert_array_equal(first, second)
    jax.tree.map(np.testing.assert_array_equal, params, before)
    jax.tree.map(np.testing.assert_array_equal, xa.functional.params_of(model), before)
    assert nnx.graphdef(model) == graph
    assert {type(v) for _, v in nnx.to_flat_state(nnx.state(model))} == {nnx.Param}


def test_binding_never_ties_two_models_together(params):
    first = xa.functional.bind(build, params)
    second = xa.functional.bind(build, jax.tree.map(lambda x: 2 * x, params))
    jax.tree.map(np.testing.assert_array_equal, xa.functional.params_of(first), params)
    assert np.all(second.query.kernel[...] == 2 * first.query.kernel[...])


def test_a_module_in_place_of_its_build_is_refused_by_name(params, in_production):
    module = build(nnx.Rngs(0))
    for wrong, got in ((module, "MultiHeadAttention"), (params, "dict")):
        for call in (xa.apply, xa.functional.bind):
            with pytest.raises(
                TypeError, match=rf"build is a {got}; expected a function that makes"
            ):
                call(wrong, params)
        with pytest.raises(TypeError, match=rf"build is a {got}; .*, rngs=rngs\)"):
            xa.init(wrong, jax.random.key(0))
    with pytest.raises(TypeError, match="model is a dict; expected a module with prefill"):
        xa.decode.generate(params, X, max_new_tokens=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out": {"kernel": np.zeros((2, 4, 8))}}, r"params lack out\.bias"),
        ({"gate": {"kernel": np.zeros(2)}}, r"params have unexpected gate\.kernel"),
        (
            {"query": {"kernel": np.zeros((8, 4, 2)), "bias": np.zeros((2, 4))}},
            r"params query\.kernel has shape \(8, 4, 2\); expected \(8, 2, 4\)",
        ),
    ],
)
def test_parameters_of_another_model_are_refused_by_name(params, changed, message):
    params |= changed
    with pytest.raises(ValueError, match=message):
        xa.apply(build, params, jnp.asarray(X))


def test_logical_axes_have_the_structure_of_the_parameters(params):
    axes = xa.functional.logical_axes(build)
    assert axes["query"] == {
        "kernel": ("embed", "heads", "head_dim"),
        "bias": ("heads", "head_dim"),
    }
    assert axes["value"]["kernel"] == ("embed", "kv_heads", "head_dim")
    assert axes["out"] == {"kernel": ("heads", "head_dim", "embed"), "bias": ("embed",)}
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    assert jax.tree.structure(params) == jax.tree.structure(axes, is_leaf=is_axes)


@pytest.mark.slow
def test_pmap_of_gradients_is_the_gradient_of_all_rows():
    model = lambda rngs: Transformer(tiny(), rngs=rngs)  # noqa: E731
    params = xa.init(model, jax.random.key(0))
    source, target = jax.random.randint(jax.random.key(1), (2, 8, 5), 1, 64)

    def loss(params, source, target):
        logits = xa.apply(model, params, source, target[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, target[:, 1:]).mean()

    def step(params, source, target):
        return jax.lax.pmean(jax.grad(loss)(params, source, target), "devices")

    rows = [x.reshape(4, 2, 5) for x in (source, target)]
    found = jax.pmap(step, "devices", in_axes=(None, 0, 0))(params, *rows)
    expected = jax.jit(jax.grad(loss))(params, source, target)
    for device in range(4):
        jax.tree.map(
            lambda x, y, d=device: np.testing.assert_allclose(x[d], y, rtol=1e-4, atol=1e-6),
            found,
            expected,
        )
