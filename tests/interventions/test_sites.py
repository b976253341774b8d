"""Interventions are values of a call, change what they name, and leave a program without them as it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn import interventions, models, nn
from crossattn.interventions import (
    Intervention,
    captured,
    intervene,
    knockout,
    scales,
    sites,
)
from crossattn.models import transformer
from tests import numpy_model as oracle
from tests.closeness import close
from tests.compiled import compiled
from tests.models import every_model

WITH_BLOCKS = [
    name
    if name in ("bert", "transformer", "perceiver_io")
    else pytest.param(name, marks=pytest.mark.slow)
    for name in every_model.NAMES
    if name not in every_model.RECURRENT
]


run = functools.partial(compiled, interventions.run)


@functools.cache
def build(**changes):
    """The same function each time, whose abstract module is made once."""
    return lambda rngs: models.Transformer(transformer.tiny(**changes), rngs=rngs)


def model_of(**changes):
    return xa.functional.bind(build(**changes), oracle.random_params(build(**changes)))


def given(rows=2, padding=0):
    return jax.tree.map(jnp.asarray, transformer.example(transformer.tiny(), rows, padding))


def example_of(name):
    return jax.tree.map(jnp.asarray, every_model.example(name))


def outputs(given):
    """All numbers of a call, whose results may be several arrays."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(given)])


def bound(name):
    return xa.functional.bind(every_model.build_of(name), every_model.params_of(name))


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", every_model.NAMES)
def test_a_program_without_interventions_is_that_of_the_model(name):
    model, example = bound(name), example_of(name)
    text = lambda call: jax.jit(call).lower(**example).as_text()  # noqa: E731
    alone = text(lambda **x: model(**x))
    assert text(lambda **x: interventions.run(model, None, **x)) == alone
    assert intervene(model, {}) is model


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_every_model_has_heads_to_scale_and_scales_of_one_change_no_bit(name):
    model, example = bound(name), example_of(name)
    ones = scales(model)
    assert ones
    step_by_step = interventions.run(model, ones, **example)  # compiled, others are fused
    np.testing.assert_array_equal(outputs(step_by_step), outputs(model(**example)))
    edited = jax.jit(lambda edits, example: interventions.run(model, edits, **example))
    whole = outputs(edited(ones, example))
    for site in ones:
        less = outputs(edited(ones | knockout(model, site, 0, -1), example))
        assert np.any(less != whole), site


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_captured_activations_put_in_place_of_themselves_change_nothing(name):
    model, example = bound(name), example_of(name)
    names = [name for name in sites(model) if not name.endswith((".weights", ".stats"))]
    result, found = run(model, None, **example, capture=names)
    result = outputs(result)
    np.testing.assert_array_equal(result, outputs(run(model, None, **example)))
    calls = {name: len(x) // sites(model)[name].layers for name, x in found.items()}
    same = {
        name: Intervention(value=x)
        for name, x in found.items()
        if calls[name] == 1 and not name.endswith(".values")
    }
    close(outputs(run(model, same, **example)), result, ulps=2000)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_a_head_at_zero_is_a_head_whose_output_kernel_is_zero_in_every_bit(scan):
    params, example = oracle.random_params(build(scan=scan)), given()
    model = xa.functional.bind(build(scan=scan), params)
    whole = jax.jit(lambda params, x: xa.apply(build(scan=scan), params, **x))
    edited = jax.jit(lambda edits, x: interventions.run(model, edits, **x))
    for site, path in (
        ("encoder.attention.heads", "encoder.layers.{}attention.out.kernel"),
        ("decoder.attention.heads", "decoder.stack.layers.{}attention.out.kernel"),
        ("decoder.cross.heads", "decoder.stack.layers.{}cross.out.kernel"),
    ):
        for layer in range(2):
            flat = dict(xa.functional.flatten(params))
            name = path.format("" if scan else f"{layer}.")
            at = (layer, 1) if scan else (1,)
            flat[name] = jnp.asarray(flat[name]).at[at].set(0)
            found = edited(knockout(model, site, layer, 1), example)
            np.testing.assert_array_equal(found, whole(xa.functional.nest(flat), example))


@pytest.mark.slow
def test_a_scanned_stack_is_edited_and_captured_as_a_looped_one():
    looped = model_of()
    params = xa.functional.flatten(xa.functional.params_of(looped))
    config = transformer.tiny(scan=True)
    nested = xa.functional.nest(params)
    for half in (nested["encoder"], nested["decoder"]["stack"]):
        half["layers"] = nn.stack_layers(half["layers"])
    scanned = xa.functional.bind(lambda rngs: models.Transformer(config, rngs=rngs), nested)
    names = [name for name in sites(looped) if not name.endswith(".values")]
    assert sites(scanned) == sites(looped)
    edits = {
        name: Intervention(scale=jnp.array([0.5, 2.0]))
        for name in names
        if not name.endswith((".weights", ".stats"))
    }
    edits["decoder.cross.heads"] = Intervention(scale=jnp.array([[1.0, 0.2], [0.3, 1.4]]))
    edits["decoder.cross.values"] = Intervention(scale=jnp.linspace(0, 1, 12).reshape(2, 6))
    del edits["encoder.attention.heads"], edits["decoder.attention.heads"]
    one, one_found = run(looped, edits, **given(), capture=names)
    two, two_found = run(scanned, edits, **given(), capture=names)
    close(two, one, ulps=2000)
    close(two_found, one_found, ulps=2000)


class Repeated(nnx.Module):
    """A decoder whose blocks come in periods, or share their parameters."""

    def __init__(self, rngs, **options):
        shape = nn.BlockConfig.of(dim=16, num_heads=2, mlp_dim=16)
        build = [
            lambda rngs: nn.Block(attention=shape.self_attention(rngs)),
            lambda rngs: nn.Block(
                attention=shape.self_attention(rngs), feedforward=shape.feedforward(rngs)
            ),
        ]
        self.layers = nn.Stack(build, 2, **options, rngs=rngs)

    def __call__(self, x):
        return self.layers(x)[0]


@pytest.mark.quick(1)
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_layers_of_a_period_and_layers_that_share_have_edits_of_their_own(scan, share, remat):
    build = lambda rngs: Repeated(rngs, scan=scan, share=share, remat=remat)  # noqa: E731
    model = xa.functional.bind(build, oracle.random_params(build))
    x = jax.random.normal(jax.random.key(0), (2, 3, 16))
    assert {name: site.layers for name, site in sites(model).items()} == {
        "layers.attention": 4, "layers.+attention": 4, "layers.attention.weights": 4,
        "layers.attention.heads": 4, "layers.attention.stats": 4,
        "layers.feedforward": 2, "layers.+feedforward": 2,
    }  # fmt: skip
    factors = jnp.array([1.0, 0.5, 0.0, 2.0])
    edits = {
        "layers.attention": Intervention(scale=factors),
        "layers.feedforward": Intervention(scale=jnp.array([0.25, 3.0])),
    }

    def by_hand(model, expected):
        for i, block in enumerate(model.layers.blocks()):
            for name, own in block.sublayers.items():
                hidden = own.residual.pre_norm(expected)
                factor = factors[i] if name == "attention" else (0.25, 3.0)[i // 2]
                expected = expected + factor * own.inner(hidden)
        return expected

    close(run(model, edits, x), compiled(by_hand, model, x))
    loss = lambda scale: run(model, {"layers.attention": Intervention(scale=scale)}, x).sum()  # noqa: E731
    assert np.all(np.abs(jax.jit(jax.grad(loss))(factors)) > 0)


@pytest.mark.slow
def test_positions_and_parts_of_a_memory_are_scaled():
    model, example = model_of(), given()
    _, found = run(model, None, **example, capture=["decoder.cross"])
    keep = jnp.ones((2, 5)).at[0, 3].set(0)  # position 3 in layer 0
    _, less = run(
        model, {"decoder.cross": Intervention(scale=keep)}, **example, capture=["decoder.cross"]
    )
    assert np.all(less["decoder.cross"][0, :, 3] == 0)
    np.testing.assert_array_equal(less["decoder.cross"][0, :, :3], found["decoder.cross"][0, :, :3])

    # A part of the memory at 0 adds what its weights times nothing add.
    names = ["decoder.cross.weights", "decoder.cross.values", "decoder.cross.heads"]
    part = {"decoder.cross.values": Intervention(scale=jnp.ones((2, 6)).at[0, 2].set(0))}
    _, found = run(model, None, **example, capture=names)
    _, less = run(model, part, **example, capture=names)
    weights, values = (np.asarray(found[name][0], np.float64) for name in names[:2])
    values[:, 2] = 0
    close(less["decoder.cross.heads"][0], np.einsum("bnts,bsnh->btnh", weights, values))


@pytest.mark.slow
def test_an_activation_of_another_run_is_patched_in_where_a_mask_says():
    model, example = model_of(), given()
    other = example | {"source": (example["source"] + 7) % 60}
    clean, found = run(model, None, **example, capture=["encoder.+feedforward"])
    corrupt = run(model, None, **other)
    everything = {"encoder.+feedforward": Intervention(value=found["encoder.+feedforward"])}
    close(run(model, everything, **other), clean, ulps=2000)  # the decoder reads nothing else
    where = jnp.zeros((2, 6), bool)
    one = jax.jit(
        lambda where: run(
            model,
            {
                "encoder.+feedforward": Intervention(
                    value=found["encoder.+feedforward"], where=where
                )
            },
            **other,
        )
    )
    np.testing.assert_array_equal(one(where), corrupt)
    grid = jnp.eye(12, dtype=bool).reshape(12, 2, 6)  # one layer and position at a time
    patched = jax.jit(jax.vmap(one))(grid)
    close(patched[7], one(grid[7]), ulps=2000)
    assert len({float(np.abs(x - clean).sum()) for x in patched}) == 12


@pytest.mark.slow
def test_a_search_decodes_an_edited_model_through_its_caches():
    model, example = model_of(), given()
    edits = knockout(model, "decoder.attention.heads", 1, 0) | knockout(
        model, "encoder.attention.heads", 0, 1
    )
    edits["decoder.cross.values"] = Intervention(scale=jnp.ones((2, 6)).at[:, 1].set(0.1))
    source = {k: x for k, x in example.items() if k.startswith("source")}
    whole = run(model, edits, **source, target_in=example["target_in"])
    states = run(model, edits, 2, 1, 8, **source, method="prefill")
    steps = []
    step = jax.jit(lambda tokens, states: interventions.run(
        model, edits, tokens, states, capture=["decoder.cross.weights"], method="decode_step"
    ))  # fmt: skip
    for t in range(example["target_in"].shape[1]):
        (logits, states), found = step(example["target_in"][:, None, t : t + 1], states)
        assert found["decoder.cross.weights"].shape == (2, 2, 2, 1, 6)
        steps.append(logits[:, 0])
    close(jnp.concatenate(steps, 1), whole, ulps=2000)

    search = functools.partial(xa.decode.generate, max_new_tokens=4, num_beams=2, **source)
    one, other = (compiled(search, m) for m in (model, intervene(model, edits)))
    assert np.all(one.scores[:, 0] != other.scores[:, 0])


def begun(model, tokens):
    """The states of a decoder that has read tokens [B 1 T]."""
    return compiled(lambda m, x: m.decode_step(x, m.prefill(len(x), 1, 8))[1], model, tokens)


def test_rows_at_different_positions_hand_out_their_activations():
    model = xa.functional.bind(every_model.build_of("decoder"), every_model.params_of("decoder"))
    states = begun(model, jnp.array([[[3, 4]], [[5, 6]]])).rewind(jnp.array([1, 2]))
    tokens = jnp.array([[[7]], [[8]]])
    (expected, _), found = run(
        model, None, tokens, states, capture=["decoder.+feedforward"], method="decode_step"
    )
    alone, _ = run(model, None, tokens, states, method="decode_step")
    np.testing.assert_array_equal(expected, alone)
    assert found["decoder.+feedforward"].shape == (2, 2, 1, 32)


@pytest.mark.slow
def test_rows_at_different_positions_are_edited_each_as_it_is_alone():
    model = xa.functional.bind(every_model.build_of("decoder"), every_model.params_of("decoder"))
    texts, lengths = jnp.array([[3, 4], [5, 6]]), jnp.array([1, 2])
    states = begun(model, texts[:, None])
    _, patch = run(model, None, texts, capture=["decoder.+feedforward"])
    edits = {
        "decoder.attention.heads": Intervention(
            scale=jnp.array([[[[0.0, 1.0]], [[1.0, 0.5]]], [[[1.0, 1.0]], [[0.2, 1.0]]]])
        ),
        "decoder.attention": Intervention(scale=jnp.array([0.5, 1.0])),  # of all rows
        "decoder.+feedforward": Intervention(
            value=patch["decoder.+feedforward"][:, :, :1],
            where=jnp.array([[[False], [True]], [[False], [False]]]),
        ),
    }
    tokens = jnp.array([[[7]], [[8]]])
    together, _ = run(model, edits, tokens, states.rewind(lengths), method="decode_step")
    for row, length in enumerate(lengths.tolist()):
        alone = begun(model, texts[row : row + 1, None, :length])
        part = lambda x, at=row: x if x.ndim == 1 else x[:, at : at + 1]  # noqa: E731
        own = jax.tree.map(part, edits)
        expected, _ = run(model, own, tokens[row : row + 1], alone, method="decode_step")
        close(together[row], expected[0], ulps=2000)
    wrong = {"decoder.attention": Intervention(scale=jnp.ones((2, 3, 1)))}
    with pytest.raises(ValueError, match=r"shape \(3, 1\) in a layer"):
        run(model, wrong, tokens, states.rewind(lengths), method="decode_step")


@pytest.mark.parametrize(
    "name",
    [
        name if name == "flamingo" else pytest.param(name, marks=pytest.mark.slow)
        for name in every_model.NAMES
        if name not in every_model.RECURRENT
    ],
)
def test_a_model_in_bfloat16_has_activations_of_bfloat16(name):
    build = every_model.build_of(name, jnp.bfloat16)
    model = xa.functional.bind(build, every_model.params_of(name))
    names = [name for name in sites(model) if not name.endswith((".weights", ".stats"))]
    call = lambda example: captured(lambda tapped: tapped(**example), model, names)[1]  # noqa: E731
    found = jax.eval_shape(call, example_of(name))
    assert {site: x.dtype for site, x in found.items() if x.dtype != jnp.bfloat16} == {}


def test_explicit_axes_of_a_mesh_hand_out_activations():
    mesh = jax.make_mesh((1,), ("data",))
    model, example = model_of(), given()
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    placed = {name: jax.device_put(x, spec) for name, x in example.items()}
    with jax.set_mesh(mesh):
        _, found = run(
            model, scales(model), **placed, capture=["decoder.cross", "encoder.attention.weights"]
        )
    _, expected = run(
        model, None, **example, capture=["decoder.cross", "encoder.attention.weights"]
    )
    close(found, expected)


CROSS = "decoder.cross.heads"
BAD = [
    ("decoder.cros.heads", Intervention(), "'decoder.cros.heads'; did you mean 'decoder.cross.heads'?"),
    (CROSS, Intervention(scale=np.ones((2, 3))), r"heads has shape \(2, 3\); expected 2 layers of 2 heads"),
    ("decoder.cross", Intervention(scale=np.ones(3)), r"cross has shape \(3,\); expected 2 layers"),
    ("decoder.cross", Intervention(scale=np.ones((2, 4))), r"\(4,\) in a layer; .* broadcasts to \(2, 5\)"),
    ("decoder.cross.weights", Intervention(scale=np.ones((2, 2))), "can be captured alone"),
    ("decoder.cross", np.ones(2), r"is a ndarray; expected Intervention\(scale=...\)"),
    ("decoder.cross", Intervention(where=np.ones(2, bool)), "has where= and no value="),
]  # fmt: skip


@pytest.mark.parametrize(("site", "edit", "message"), BAD)
def test_what_does_not_fit_is_one_sentence(site, edit, message):
    with pytest.raises(ValueError, match=message) as error:
        interventions.run(model_of(), {site: edit}, **given())
    assert "\n" not in str(error.value)


def test_a_head_that_there_is_not_and_a_call_that_does_not_reach_a_site_are_one_sentence():
    model = model_of()
    with pytest.raises(
        ValueError, match="head is 8, but decoder.cross.heads has 2; expected 0 to 1"
    ):
        knockout(model, "decoder.cross.heads", 1, 8)
    with pytest.raises(
        ValueError, match="decoder.cross has no heads; expected of encoder.attention.heads"
    ):
        knockout(model, "decoder.cross", 1, 1)
    source = given()["source"]
    with pytest.raises(ValueError, match="no site 'decoder.across'; did you mean 'decoder.cross'"):
        run(model, None, **given(), capture=["decoder.across"])
    with pytest.raises(
        ValueError, match="encode did not reach decoder.cross; expected a call that runs"
    ):
        run(model, None, source, capture=["decoder.cross"], method="encode")
    with pytest.raises(TypeError, match=r"capture is 'decoder.cross'; .*, \['decoder.cross'\]"):
        run(model, None, source, capture="decoder.cross")


def test_a_list_in_place_of_an_array_is_one_sentence(in_production):
    edit = {CROSS: Intervention(scale=[[1.0, 0.0], [0.0, 1.0]])}  # ty: ignore
    with pytest.raises(
        ValueError, match="the scale .* on decoder.cross.heads is a list; expected an"
    ):
        run(model_of(), edit, **given())


def test_the_parameters_of_an_edited_model_are_those_of_the_model():
    model = model_of()
    own = xa.functional.params_of(intervene(model, scales(model)))
    assert jax.tree.structure(own) == jax.tree.structure(xa.functional.params_of(model))
