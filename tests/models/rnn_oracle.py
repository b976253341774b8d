"""The recurrent encoder-decoder in float64 numpy, from the papers' equations, one token after the other."""

import jax
import numpy as np

from tests.numpy_model import softmax


def in_float64(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def dense(p, x):
    """A layer with any number of axes out."""
    return np.tensordot(x, p["kernel"], 1) + p.get("bias", 0)


def cell(p, state, x):
    """The next state: [h] of a GRU, which has a bias of the state, or [h, c] of an LSTM."""
    of_x, of_h = dense(p["input"], x), dense(p["state"], state[0])
    if "bias" in p["state"]:
        r, z = sigmoid(of_x[0] + of_h[0]), sigmoid(of_x[1] + of_h[1])
        return np.stack([z * state[0] + (1 - z) * np.tanh(of_x[2] + r * of_h[2])])
    i, f, g, o = of_x + of_h
    c = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
    return np.stack([sigmoid(o) * np.tanh(c), c])


def embed(p, side, tokens, config):
    side = side if side in p else "target_input"
    return p[side]["embedding"]["table"][np.asarray(tokens)] * config.dim**0.5


def encode(p, config, source):
    """The last layer's vectors [S M], and the last states of each layer [P M]."""
    x, parts, last = embed(p, "source_input", source, config), 1 + (config.cell == "lstm"), []
    for layer in numbered(p["encoder"]["layers"]):
        vectors, ends = [], []
        for direction, own in enumerate(numbered(layer)):
            state, found = np.zeros((parts, own["state"]["kernel"].shape[0])), []
            for one in x[::-1] if direction else x:
                state = cell(own, state, one)
                found.append(state[0])
            vectors.append(found[::-1] if direction else found)
            ends.append(state)
        x = np.concatenate(vectors, axis=-1)
        last.append(np.concatenate(ends, axis=-1))
    return x, last


def numbered(parts):
    return [parts[str(i)] for i in range(len(parts))]


def bahdanau(p, s, m):
    energies = [p["score"] @ np.tanh(dense(p["query"], s) + dense(p["key"], h)) for h in m]
    return softmax(np.array(energies))


def luong(p, config, s, m, t):
    """Weights of one step, from equations 7 to 10."""
    if config.score == "dot":
        scores = m @ s
    elif config.score == "general":
        scores = np.array([s @ dense(p["key"], h) for h in m])
    else:
        scores = np.array(
            [p["score"] @ np.tanh(dense(p["query"], s) + dense(p["key"], h)) for h in m]
        )
    if config.scope == "global":
        return softmax(scores)
    places, centre = np.arange(len(m)), t
    if config.scope == "local-p":
        centre = len(m) * sigmoid(p["centre_score"] @ np.tanh(dense(p["centre"], s)))
    near = np.abs(places - centre) <= config.window
    weights = softmax(np.where(near, scores, -np.inf))
    if config.scope == "local-p":
        weights = weights * np.exp(-((places - centre) ** 2) / (2 * (config.window / 2) ** 2))
    return weights


def vectors(p, config, source, target):
    """The vectors before the output layer [T D], and the weights [T S]; everything computed anew."""
    (m, last), q = encode(p, config, source), p["decoder"]
    states = np.tanh(dense(p["bridge"], last[-1][0])) if config.bridge else np.stack(last)
    states, fed, outs, weights = list(states), np.zeros(config.dim), [], []
    for t, x in enumerate(embed(p, "target_input", target, config)):
        read = x
        if config.attention == "bahdanau":
            weights.append(bahdanau(q["attention"], states[-1][0], m))
            read = np.concatenate([x, weights[-1] @ m])
        elif config.attention == "luong" and config.input_feeding:
            read = np.concatenate([x, fed])
        for i, own in enumerate(numbered(q["cells"])):
            states[i] = cell(own, states[i], read)
            read = states[i][0]
        if config.attention == "bahdanau":
            pairs = dense(q["readout"], np.concatenate([read, x, weights[-1] @ m]))
            read = np.maximum(pairs[:, 0], pairs[:, 1])
        elif config.attention == "luong":
            weights.append(luong(q.get("attention"), config, read, m, t))
            fed = read = np.tanh(dense(q["readout"], np.concatenate([weights[-1] @ m, read])))
        outs.append(read)
    return np.stack(outs), np.stack(weights) if weights else None
