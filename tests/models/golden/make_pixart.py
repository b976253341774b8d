"""What blocks of ``diffusers``' PixArt compute, a small file: ``python -m tests.models.golden.make_pixart``.

Their weights are random by their names and are not kept. Needs torch and diffusers.
"""

import json
from pathlib import Path

import numpy as np

from experiments.parity.weights import weight

FILE = Path(__file__).with_name("pixart.npz")
DIM, HEADS = 24, 4
SMALL = dict(
    num_attention_heads=HEADS, attention_head_dim=DIM // HEADS, in_channels=3, out_channels=3, num_layers=2,
    cross_attention_dim=DIM, sample_size=8, patch_size=2, use_additional_conditions=False,
)  # fmt: skip


def inputs() -> dict[str, np.ndarray]:
    """Returns two noisy pictures, their times, and words of unlike lengths."""
    random = np.random.RandomState(0)
    return dict(
        image=random.standard_normal((2, 3, 8, 8)).astype(np.float32),
        time=np.array([20, 700]),
        words=random.standard_normal((2, 5, DIM)).astype(np.float32),
        valid=np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    )


def measure() -> tuple[dict[str, tuple[int, ...]], dict[str, np.ndarray]]:
    """Returns the shapes of their tensors; patches and condition, which enter the blocks, and what leaves."""
    import torch
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(**SMALL).eval()
    own = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    model.load_state_dict({name: torch.from_numpy(weight(name, x)) for name, x in own.items()})
    given, found = {name: torch.from_numpy(x) for name, x in inputs().items()}, {}
    blocks = model.transformer_blocks
    blocks[0].register_forward_pre_hook(lambda _, x: found.update(patches=x[0]))
    blocks[-1].register_forward_hook(lambda _, x, out: found.update(out=out))
    model.adaln_single.silu.register_forward_hook(lambda _, x, out: found.update(condition=out))
    with torch.no_grad():
        model(given["image"], given["words"], given["time"], encoder_attention_mask=given["valid"])
    own = {
        name: x
        for name, x in own.items()
        if name.startswith(("transformer", "adaln_single.linear"))
    }
    return own, {name: x.numpy() for name, x in found.items()}


if __name__ == "__main__":
    shapes, found = measure()
    np.savez_compressed(FILE, shapes=json.dumps(shapes), **found)
    print(f"{FILE}: {FILE.stat().st_size} bytes")
    print({name: x.shape for name, x in found.items()})
