"""Kinds of attention that compile for v5e: gradients of ``attend``, on one device or with a mesh in force."""

from functools import partial

import jax
import jax.numpy as jnp

import crossattn as xa
from experiments.plan.compiling import compiled_for
from experiments.plan.topologies import topology

m = xa.masks
B, T, N, H = 2, 256, 4, 64


def shapes(b=B, t=T, s=None, n=N, k=None, h=H, hv=None, dtype="bfloat16"):
    s, k = s or t, k or n
    return [(b, t, n, h), (b, s, k, h), (b, s, k, hv or h)], dtype


# Kernel, q k v, mask of an array of that shape and dtype, options; arrays among these are shapes.
CALLS = {
    "plain": ("splash", shapes(), None, {}),
    "odd lengths": ("splash", shapes(t=197), lambda _: m.causal(), {}),
    "float16": ("splash", shapes(dtype="float16"), lambda _: m.causal(), {}),
    "float32": ("splash", shapes(t=1024, h=256, dtype="float32"), lambda _: m.causal(), {}),
    "large heads, many keys": ("splash", shapes(1, 512, 50176, 1, h=1024), None, {}),
    "large heads in float32": ("splash", shapes(4, 2048, h=1024, dtype="float32"), None, {}),
    "log-sum-exp": (
        "splash",
        shapes(t=1024, h=128),
        lambda _: m.window(99, 9),
        {"return_lse": True},
    ),
    "prefix": ("splash", shapes(), lambda n: m.causal() | m.prefix(n), {"mask": ((B,), "int32")}),
    "offset": ("splash", shapes(), lambda n: m.window(9, 0, offset=n), {"mask": ((), "int32")}),
    "positions": (
        "splash",
        shapes(t=1024),
        lambda n: m.causal(q_positions=n, k_positions=n),
        {"mask": ((B, 1024), "int32")},
    ),
    "matrix": ("splash", shapes(8, 2048), m.explicit, {"mask": ((8, 1, 2048, 2048), "bool")}),
    "matrix of every head": ("splash", shapes(), m.explicit, {"mask": ((B, N, T, T), "bool")}),
    "bias": ("flash", shapes(16, 1024), None, {"bias": ((1, N, 1024, 1024), "float32")}),
    "bias in float16": (
        "flash",
        shapes(dtype="float16"),
        None,
        {"bias": ((1, N, T, T), "float16")},
    ),
    "bias, few key heads": (
        "flash",
        shapes(k=2, hv=200),
        None,
        {"bias": ((B, 1, 1, T), "float32")},
    ),
    "bias, causal, segments": (
        "flash",
        shapes(t=197),
        lambda n: m.causal() & m.segments(n),
        {"mask": ((B, 197), "int32"), "bias": ((1, N, 197, 197), "float32")},
    ),
}


def compile_call(devices, place, kernel, operands, mask, options):
    """Compiles forward and backward passes to kernels of that name."""
    options, (sizes, dtype) = dict(options), operands
    arrays = {name: options.pop(name) for name in ("mask", "bias") if name in options}
    placed = partial(jax.ShapeDtypeStruct, sharding=place)
    arrays = {name: placed(*x) for name, x in arrays.items()}
    qkv = [placed(size, jnp.dtype(dtype)) for size in sizes]

    def loss(q, k, v, arrays):
        given = None if mask is None else mask(arrays.get("mask"))
        out = xa.attend(q, k, v, given, bias=arrays.get("bias"), **options)
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(out))

    step = jax.jit(jax.grad(loss, (0, 1, 2, 3), allow_int=True))
    compiled, reasons = compiled_for(devices, step, *qkv, arrays)
    assert not reasons, reasons
    calls = [line for line in compiled.as_text().splitlines() if "tpu_custom_call" in line]
    assert len(calls) >= 3, "the output, dq, dk and dv"
    assert all(kernel in line for line in calls), [line[:80] for line in calls]


def compile_kind(name, devices):
    """Compiles on one device; in a mesh of ``devices`` for a name that ends with "under a mesh"."""
    call = CALLS[name.removesuffix(UNDER_A_MESH)]
    if name.endswith(UNDER_A_MESH):
        mesh = jax.make_mesh((4,), ("data",), devices=devices.devices)
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        with jax.set_mesh(mesh):
            compile_call(devices, place, *call)
    else:
        one = topology("v5e:1x1")
        compile_call(one, jax.sharding.SingleDeviceSharding(one.devices[0]), *call)


UNDER_A_MESH = " under a mesh"
KINDS = [*CALLS, f"odd lengths{UNDER_A_MESH}", f"prefix{UNDER_A_MESH}"]
