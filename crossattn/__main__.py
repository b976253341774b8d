"""``python -m crossattn doctor``: what is here, and which backend takes which call on this machine.

``python -m crossattn build`` compiles the CPU kernel before anything needs it.
"""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import crossattn
from crossattn.ops import backends, masks
from crossattn.ops.explain import Explanation, explain

USAGE = """usage: python -m crossattn doctor | build

doctor   versions, devices, the compiled kernel, and which backend takes which call here, and why
build    compiles the CPU kernel, which the first call of attend would do, and says where it is"""
B, T, N, H = 8, 1024, 8, 64


def main(arguments: list[str]) -> int:
    """Print what was asked for; the exit code is 2 where nothing known was, 1 where nothing was built."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    if arguments == ["build"]:
        return build()
    if arguments != ["doctor"]:
        print(USAGE, file=sys.stderr)
        return 2
    for line in doctor():
        print(line)
    return 0


def build() -> int:
    """Compile the kernel for this processor, whatever the devices are; nothing is loaded."""
    from crossattn.ops.native import build as native

    try:
        print(native.library())
    except native.Unavailable as reason:
        print(f"there is no compiled kernel here: {reason}", file=sys.stderr)
        return 1
    return 0


def doctor() -> Iterator[str]:
    """The report, line by line."""
    names = ("jax", "jaxlib", "flax", "jaxtyping", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    yield f"crossattn {crossattn.__version__}; Python {platform.python_version()}, {versions}"
    kinds = [device.device_kind for device in jax.devices()]
    counted = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    yield f"platform {jax.default_backend()}: {counted}; {os.cpu_count()} CPU cores"
    yield f"compiled kernel: {_compiled_kernel()}"
    yield ""
    order = ", ".join(backends.ordered(jax.default_backend()))
    by_name = [n for n in backends.names() if n not in backends.ordered(jax.default_backend())]
    yield f"backends tried here, in this order: {order}; by name only: {', '.join(by_name) or 'none'}"
    yield f"queries, keys and values are [B T N H] = [{B} {T} {N} {H}] where nothing else is said"
    explained = {name: explain(*call, **options) for name, (call, options) in _calls().items()}
    yield ""
    yield from _taken(explained)
    yield ""
    yield from _reasons(explained)


def _compiled_kernel() -> str:
    from crossattn.ops import native

    try:
        native.load()
    except NotImplementedError as refusal:
        return f"not here: {refusal}"
    return "built and loaded"


def _calls() -> dict[str, tuple[tuple, dict]]:
    """Typical calls by name."""

    def arrays(length=T, dtype=jnp.float32, keys=None):
        q = jax.ShapeDtypeStruct((B, length, N, H), dtype)
        k = jax.ShapeDtypeStruct((B, keys or length, N, H), dtype)
        return q, k, k

    causal = masks.causal()
    padded = masks.lengths(jnp.full((B,), T // 2))
    bias = jax.ShapeDtypeStruct((1, N, T, T), jnp.float32)
    dropout = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}
    return {
        "self": (arrays(), {}),
        "causal": ((*arrays(), causal), {}),
        "padded": ((*arrays(), padded), {}),
        "window of 128, causal": ((*arrays(), masks.window(128)), {}),
        "packed (segments), causal": ((*arrays(), _packed() & causal), {}),
        f"cross, {T // 2} keys": (arrays(keys=T // 2), {}),
        "one cached decoding step": ((*arrays(1, keys=T), padded), {}),
        "short: 64 queries and keys": (arrays(64), {}),
        "causal, with a bias": ((*arrays(), causal), {"bias": bias}),
        "causal, with dropout": ((*arrays(), causal), dropout),
        "causal, with softcap": ((*arrays(), causal), {"softcap": 50.0}),
        "with weights": (arrays(), {"return_weights": True}),
        "with log-sum-exp": (arrays(), {"return_lse": True}),
        "causal, bfloat16": ((*arrays(dtype=jnp.bfloat16), causal), {}),
    }


def _packed() -> masks.Mask:
    return masks.segments(jnp.ones((B, T), jnp.int32))


def _taken(explained: dict[str, Explanation]) -> Iterator[str]:
    """Which backend takes each call; who was asked before it."""
    width = max(map(len, explained))
    for name, found in explained.items():
        before = [f"{who} refused" for who in found.refused]
        before += [f"{who} unsuited" for who in found.unsuited]
        note = f"  ({', '.join(before)})" if before else ""
        yield f"{name:<{width}}  {found.backend or 'none'}{note}"


def _reasons(explained: dict[str, Explanation]) -> Iterator[str]:
    """Each reason once, with the calls that it was given for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, found in explained.items():
        for who, why in (found.refused | found.unsuited).items():
            reasons.setdefault((who, why), []).append(name)
    for (who, why), calls in reasons.items():
        listed = "every call" if len(calls) == len(explained) else "; ".join(calls)
        yield f"{who}: {why}\n    for {listed}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
