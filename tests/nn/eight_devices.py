"""A program for eight virtual CPU devices: random stacks of parts on five meshes, and XLA's mistakes.

It prints as JSON whether each of XLA's two mistakes is mended, in the least program of plain JAX, and what
is wrong with the gradients of each stack on each mesh.
"""

import json
import random

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import crossattn as xa
from crossattn.models.crossvit import Exchange
from crossattn.train.sharding import MeshConfig, batch_sharding, make_mesh, params_sharding
from tests import numpy_model as oracle

STACKS, ROWS, VOCABULARY = 10, 4, 24
MESHES = [(2, 2, 2, 1), (1, 2, 2, 2), (1, 4, 2, 1), (2, 2, 1, 2), (2, 1, 2, 2)]


def chain_is_right():
    """``x A B^T A^T``, examples over data and fsdp, weights over fsdp and tensor.

    In the second product XLA's partitioner brings the examples into the order of the weights' devices,
    fsdp before data, and takes the result for one in the order of before.
    """
    weights = P("fsdp", "tensor")
    split = P(("data", "fsdp")), weights, weights
    return is_right(lambda x, a, b: x @ a @ b.T @ a.T, [(4, 4)] * 3, split)


def sum_is_right():
    """A sum of products over axes that are split unlike: XLA leaves out to add the parts along data."""
    split = P("data", "fsdp"), P("data", None, "fsdp")
    return is_right(lambda x, y: jnp.einsum("bts,bts->", x, y), [(4, 2, 2)] * 2, split)


def is_right(call, shapes, split):
    """Returns whether a jitted call gives the same on eight devices as on one."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    given = [jax.device_put(x, NamedSharding(mesh, p)) for x, p in zip(arrays, split, strict=True)]
    return np.allclose(jax.jit(call)(*given), call(*arrays), 1e-4)


class Part(nnx.Module):
    """One of the public parts, from vectors of one width to those of the same or another."""

    def __init__(self, kind, dim, draw, rngs):
        block = xa.nn.BlockConfig.of(
            dim=dim, num_heads=2, mlp_dim=2 * dim, norm_first=draw.random() < 0.5,
            activation=draw.choice(["relu", "swiglu"]), norm=draw.choice(["layer", "rms"]),
        )  # fmt: skip
        self.kind, self.dim = kind, draw.choice([8, 16]) if kind in ("plain", "named") else dim
        axes = dict(in_axes=("embed",), out_axes=("mlp",))
        make = {
            "plain": lambda: nnx.Linear(dim, self.dim, rngs=rngs),
            "named": lambda: xa.nn.linear(dim, self.dim, **axes, rngs=rngs),
            "attention": lambda: xa.nn.MultiHeadAttention(
                dim, 2, num_kv_heads=draw.choice([1, 2]), rngs=rngs
            ),
            "additive": lambda: xa.nn.AdditiveAttention(dim, rngs=rngs),
            "block": lambda: xa.nn.Block(feedforward=block.feedforward(rngs)),
            "stack": lambda: xa.nn.Stack(
                lambda r: xa.nn.EncoderBlock(block, rngs=r), 2, scan=draw.random() < 0.5, rngs=rngs
            ),
            "decoder": lambda: xa.nn.DecoderBlock(block, 16, rngs=rngs),
            "fusion": lambda: Exchange(block, other_block(), rngs=rngs),
            "pool": lambda: xa.nn.ClassOutput(dim, dim, rngs=rngs),
        }
        self.inner = make[kind]()

    def __call__(self, x, memory):
        if self.kind == "attention":
            return self.inner(x, self.inner.memory(x))
        if self.kind == "additive":
            return self.inner(x, self.inner.memory(memory[..., : x.shape[-1]]))
        if self.kind in ("block", "stack"):
            return self.inner(x)[0]
        if self.kind == "decoder":
            return self.inner(x, memories={"source": memory})[0]
        if self.kind == "fusion":
            return self.inner(x, memory, None, False)[0]
        if self.kind == "pool":
            return x + self.inner.logits(jnp.mean(x, -2))[:, None]
        return self.inner(x)


KINDS = ["named", "attention", "additive", "block", "stack", "decoder", "fusion", "pool"]


def other_block():
    return xa.nn.BlockConfig.of(dim=16, num_heads=2, mlp_dim=16)


class Parts(nnx.Module):
    """Tokens, two parts drawn at random, plain linear layers between some, and logits."""

    def __init__(self, seed, rngs):
        draw = random.Random(seed)
        self.embedding = xa.nn.Embedding(VOCABULARY, 16, rngs=rngs)
        self.parts, dim = nnx.List(), 16
        for kind in draw.sample(KINDS, 2):
            for each in ["plain", kind] if draw.random() < 0.5 else [kind]:
                self.parts.append(Part(each, dim, draw, rngs))
                dim = self.parts[-1].dim
        block = xa.nn.BlockConfig.of(dim=dim, num_heads=2, mlp_dim=dim)
        config = xa.nn.OutputConfig(transform=draw.random() < 0.5)
        self.output = xa.nn.TokenOutput(VOCABULARY, block, config, tied=False, rngs=rngs)

    def __call__(self, tokens):
        x, memory = self.embedding(tokens[:, :2]), self.embedding(tokens)
        for part in self.parts:
            x = part(x, memory)
        return jnp.sin(self.output.logits(x, self.embedding)).sum()


def build(rngs):
    return nnx.List([Parts(seed, rngs) for seed in range(STACKS)])


def gradient(params, tokens):
    """Computes the gradients of all stacks in one program."""

    def loss(params):
        return sum(stack(tokens) for stack in xa.functional.bind(build, params))

    return jax.device_get(jax.jit(jax.grad(loss))(params))


def fault(found, alone):
    """The parameter that is off by most, of its own largest entry or a hundredth of the stack's."""
    found, alone = map(xa.functional.flatten, (found, alone))
    floor = 0.01 * max(np.abs(x).max() for x in alone.values())
    off = {
        path: float(np.abs(found[path] - x).max() / max(np.abs(x).max(), floor))
        for path, x in alone.items()
    }
    worst = max(off, key=off.get)
    return "" if off[worst] < 1e-5 else f"{worst} is off by {off[worst]:.1e}"


def faults():
    params = oracle.random_params(build)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (ROWS, 6)).astype(np.int32)
    alone, found = gradient(params, tokens), {}
    for sizes in MESHES:
        mesh = make_mesh(MeshConfig(*sizes))
        split = params_sharding(params, xa.functional.logical_axes(build), mesh)
        rows = jax.device_put(tokens, batch_sharding(tokens.shape, mesh))
        there = gradient(jax.device_put(params, split), rows)
        found |= {f"{sizes} {seed}": fault(there[seed], alone[seed]) for seed in alone}
    return found


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)  # XLA's partitioner is not one
    assert jax.device_count() == 8
    print(json.dumps({"chain": chain_is_right(), "sum": sum_is_right(), "stacks": faults()}))
