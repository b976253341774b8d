"""Results of timm's CrossViT in one small file: ``python -m tests.weights.golden.make_crossvit``.

Its weights are random by their names and are not kept. Needs timm and torchvision.
"""

import json
from pathlib import Path

import numpy as np

from experiments.parity.weights import weight

FILE = Path(__file__).with_name("crossvit.npz")
SMALL = dict(
    architecture="crossvit_9_240",
    num_classes=5,
    model_args=dict(
        img_size=[30, 45], img_scale=[1.0, 0.8], patch_size=[5, 6], embed_dim=[12, 20], in_chans=3,
        depth=[[1, 2, 0], [1, 2, 0]], num_heads=[2, 5], mlp_ratio=[3, 2, 1],
    ),
)  # fmt: skip


def image(config: dict) -> np.ndarray:
    """Returns two random pictures, [2 H W C]."""
    height, width = config["model_args"]["img_size"]
    random = np.random.RandomState(0).standard_normal((2, height, width, 3))
    return random.astype(np.float32)


def measure(config: dict) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns tensors of a model of timm, its logits and what its class tokens read at the last exchange."""
    import torch
    from timm.models import crossvit

    model = crossvit.CrossVit(num_classes=config["num_classes"], **config["model_args"]).eval()
    tensors = {name: weight(name, tuple(x.shape)) for name, x in model.state_dict().items()}
    model.load_state_dict({name: torch.from_numpy(x) for name, x in tensors.items()})
    fused = {}
    for branch, fusion in enumerate(model.blocks[-1].fusion):
        fusion.attn.attn_drop.register_forward_hook(
            lambda _, given, out, branch=branch: fused.update({branch: given[0]})
        )
    with torch.no_grad():
        logits = model(torch.from_numpy(image(config).transpose(0, 3, 1, 2)))
    found = {"logits": logits} | {f"read by {branch}": x for branch, x in fused.items()}
    return tensors, {name: x.numpy() for name, x in found.items()}


if __name__ == "__main__":
    tensors, found = measure(SMALL)
    shapes = json.dumps({name: x.shape for name, x in tensors.items()})
    np.savez_compressed(FILE, config=json.dumps(SMALL), shapes=shapes, **found)
    print(f"{FILE}: {FILE.stat().st_size} bytes")
