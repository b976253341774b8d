"""Layers and models in float64 numpy, from the same dicts of parameters: the oracle of nn, models.

Written from the papers' equations with loops over heads and no code of the library, so that the two
can only agree by being right. Inputs have one batch axis: x [B, T, D], allowed [B, T, S].
"""

import numpy as np

from crossattn.testing.architectures import random_params  # noqa: F401  the tests take it from here


def softmax(logits):
    """Over the last axis; a row of -inf gives 0."""
    peak = logits.max(-1, keepdims=True)
    exponentials = np.exp(logits - np.where(np.isfinite(peak), peak, 0))
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / np.where(total == 0, 1, total)


def layer_norm(p, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def rms_norm(p, x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]


def norm(p, x):
    return layer_norm(p, x) if "bias" in p else rms_norm(p, x)


def rotate(x, positions, base=10000.0):
    """x [B, T, H] turned by its positions, feature i paired with i + H/2, as complex numbers."""
    half = x.shape[-1] // 2
    turns = np.exp(1j * positions[..., None] * base ** (-np.arange(half) / half))
    turned = (x[..., :half] + 1j * x[..., half:]) * turns
    return np.concatenate([turned.real, turned.imag], -1)


def attention(p, x, memory=None, allowed=None, *, bias=None, rope=None, softcap=None):
    """Output [B, T, D] and weights [B, N, T, S], one head at a time.

    ``rope`` is None or (query positions [T], key positions [S]). Persistent vectors stand after the memory,
    without mask, bias and rotation.
    """
    memory = x if memory is None else memory
    N, K = p["query"]["kernel"].shape[1], p["key"]["kernel"].shape[1]
    out, weights = 0.0, []
    for n in range(N):
        q = _head(p, "query", x, n)
        k = _head(p, "key", memory, n * K // N)
        v = _head(p, "value", memory, n * K // N)
        unrotated = q
        if rope is not None:
            q, k = rotate(q, rope[0]), rotate(k, rope[1])
        logits = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        if bias is not None:
            logits = logits + bias[..., n, :, :]
        if allowed is not None:
            logits = np.where(allowed, logits, -np.inf)
        if "persistent" in p:
            own = {name: x[:, n * K // N].astype(np.float64) for name, x in p["persistent"].items()}
            keys, values = (
                own["keys"] * k.shape[-1] ** 0.5,
                own["values"] * len(own["values"]) ** 0.5,
            )
            more = unrotated @ keys.T / np.sqrt(q.shape[-1])
            more = more if softcap is None else softcap * np.tanh(more / softcap)
            logits = np.concatenate([logits, more], -1)
            v = np.concatenate([v, np.broadcast_to(values, (*v.shape[:-2], *values.shape))], -2)
        weights.append(softmax(logits))
        out = out + weights[-1] @ v @ p["out"]["kernel"][n].astype(np.float64)
    return out + p["out"].get("bias", 0), np.stack(weights, axis=-3)


def _head(p, name, x, head):
    projected = x @ p[name]["kernel"][:, head].astype(np.float64)
    if "bias" in p[name]:
        projected = projected + p[name]["bias"][head]
    if name + "_norm" in p:
        projected = rms_norm(p[name + "_norm"], projected)
    return projected


_sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "silu": lambda x: x * _sigmoid(x),
}
GATES = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}


def feedforward(p, x, activation="relu"):
    hidden = _dense(p["up"], x)
    if activation in GATES:
        hidden = hidden * ACTIVATIONS[GATES[activation]](_dense(p["gate"], x))
    else:
        hidden = ACTIVATIONS[activation](hidden)
    return _dense(p["down"], hidden)


def _dense(p, x):
    return x @ p["kernel"].astype(np.float64) + p.get("bias", 0)


def residual(p, x, sublayer, norm_first):
    """Pre-norm x + f(norm(x)), or post-norm norm(x + f(x))."""
    if norm_first:
        return x + sublayer(norm(p["norm"], x))
    return norm(p["norm"], x + sublayer(x))


def block(
    p, x, *, memory=None, allowed=None, source_allowed=None, first=True, act="relu", rope=None
):
    """An encoder block, or, with "cross" among its parameters, a decoder block on ``memory``."""
    turn = None if rope is None else (rope, rope)
    attend = lambda y: attention(p["attention"], y, allowed=allowed, rope=turn)[0]  # noqa: E731
    x = residual(p["attention_residual"], x, attend, first)
    if "cross" in p:
        read = lambda y: attention(p["cross"], y, memory, source_allowed)[0]  # noqa: E731
        x = residual(p["cross_residual"], x, read, first)
    if "feedforward" not in p:
        return x
    return residual(
        p["feedforward_residual"], x, lambda y: feedforward(p["feedforward"], y, act), first
    )


def sinusoids(positions, dim):
    angles = positions[:, None] / 10000 ** (np.arange(dim // 2) / (dim // 2))
    return np.concatenate([np.sin(angles), np.cos(angles)], -1)


def embed(p, tokens, positions):
    table = p["embedding"]["table"].astype(np.float64)
    x = table[tokens] * np.sqrt(table.shape[1])
    if positions == "sinusoidal":
        x = x + sinusoids(np.arange(tokens.shape[1]), table.shape[1])
    if positions == "learned":
        x = x + p["learned"]["table"][: tokens.shape[1]]
    return x


def _layers(p, x, **options):
    for i in range(len(p["layers"])):
        x = block(p["layers"][str(i)], x, **options)
    return x


def _logits(p, x, tied):
    table = p["output"]["table"] if "output" in p else tied["embedding"]["table"]
    return x @ table.T.astype(np.float64)


def transformer(p, source, target_in, source_valid, *, positions="sinusoidal", **options):
    """Logits [B, T, V] of an encoder-decoder for unpacked rows; ``source_valid`` [B, S] bool."""
    S, T = source.shape[1], target_in.shape[1]
    rope = np.arange if positions == "rope" else lambda n: None
    may_read = source_valid[:, None, :]
    x = embed(p.get("source_input", p["target_input"]), source, positions)
    x = _layers(p["encoder"], x, allowed=may_read, rope=rope(S), **options)
    memory = norm(p["encoder_norm"], x) if "encoder_norm" in p else x
    x = embed(p["target_input"], target_in, positions)
    x = _layers(
        p["decoder"]["stack"],
        x,
        memory=memory,
        allowed=np.tri(T, dtype=bool),
        source_allowed=may_read,
        rope=rope(T),
        **options,
    )
    x = norm(p["decoder"]["norm"], x) if "norm" in p["decoder"] else x
    return _logits(p, x, p["target_input"])


def decoder(p, tokens, *, positions="learned", **options):
    """Logits [B, T, V] of a decoder-only model."""
    T = tokens.shape[1]
    rope = np.arange(T) if positions == "rope" else None
    x = embed(p["input"], tokens, positions)
    x = _layers(p["decoder"]["stack"], x, allowed=np.tri(T, dtype=bool), rope=rope, **options)
    x = norm(p["decoder"]["norm"], x) if "norm" in p["decoder"] else x
    return _logits(p, x, p["input"])
