"""A CrossViT that tells clothes apart, by patches of 7 and of 14 pixels.

Arguments: apart, for two branches that read nothing of each other; tiny.
"""

from configs import parts

ZOO = {"": 1250}


def get_config(arg: str = ""):
    """``apart`` or nothing; tiny."""
    words = parts.words(arg, ("apart",))
    config = parts.clothes(
        parts.picture_model(
            "crossvit",
            dim=96,
            mlp_dim=192,
            dropout_rate=0.0,
            large_dim=128,
            large_heads=4,
            large_mlp_dim=256,
            stages=2,
            small_patch=7,
            large_patch=14,
            small_layers=2,
            large_layers=1,
            exchange="apart" not in words,
        ),
    )
    if "tiny" in words:
        parts.tiny_pictures(
            config,
            dim=16,
            num_heads=2,
            mlp_dim=32,
            small_patch=3,
            large_patch=6,
            small_layers=1,
            large_dim=24,
            large_heads=2,
            large_mlp_dim=48,
        )
    return config
