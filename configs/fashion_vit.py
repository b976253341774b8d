"""A ViT that tells clothes apart, beside ``fashion_crossvit``: as many parameters, or one branch of it alone.

Arguments: equal, small or large, for patches of 4, 4 or 7 pixels; tiny.
"""

from configs import parts

_SHAPES = {
    "equal": dict(dim=128, mlp_dim=256, layers=6, patch_size=4),
    "small": dict(dim=64, mlp_dim=128, layers=2, patch_size=4),
    "large": dict(dim=128, mlp_dim=256, layers=4, patch_size=7),
}
ZOO = {"equal": 2000}


def get_config(arg: str = ""):
    """``equal``, ``small`` or ``large``; tiny."""
    words = parts.words(arg, tuple(_SHAPES))
    shape = _SHAPES[parts.choice(words, tuple(_SHAPES))]
    config = parts.clothes(parts.picture_model("vit", **shape), flip=False, shift=0)
    if "tiny" in words:
        parts.tiny_pictures(config, dim=32, num_heads=2, mlp_dim=64, layers=2, patch_size=4)
    return config
