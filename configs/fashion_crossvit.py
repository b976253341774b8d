"""A CrossViT that tells clothes apart, by patches of 4 and of 7 pixels. Argument: tiny."""

from ml_collections import ConfigDict

from configs import parts


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = parts.words(arg)
    config = ConfigDict(
        dict(
            task="classification",
            seed=0,
            data=parts.labelled(
                "fashion_mnist", "label", image="image", height=28, width=28, channels=1,
                flip=False, shift=0,
            ),
            model=parts.picture_model(
                "crossvit", large_dim=128, large_heads=4, large_mlp_dim=256, stages=2,
                small_patch=4, large_patch=7, small_layers=1, large_layers=2,
            ),
            loss=dict(label_smoothing=0.1),
            optim=parts.adamw(learning_rate=1e-3, schedule="cosine", weight_decay=0.05),
            mesh=parts.mesh(),
            train=parts.train(steps=3000, log_every=100, eval_every=500),
            checkpoint=parts.checkpoint(every=500, best_metric="accuracy"),
        )
    )  # fmt: skip
    if "tiny" in words:
        config.data.update(name="shapes", label="shape", height=12, width=12, batch_size=16)
        config.model.update(dim=16, num_heads=2, mlp_dim=32, small_patch=3, large_patch=6)
        config.model.update(large_dim=24, large_heads=2, large_mlp_dim=48, large_layers=1)
        config.optim.warmup_steps = 4
        config.train.update(steps=24, log_every=6, eval_every=0)
        config.checkpoint.every = 12
    return config
