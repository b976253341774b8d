"""A CrossViT that tells clothes apart, by patches of 4 and of 7 pixels. Argument: tiny."""

from configs import parts

ZOO = {"": 1000}


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = parts.words(arg)
    config = parts.clothes(
        parts.picture_model(
            "crossvit",
            large_dim=128,
            large_heads=4,
            large_mlp_dim=256,
            stages=2,
            small_patch=4,
            large_patch=7,
            small_layers=1,
            large_layers=2,
        ),
        flip=False,
        shift=0,
    )
    if "tiny" in words:
        parts.tiny_pictures(
            config,
            dim=16,
            num_heads=2,
            mlp_dim=32,
            small_patch=3,
            large_patch=6,
            large_dim=24,
            large_heads=2,
            large_mlp_dim=48,
            large_layers=1,
        )
    return config
