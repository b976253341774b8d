"""A program for eight virtual CPU devices: prints what is wrong with each case, "" for nothing."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import crossattn as xa
from crossattn import functional
from crossattn.models import transformer
from crossattn.train.sharding import params_sharding
from tests.closeness import close
from tests.compiled_kernel import MISSING

AXES = ("data", "fsdp", "tensor", "seq")
SENT = re.compile(
    r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)
draw = np.random.default_rng(0).normal


def mesh_of(*sizes, names=AXES):
    return jax.make_mesh(sizes, names, (AxisType.Auto,) * len(names))


def operands(T=64, S=48, N=4, K=2):
    return [np.float32(draw(size=shape)) for shape in ((8, T, N, 16), (8, S, K, 16), (8, S, K, 16))]


def put(mesh, arrays, *spec):
    place = NamedSharding(mesh, PartitionSpec(*spec))
    return [jax.device_put(x, place) for x in arrays]


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


def numbers(sizes, mask, heads=(4, 2), T=64):
    arrays, mesh = operands(N=heads[0], K=heads[1], T=T), mesh_of(*sizes)
    call = differentiated(mask)
    placed = put(mesh, arrays, ("data", "fsdp"), "seq" if sizes[-1] > 1 else None)
    close(call(*placed), call(*arrays))
    uses_the_kernel(program(call, *placed))


MASKS = {
    "nothing": None,
    "causal": xa.masks.causal(offset=2),
    "lengths": xa.masks.lengths(jnp.asarray([48, 1, 0, 7, 48, 30, 2, 5])),
    "segments": xa.masks.segments(
        jnp.asarray(np.arange(64) // 9 % 4 * np.ones((8, 1)), jnp.int32),
        jnp.asarray(np.arange(48) // 7 % 4 * np.ones((8, 1)), jnp.int32),
    ),
}
CASES = {
    f"{name} on {'x'.join(map(str, sizes))}": lambda mask=mask, sizes=sizes: numbers(sizes, mask)
    for name, mask in MASKS.items()
    for sizes in ((2, 2, 2, 1), (2, 1, 2, 2), (1, 1, 1, 8))
}
CASES |= {
    "few queries of a long memory": lambda: numbers((1, 1, 1, 8), MASKS["lengths"], T=8),
    "one key head": lambda: numbers((2, 1, 4, 1), MASKS["causal"], (4, 1)),
    "key heads that the devices do not divide": lambda: numbers((2, 1, 4, 1), None, (8, 2)),
    "heads that the devices do not divide": lambda: numbers((2, 1, 4, 1), None, (6, 3)),
}


def case(check):
    CASES[check.__name__] = check
    return check


@case
def nothing_is_gathered():
    """Of what is split by examples and heads: inside jit, vmap, scan and remat."""
    mesh = mesh_of(2, 2, 2, 1)
    placed = put(mesh, operands(), ("data", "fsdp"), None, "tensor")

    def attend(q, k, v):
        return xa.attend(q, k, v, MASKS["causal"])

    def step(x, _):
        return jax.checkpoint(attend)(x, *placed[1:]), None

    refuse_what_is_sent(program(jax.jit(attend), *placed))
    refuse_what_is_sent(program(jax.jit(jax.vmap(attend)), *placed))
    refuse_what_is_sent(program(jax.jit(lambda q: jax.lax.scan(step, q, None, 2)[0]), placed[0]))


@case
def gradients_of_vmap_are_not_gathered():
    mesh = mesh_of(4, 2, 1, 1)
    placed = put(mesh, operands(), ("data", "fsdp"))

    def gradient(q, k, v):
        return jax.grad(lambda q: jnp.sum(jnp.sin(xa.attend(q, k, v))))(q)

    refuse_what_is_sent(program(jax.jit(jax.vmap(gradient)), *placed))


@case
def keys_are_gathered_anew_when_the_cotangent_is_there():
    def gradients(q, k, v, cotangent):
        return jax.vjp(xa.attend, q, k, v)[1](cotangent)

    q, k, v = put(mesh_of(2, 1, 1, 4), operands(), "data", "seq")
    text = jax.jit(gradients).lower(q, k, v, q).as_text()
    (waiting,) = re.findall(r"optimization_barrier (.*) :", text)
    assert waiting.count("%") == 4, f"{waiting} is not q, k, v and the cotangent"


@case
def other_names_by_other_rules():
    mesh = mesh_of(4, 2, names=("dp", "tp"))
    arrays = operands()
    placed = put(mesh, arrays, "dp", None, "tp")
    with xa.use_rules({"batch": ("dp",), "heads": ("tp",)}):
        call = differentiated()
        close(call(*placed), call(*arrays))
        uses_the_kernel(program(call, *placed))
        refuse_what_is_sent(program(jax.jit(lambda *a: xa.attend(*a)), *placed))


@case
def names_that_no_rule_has():
    """XLA decides, and what it cannot cut does not run."""
    mesh = mesh_of(4, 2, names=("dp", "tp"))
    arrays = operands()
    call = differentiated()
    close(call(*put(mesh, arrays, "dp", None, "tp")), call(*arrays))


@case
def one_device_of_several():
    """Arrays that lie on one device are attended to as where there is only one."""
    call = differentiated(MASKS["causal"])
    uses_the_kernel(program(call, *operands()))


@case
def a_model():
    """Loss and gradients of a Transformer whose parameters are split, and its kernels."""
    mesh = mesh_of(2, 2, 2, 1)
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

    given = jax.device_put(params, place), *put(mesh, [tokens], ("data", "fsdp"))
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


def fault(check):
    try:
        check()
    except Exception as error:
        return f"{type(error).__name__}: {error}" or "failed"
    return ""


if __name__ == "__main__":
    print(json.dumps({name: fault(check) for name, check in CASES.items()}))
