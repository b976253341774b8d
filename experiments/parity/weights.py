"""Random weights that are not kept anywhere: a tensor's name says what is in it, whoever asks."""

import re
import zlib

import numpy as np

EOS = 2
_OUT = r"(encoder_attn\.out_proj|EncDecAttention\.o|crossattention\.(output\.dense|c_proj))"
_DOWN = r"(fc2|DenseReluDense\.wo|mlp\.(c|down)_proj|layer\.\d+\.output\.dense)"
_FACTORS = {
    # T5's queries are left out: its attention does not divide by the root of their size.
    r"(q_proj|q_attn|query)\.weight$": 3.0,
    rf"{_OUT}\.weight$": 3.0,
    rf"{_DOWN}\.weight$": 0.3,
    r"bias$": 0.3,
}
_TABLE = r"(shared|embed_tokens|word_embeddings|wte|lm_head|proj_out|predictions\.decoder)\.weight$"
_EOS_FACTOR = 2.0


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers, of a size that keeps signals alive."""
    # RandomState's numbers are promised never to change.
    random = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) > 1 and shape[0] > 1:
        random *= 1.5 / np.sqrt(np.prod(shape[1:]))
    elif name.endswith("weight"):
        random = 1 + 0.2 * random  # a norm
    else:
        random *= 0.3  # a bias
    return random.astype(np.float32)


def lively(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """The same for a model that generates: what it writes depends on what it reads, and comes to an end.

    With seed 0 it need not, and this is ``weight``, under which rounding grows less from layer to layer.

    Attention picks more than it averages, cross-attention has more to say, and what says the same to all
    texts (feed-forward layers, biases) has less. In tables of tokens the row of ``EOS`` is longer than the
    others: its logit goes further up and down than theirs, so that some texts end soon and some late.
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
