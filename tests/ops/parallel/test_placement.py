"""Attention on meshes of eight devices with Auto axes: each device computes its part, by the kernel."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn import functional
from crossattn.models import transformer
from crossattn.train.sharding import params_sharding
from tests.closeness import close
from tests.compiled_kernel import MISSING, needs_kernel
from tests.ops.eight import mesh_of, needs_eight_devices, put

AXES = ("data", "fsdp", "tensor", "seq")
SENT = re.compile(
    r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)
draw = np.random.default_rng(0).normal


def operands(T=64, S=48, N=4, K=2):
    return [np.float32(draw(size=shape)) for shape in ((8, T, N, 16), (8, S, K, 16), (8, S, K, 16))]


def differentiated(mask=None):
    def loss(q, k, v):
        out, lse = xa.attend(q, k, v, mask, return_lse=True)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0))

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


def program(call, *arguments):
    return call.lower(*arguments).compile().as_text()


def refuse_what_is_sent(text):
    assert not (found := SENT.findall(text)), f"it has {found}"


def uses_the_kernel(text):
    assert MISSING or "CrossattnForward" in text, "the compiled kernel does not run"


MASKS = {
    "nothing": None,
    "causal": xa.masks.causal(offset=2),
    "lengths": xa.masks.lengths(jnp.asarray([48, 1, 0, 7, 48, 30, 2, 5])),
    "segments": xa.masks.segments(
        jnp.asarray(np.arange(64) // 9 % 4 * np.ones((8, 1)), jnp.int32),
        jnp.asarray(np.arange(48) // 7 % 4 * np.ones((8, 1)), jnp.int32),
    ),
}
NUMBERS = [
    pytest.param(mask, sizes, heads, T, id=name, marks=[] if quick else pytest.mark.slow)
    for name, mask, sizes, heads, T, quick in (
        *(
            (f"{name} on {'x'.join(map(str, sizes))}", mask, sizes, (4, 2), 64, name == "lengths")
            for name, mask in MASKS.items()
            for sizes in ((2, 2, 2, 1), (2, 1, 2, 2), (1, 1, 1, 8))
        ),
        ("few queries of a long memory", MASKS["lengths"], (1, 1, 1, 8), (4, 2), 8, True),
        ("one key head", MASKS["causal"], (2, 1, 4, 1), (4, 1), 64, False),
        ("key heads that do not divide", None, (2, 1, 4, 1), (8, 2), 64, True),
        ("heads that do not divide", None, (2, 1, 4, 1), (6, 3), 64, False),
    )
]


@needs_eight_devices
@pytest.mark.parametrize(("mask", "sizes", "heads", "T"), NUMBERS)
def test_each_device_attends_to_its_part_by_the_kernel(mask, sizes, heads, T):
    arrays, mesh = operands(N=heads[0], K=heads[1], T=T), mesh_of(*sizes, names=AXES)
    call = differentiated(mask)
    placed = put(mesh, arrays, (("data", "fsdp"), "seq" if sizes[-1] > 1 else None))
    close(call(*placed), call(*arrays))
    uses_the_kernel(program(call, *placed))


@needs_eight_devices
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_no_array_without_elements_goes_from_one_shard_map_to_another(mask):
    # XLA of jaxlib 0.11.2 ends in a segmentation fault while it compiles such a program.
    placed = put(mesh_of(2, 2, 2, 1, names=AXES), operands(), (("data", "fsdp"), None, "tensor"))
    text = differentiated(mask).lower(*placed).as_text()
    calls = [line for line in text.splitlines() if "manual_computation" in line]
    assert len(calls) > 1
    assert not [line for line in calls if re.search(r"tensor<(\d+x)*0x", line)]


@needs_eight_devices
def test_nothing_is_gathered_in_jit_vmap_scan_and_remat():
    mesh = mesh_of(2, 2, 2, 1, names=AXES)
    placed = put(mesh, operands(), (("data", "fsdp"), None, "tensor"))

    def attend(q, k, v):
        return xa.attend(q, k, v, MASKS["causal"])

    def step(x, _):
        return jax.checkpoint(attend)(x, *placed[1:]), None

    def gradient(q, k, v):
        return jax.grad(lambda q: jnp.sum(jnp.sin(attend(q, k, v))))(q)

    refuse_what_is_sent(program(jax.jit(attend), *placed))
    refuse_what_is_sent(program(jax.jit(jax.vmap(gradient)), *placed))
    refuse_what_is_sent(program(jax.jit(jax.vmap(attend)), *placed))
    refuse_what_is_sent(program(jax.jit(lambda q: jax.lax.scan(step, q, None, 2)[0]), placed[0]))


@needs_eight_devices
def test_keys_are_gathered_anew_when_the_cotangent_is_there():
    def gradients(q, k, v, cotangent):
        return jax.vjp(xa.attend, q, k, v)[1](cotangent)

    q, k, v = put(mesh_of(2, 1, 1, 4, names=AXES), operands(), ("data", "seq"))
    text = jax.jit(gradients).lower(q, k, v, q).as_text()
    (waiting,) = re.findall(r"optimization_barrier (.*) :", text)
    assert waiting.count("%") == 4, f"{waiting} is not q, k, v and the cotangent"


@needs_eight_devices
def test_other_rules_place_other_names_and_axes_without_a_rule_change_nothing():
    mesh = mesh_of(4, 2, names=("dp", "tp"))
    arrays = operands()
    placed = put(mesh, arrays, ("dp", None, "tp"))
    close(differentiated()(*placed), differentiated()(*arrays))
    with xa.use_rules({"batch": ("dp",), "heads": ("tp",)}):
        call = differentiated()
        close(call(*placed), call(*arrays))
        uses_the_kernel(program(call, *placed))
        refuse_what_is_sent(program(jax.jit(lambda *a: xa.attend(*a)), *placed))


@needs_eight_devices
def test_arrays_on_one_device_of_several_run_the_kernel():
    """Arrays that lie on one device are attended to as where there is only one."""
    call = differentiated(MASKS["causal"])
    uses_the_kernel(program(call, *operands()))


@pytest.mark.slow
@needs_eight_devices
def test_a_model_on_a_mesh_gives_what_one_device_gives_and_sends_no_more_than_parameters():
    """Loss and gradients of a Transformer whose parameters are split, and its kernels."""
    mesh = mesh_of(2, 2, 2, 1, names=AXES)
    config = transformer.tiny()

    def build(rngs):
        return transformer.Transformer(config, rngs=rngs)

    params = functional.init(build, jax.random.key(0))
    place = params_sharding(params, functional.logical_axes(build), mesh)
    tokens = jnp.asarray(np.random.default_rng(1).integers(1, 64, (8, 12)), jnp.int32)

    @jax.jit
    def step(params, tokens):
        def loss(params):
            logits = functional.apply(build, params, tokens, tokens[:, :-1])
            return -jnp.mean(jax.nn.log_softmax(logits)[..., 3])

        return jax.value_and_grad(loss)(params)

    given = jax.device_put(params, place), *put(mesh, [tokens], (("data", "fsdp"),))
    found, expected = step(*given), step(params, tokens)
    # Some parameters have gradients that are all rounding: keys' biases move no softmax.
    size = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    close(found, expected, ulps=1000, size=size)
    uses_the_kernel(text := program(step, *given))
    largest = max(x.size for x in jax.tree.leaves(params))
    whole = [line for line in text.splitlines() if SENT.search(line) and _elements(line) > largest]
    assert not whole, f"more than a parameter is sent: {whole[0][:200]}"


def _elements(line):
    shapes = re.findall(r"f32\[([\d,]*)\]", line.split(" = ")[1].split("(%")[0])
    return max((math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes), default=0)


def test_a_rule_is_a_tuple_of_mesh_axes():
    with pytest.raises(TypeError, match="rule of 'batch' is 'data'; expected a tuple"):
        with xa.use_rules({"batch": "data"}):
            pass


KERNELS = ("CrossattnForward", "CrossattnBackward", "tpu_custom_call")


def exported(platforms, *arguments):
    """The kernels in a program for other platforms, traced on this one."""

    def loss(x):
        return xa.attend(x, x, x, xa.masks.causal()).astype(jnp.float32).sum()

    unsafe = [jax.export.DisabledSafetyCheck.custom_call(name) for name in KERNELS]
    export = jax.export.export(
        jax.jit(jax.value_and_grad(loss)), platforms=platforms, disabled_checks=unsafe
    )
    text = export(*arguments).mlir_module()
    return {name: text.count(f"@{name}(") for name in KERNELS}


LONG = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)


def test_a_program_for_a_tpu_has_its_kernels_and_none_of_this_machines():
    # One forward; the queries' gradients, and the keys'. The forward pass is not computed again.
    assert exported(["tpu"], LONG) == dict(zip(KERNELS, (0, 0, 3), strict=True))


@needs_kernel
def test_one_trace_is_lowered_for_each_platform_with_its_own_kernels():
    assert exported(["cpu", "tpu"], LONG) == dict(zip(KERNELS, (1, 1, 3), strict=True))


def test_a_mapped_axis_is_one_more_batch_axis():
    x = jnp.ones((3, 8, 2, 4))
    mapped = jax.make_jaxpr(jax.vmap(lambda x: xa.attend(x, x, x)))(x)
    (attention,) = [e for e in mapped.jaxpr.eqns if e.primitive.name == "attend"]
    assert attention.invars[0].aval.shape == x.shape
