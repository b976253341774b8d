"""A Perceiver IO that tells clothes apart from 784 raw pixels: no convolution, no patches. Argument: tiny."""

from configs import parts

ZOO = {"": 4000}


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = parts.words(arg)
    config = parts.experiment(
        "classification",
        data=parts.labelled(
            "fashion_mnist", "label", image="image", height=28, width=28, channels=1
        ),
        model=parts.perceiver(latents=16),
        loss=dict(label_smoothing=0.0),
        optim=parts.adamw(schedule="cosine", weight_decay=0.05),
        train=parts.train(steps=8000, log_every=100, eval_every=1000),
        checkpoint=parts.checkpoint(every=1000, best_metric="accuracy"),
    )
    if "tiny" in words:
        parts.tiny_pictures(config, dim=32, num_heads=2, mlp_dim=64, latents=8, repeats=2)
    return config
