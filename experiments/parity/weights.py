"""Random weights that are a function of the tensor's name, so that no file has to keep them."""

import re
import zlib

import numpy as np

EOS = 2
_OUT = r"(encoder_attn\.out_proj|EncDecAttention\.o|crossattention\.(output\.dense|c_proj))"
_DOWN = r"(fc2|DenseReluDense\.wo|mlp\.(c|down)_proj|layer\.\d+\.output\.dense)"
_FACTORS = {
    # Not T5's queries, whose products are not divided by the root of their size.
    r"(q_proj|q_attn|query)\.weight$": 3.0,
    rf"{_OUT}\.weight$": 3.0,
    rf"{_DOWN}\.weight$": 0.3,
    r"bias$": 0.3,
}
_TABLE = r"(shared|embed_tokens|word_embeddings|wte|lm_head|proj_out|predictions\.decoder)\.weight$"
_EOS_FACTOR = 2.0


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns random numbers, scaled so that signals neither vanish nor explode; variances are positive."""
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    # numpy promises that RandomState's numbers never change.
    random = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) > 1 and shape[0] > 1:
        random *= 1.5 / np.sqrt(np.prod(shape[1:]))
    elif name.endswith("weight"):
        random = 1 + 0.2 * random  # a norm
    elif name.endswith("running_var"):
        random = 0.5 + np.abs(random)
    else:
        random *= 0.3  # a bias
    return random.astype(np.float32)


def lively(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Returns weights of a model whose generated texts depend on the source and end at various lengths.

    Seed 0 gives ``weight``, under which rounding grows less from layer to layer. Otherwise attention is
    sharper, cross-attention counts for more, feed-forward layers and biases for less. In tables of tokens
    the row of ``EOS`` is longer than the others, so that its logit varies more.
    """
    if not seed:
        return weight(name, shape)
    tensor = weight(f"{seed} {name}", shape)
    for pattern, factor in _FACTORS.items():
        if re.search(pattern, name):
            tensor *= np.float32(factor)
    if re.search(_TABLE, name):
        tensor[EOS] *= np.float32(_EOS_FACTOR)
    return tensor
