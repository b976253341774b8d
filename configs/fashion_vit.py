"""A ViT that tells clothes apart, beside ``fashion_crossvit``: as many parameters, or one branch of it alone.

Arguments: equal, small or large, for patches of 4, 4 or 7 pixels; tiny.
"""

from ml_collections import ConfigDict

from configs import parts

_SHAPES = {
    "equal": dict(dim=128, mlp_dim=256, layers=6, patch_size=4),
    "small": dict(dim=64, mlp_dim=128, layers=2, patch_size=4),
    "large": dict(dim=128, mlp_dim=256, layers=4, patch_size=7),
}


def get_config(arg: str = ""):
    """``equal``, ``small`` or ``large``; tiny."""
    words = parts.words(arg, tuple(_SHAPES))
    shape = _SHAPES[parts.choice(words, tuple(_SHAPES))]
    config = ConfigDict(
        dict(
            task="classification",
            seed=0,
            data=parts.labelled(
                "fashion_mnist", "label", image="image", height=28, width=28, channels=1,
                flip=False, shift=0,
            ),
            model=parts.picture_model("vit", **shape),
            loss=dict(label_smoothing=0.1),
            optim=parts.adamw(learning_rate=1e-3, schedule="cosine", weight_decay=0.05),
            mesh=parts.mesh(),
            train=parts.train(steps=3000, log_every=100, eval_every=500),
            checkpoint=parts.checkpoint(every=500, best_metric="accuracy"),
        )
    )  # fmt: skip
    if "tiny" in words:
        config.data.update(name="shapes", label="shape", height=12, width=12, batch_size=16)
        config.model.update(dim=32, num_heads=2, mlp_dim=64, layers=2, patch_size=4)
        config.optim.warmup_steps = 4
        config.train.update(steps=24, log_every=6, eval_every=0)
        config.checkpoint.every = 12
    return config
