"""A RETRO in float64 numpy, by loops over rows, tokens and passages, from the equations alone."""

import jax
import numpy as np

from crossattn.ops.positions.bias import relative_buckets
from tests import numpy_model as oracle


def logits(params, tokens, found, *, chunk, embed, table, act):
    """Returns logits [B T V].

    Args:
      params: of the encoder of passages and of the decoder.
      tokens: [B T].
      found: passages [B C K R] of each chunk; 0 is padding.
      chunk: tokens of a chunk.
      embed: vectors [B T D] of tokens [B T].
      table: of the output, [V D].
      act: the activation of feed-forward networks.
    """
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    y, causal = embed(tokens), np.tri(tokens.shape[1], dtype=bool)[None]
    for _, layer in sorted(p["decoder"]["stack"]["layers"].items()):
        attend = lambda x, q=layer: oracle.attention(q["attention"], x, allowed=causal)[0]  # noqa: E731
        y = oracle.residual(layer["attention_residual"], y, attend, True)
        if "chunked" in layer:
            normed = oracle.norm(layer["chunked_residual"]["norm"], y)
            y = y + _read(p, layer["chunked"], normed, tokens, found, chunk, embed, act)
        network = lambda x, q=layer: oracle.feedforward(q["feedforward"], x, act)  # noqa: E731
        y = oracle.residual(layer["feedforward_residual"], y, network, True)
    return oracle.norm(p["decoder"]["norm"], y) @ table.T.astype(np.float64)


def _read(p, chunked, y, tokens, found, m, embed, act):
    out, (_, C, K, R) = np.zeros_like(y), found.shape
    for row, t in np.ndindex(tokens.shape):
        u = (t + 1) // m - 1
        if not 0 <= u < C or not found[row, u].any():
            continue
        own, parts = embed(tokens[row, None, u * m : (u + 1) * m]), []
        for passage in found[row, u]:
            e, real = embed(passage[None]), (passage > 0)[None, None]
            e = oracle.block(p["encoder"]["layers"]["0"], e, memory=own, allowed=real, act=act)
            parts.append(oracle.norm(p["encoder_norm"], e) if "encoder_norm" in p else e)
        memory, valid = np.concatenate(parts, 1), (found[row, u] > 0).reshape(1, 1, -1)
        places = np.array([(t + 1) % m]), np.tile(np.arange(R), K)
        buckets = np.asarray(relative_buckets(*places, 32, 128, True))
        bias = np.moveaxis(chunked["relative"]["table"][buckets], -1, 0)[None]
        query = y[row, None, t, None]
        read = oracle.attention(chunked["attention"], query, memory, valid, bias=bias)[0]
        out[row, t] = read[0, 0]
    return out
