"""Pictures of scenes, drawn from noise by patches that read the caption.

Arguments: ddpm, which says the noise in place of the picture; emoji, of 32 by 32 pixels; tiny.

    python -m experiments.train --config=configs/draw.py --workdir=runs/draw
    python -m experiments.draw --workdir=runs/draw "a red circle" --out=circle.png --plot=growth.png
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import parts

ZOO = {"": 225}


def get_config(arg: str = ""):
    """``ddpm`` or nothing; emoji; tiny."""
    words = parts.words(arg, ("ddpm", "emoji"))
    noise = "ddpm" in words
    config = parts.experiment(
        "text_to_image",
        data=dict(
            name="shapes/scenes",
            data_dir=placeholder(str),
            batch_size=64,
            text_len=20,
            height=16,
            width=16,
        ),
        tokenizer=dict(kind="bpe", vocab_size=400),
        model=parts.picture_model(
            "pixart", dim=96, mlp_dim=288, layers=4, text_layers=1, patch_size=2, dropout_rate=0.0
        ),
        loss=dict(process="ddpm" if noise else "data_flow", unread=0.1),
        # After 250 steps the error of a velocity is 0.15; with AdamW at 1e-3 it is 0.34.
        optim=parts.adamw(
            name="muon", learning_rate=1e-2, schedule="cosine", warmup_steps=50, weight_decay=0.01
        ),
        train=parts.train(steps=6500, ema_decay=0.998, log_every=50, eval_every=650),
        checkpoint=parts.checkpoint(every=650),
        evaluate=dict(
            examples=100,
            guidance=3.0,
            sampler="ancestral",
            steps=25,
            batch_size=100,
        ),
    )
    if "emoji" in words:
        config.data.update(name="emoji/en", text_len=24, height=32, width=32)
        config.tokenizer.vocab_size = 1000
        config.model.update(dim=128, mlp_dim=384, patch_size=4, dropout_rate=0.1)
        config.train.update(steps=2500, eval_every=500)
        config.checkpoint.update(every=500, best_metric="mse", best_mode="min")
        config.evaluate.examples = 0
    return _tiny(config) if "tiny" in words else config


def _tiny(config: ConfigDict) -> ConfigDict:
    config.data.update(name="shapes/scenes", batch_size=32, height=8, width=8)
    config.data.options = dict(size=1500)
    # A patch has fewer numbers than the model's vectors, which have to hold its noise.
    config.model.update(dim=32, num_heads=2, mlp_dim=64, layers=2, patch_size=2)
    config.optim.warmup_steps = 4
    config.train.update(steps=24, ema_decay=None, log_every=6, eval_every=0)
    config.checkpoint.every = 12
    config.evaluate.update(examples=0, steps=4)
    return config
