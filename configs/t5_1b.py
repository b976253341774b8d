"""T5 v1.1 of a billion parameters (1.02 B), from text alone.

T5 v1.1 has 0.78 B (large) and 2.85 B (XL), and none between. This one is as wide as halfway, 1,536, with its
feed-forward network 8/3 of that as in base (2,048 of 768) and heads of 64 as all have; 14 and 14 layers then
come nearest to a billion. All sizes are multiples of 512, and 24 heads divide over 2, 4 and 8 devices.
"""

from configs import t5

SHAPE = dict(dim=1536, num_heads=24, mlp_dim=4096, encoder_layers=14, decoder_layers=14)
MESHES = {
    "v5e": dict(mesh=dict(data=-1, fsdp=16, tensor=1, seq=1), train=dict(accumulate=4)),
    "v5p": dict(mesh=dict(data=-1, fsdp=16, tensor=1, seq=1), train=dict(accumulate=1)),
    "h100": dict(mesh=dict(data=-1, fsdp=8, tensor=1, seq=1), train=dict(accumulate=1)),
}
ZOO = {"span_corruption": 2500, "prefix_lm": 1500}
ZOO_OPTIM = {}  # by Muon, T5 does not learn to read its source


def get_config(arg: str = ""):
    """Arguments: v5e (the default), v5p or h100; span_corruption (the default) or prefix_lm; tiny."""
    return t5.pretraining(arg, SHAPE, MESHES)
