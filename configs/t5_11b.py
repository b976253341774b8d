"""T5 v1.1 XXL, 11.1 B parameters, from text alone.

Source: ``t5_1_1/xxl.gin`` of t5x, the shape of google/t5-v1_1-xxl.
"""

from configs import t5

SHAPE = dict(dim=4096, num_heads=64, mlp_dim=10240, encoder_layers=24, decoder_layers=24)
MESHES = {
    "v5e": dict(mesh=dict(data=-1, fsdp=64, tensor=4, seq=1), train=dict(accumulate=4)),
    "v5p": dict(mesh=dict(data=-1, fsdp=64, tensor=1, seq=1), train=dict(accumulate=2)),
    "h100": dict(mesh=dict(data=1, fsdp=-1, tensor=1, seq=1), train=dict(accumulate=1)),
}
ZOO = {"": 2500}
ZOO_OPTIM = {}  # by Muon, T5 does not learn to read its source


def get_config(arg: str = ""):
    """Arguments: v5e (the default), v5p or h100; span_corruption (the default) or prefix_lm; tiny."""
    return t5.pretraining(arg, SHAPE, MESHES)
