"""``python -m crossattn doctor``: versions, devices, extras, and the backend of each call on this machine.

``python -m crossattn build`` compiles the CPU kernel ahead of its first use.
"""

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import crossattn
from crossattn.ops import backends, masks
from crossattn.ops.explain import Explanation, explain

USAGE = """usage: python -m crossattn doctor | build

doctor   prints versions, devices, extras, the compiled kernel, and the backend of each call, and why
build    compiles the CPU kernel, which the first call of attend would do, and prints its path"""
EXTRAS = {
    "train": "training, evaluation, text data",
    "viz": "pictures of attention",
    "weights": "checkpoints of transformers from a folder",
    "sentencepiece": "tokenizers that are SentencePiece models",
    "hub": "checkpoints by their names on the Hugging Face hub",
    "speech": "recordings, Whisper",
    "images": "sources of images",
    "captions": "CIDEr of captions",
    "summaries": "ROUGE of summaries",
    "pages": "pages of the help, laid out",
    "stamps": "pictures, words and voices of stamps",
    "retrieval": "search of neighbours by faiss",
    "wandb": "logs to Weights & Biases",
    "gcs": "runs in gs://",
    "tokamax": "the tokamax kernels",
    "tpu": "TPUs",
    "cuda12": "NVIDIA GPUs, CUDA 12",
    "cuda13": "NVIDIA GPUs, CUDA 13",
    "plan-tpu": "plans for TPUs that are not here",
    "plan-gpu": "plans for GPUs that are not here",
    "notebooks": "running the notebooks",
    "baselines": "baselines of tasks, by scikit-learn",
    "bench": "comparisons with PyTorch and transformers",
    "docs": "building the documentation",
    "test": "the test suite",
    "dev": "the test suite, linters, types",
}
"""The purpose of each extra of the package."""

B, T, N, H = 8, 1024, 8, 64


def main(arguments: list[str]) -> int:
    """Runs a command; the exit code is 2 for an unknown command, 1 if the kernel cannot be built."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    if arguments == ["build"]:
        return build()
    if arguments != ["doctor"]:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        for line in doctor():
            print(line, flush=True)
    except BrokenPipeError:  # the reader, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def build() -> int:
    """Compiles the kernel for this processor, without loading it."""
    from crossattn.ops.native import build as native

    try:
        print(native.library())
    except native.Unavailable as reason:
        print(f"the kernel cannot be compiled: {reason}", file=sys.stderr)
        return 1
    return 0


def doctor() -> Iterator[str]:
    """Makes the lines of the report."""
    names = ("jax", "jaxlib", "flax", "jaxtyping", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    yield f"crossattn {crossattn.__version__}; Python {platform.python_version()}, {versions}"
    kinds = [device.device_kind for device in jax.devices()]
    counted = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    yield f"platform {jax.default_backend()}: {counted}; {os.cpu_count()} CPU cores"
    yield f"compiled kernel: {_compiled_kernel()}"
    yield ""
    yield from _extras()
    yield ""
    order = ", ".join(backends.ordered(jax.default_backend()))
    by_name = [n for n in backends.names() if n not in backends.ordered(jax.default_backend())]
    yield f"backends tried here, in this order: {order}; by name only: {', '.join(by_name) or 'none'}"
    sizes = f"[B T N H] = [{B} {T} {N} {H}] in {_dtypes()[0]}"
    yield f"queries, keys and values are {sizes} unless a call says otherwise"
    explained = {name: explain(*call, **options) for name, (call, options) in _calls().items()}
    yield ""
    yield from _taken(explained)
    yield ""
    yield from _reasons(explained)


def _extras() -> Iterator[str]:
    """Lists the installed extras, and the purpose and the missing packages of the others."""
    try:
        requirements = importlib.metadata.requires("crossattn") or []
    except importlib.metadata.PackageNotFoundError:
        yield "crossattn is imported from a folder, not installed: its extras are not known"
        return
    lacking = {extra: _lacking(extra, requirements) for extra in EXTRAS}
    yield f"extras installed: {', '.join(e for e in EXTRAS if not lacking[e]) or 'none'}"
    yield "not installed (pip install 'crossattn[NAME]'; in a clone pip install -e '.[NAME]'):"
    width = max(map(len, EXTRAS))
    for extra, packages in lacking.items():
        if packages:
            more = f" and {len(packages) - 4} more" if len(packages) > 4 else ""
            listed = ", ".join(packages[:4]) + more
            yield f"  {extra:<{width}}  {EXTRAS[extra]}; lacks {listed}"


def _lacking(extra: str, requirements: list[str]) -> list[str]:
    """Returns the missing packages of an extra, and of the extras that it contains."""
    missing: dict[str, None] = {}
    for requirement in requirements:
        wanted, _, condition = requirement.partition(";")
        if not re.search(rf"extra == ['\"]{extra}['\"]", condition):
            continue
        name, _, inner = wanted.partition("[")
        name = re.split(r"[\s<>=!~]", name)[0]
        if name == "crossattn":
            for each in inner.partition("]")[0].split(","):
                missing |= dict.fromkeys(_lacking(each, requirements))
        elif not all(map(_is_installed, [name, *_PLUGINS.get(extra, ())])):
            missing[wanted.strip()] = None
    return list(missing)


# Packages of JAX's own extras.
_PLUGINS = {"tpu": ["libtpu"], "cuda12": ["jax-cuda12-plugin"], "cuda13": ["jax-cuda13-plugin"]}


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _compiled_kernel() -> str:
    from crossattn.ops import native

    try:
        native.load()
    except NotImplementedError as refusal:
        return f"not available: {refusal}"
    return "built and loaded"


def _dtypes() -> tuple[str, str]:
    """Returns the dtype that kernels of this platform are made for, and another."""
    return ("float32", "bfloat16") if jax.default_backend() == "cpu" else ("bfloat16", "float32")


def _calls() -> dict[str, tuple[tuple, dict]]:
    """Returns typical calls by name."""
    usual, other = _dtypes()

    def arrays(length=T, dtype=usual, keys=None):
        q = jax.ShapeDtypeStruct((B, length, N, H), dtype)
        k = jax.ShapeDtypeStruct((B, keys or length, N, H), dtype)
        return q, k, k

    causal = masks.causal()
    padded = masks.lengths(jnp.full((B,), T // 2))
    packed = masks.segments(jnp.ones((B, T), jnp.int32))
    bias = jax.ShapeDtypeStruct((1, N, T, T), jnp.float32)
    dropout = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}
    return {
        "self": (arrays(), {}),
        "causal": ((*arrays(), causal), {}),
        "padded": ((*arrays(), padded), {}),
        "window of 128, causal": ((*arrays(), masks.window(128)), {}),
        "packed (segments), causal": ((*arrays(), packed & causal), {}),
        f"cross, {T // 2} keys": (arrays(keys=T // 2), {}),
        "one cached decoding step": ((*arrays(1, keys=T), padded), {}),
        "short: 64 queries and keys": (arrays(64), {}),
        "causal, with a bias": ((*arrays(), causal), {"bias": bias}),
        "causal, with dropout": ((*arrays(), causal), dropout),
        "causal, with softcap": ((*arrays(), causal), {"softcap": 50.0}),
        "with weights": (arrays(), {"return_weights": True}),
        "with log-sum-exp": (arrays(), {"return_lse": True}),
        f"causal, {other}": ((*arrays(dtype=other), causal), {}),
    }


def _taken(explained: dict[str, Explanation]) -> Iterator[str]:
    """Lists the backend of each call, after the backends that refused it or do not suit it."""
    width = max(map(len, explained))
    for name, explanation in explained.items():
        before = [f"{who} refused" for who in explanation.refused]
        before += [f"{who} unsuited" for who in explanation.unsuited]
        note = f"  ({', '.join(before)})" if before else ""
        yield f"{name:<{width}}  {explanation.backend or 'none'}{note}"


def _reasons(explained: dict[str, Explanation]) -> Iterator[str]:
    """Lists each reason once, with its calls."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, explanation in explained.items():
        for who, why in (explanation.refused | explanation.unsuited).items():
            reasons.setdefault((who, why), []).append(name)
    for (who, why), calls in reasons.items():
        listed = "every call" if len(calls) == len(explained) else "; ".join(calls)
        yield f"{who}: {why}\n    for {listed}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
