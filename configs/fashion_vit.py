"""A ViT that tells clothes apart, with the FLOPs of ``fashion_crossvit``. Argument: tiny."""

from configs import parts

ZOO = {"": 2200}


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = parts.words(arg)
    config = parts.clothes(
        parts.picture_model("vit", dim=96, mlp_dim=192, dropout_rate=0.0, layers=6, patch_size=7),
    )
    if "tiny" in words:
        parts.tiny_pictures(
            config, dim=32, num_heads=2, mlp_dim=64, dropout_rate=0.1, layers=2, patch_size=4
        )
    return config
