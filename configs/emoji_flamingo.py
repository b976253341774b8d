"""A Flamingo that captions emoji after none, two or four examples; its language model is trained first.

Arguments: text, the language model alone; tiny. The second run begins from the first one's folder:

    python -m experiments.train --config=configs/emoji_flamingo.py:text --workdir=runs/text
    python -m experiments.train --config=configs/emoji_flamingo.py --workdir=runs/flamingo \\
        --config.init.from=runs/text
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import parts

_NEW = "gated|resampler|vision"


def get_config(arg: str = ""):
    """``flamingo`` or ``text``; tiny."""
    words = parts.words(arg, ("flamingo", "text"))
    text = parts.choice(words, ("flamingo", "text")) == "text"
    shape = dict(layers=4, activation="gelu", dim=128, mlp_dim=512)
    reading = dict(
        interval=2,
        image_dim=128,
        image_layers=2,
        image_heads=4,
        patch_size=8,
        image_latents=8,
        resampler_layers=2,
    )
    init = {"from": placeholder(str), "new": _NEW}
    config = ConfigDict(
        dict(
            task="interleaved",
            seed=0,
            data=dict(
                name="emoji/en",
                data_dir=placeholder(str),
                batch_size=16,
                examples=5,
                text_len=16,
                height=32,
                width=32,
            ),
            tokenizer=dict(kind="bpe", vocab_size=1000),
            model=parts.model("decoder", **shape)
            if text
            else parts.model("flamingo", **shape, **reading),
            **({} if text else dict(init=init)),
            loss=parts.cross_entropy(),
            optim=parts.adamw() if text else parts.adamw(train=_NEW),
            mesh=parts.mesh(),
            train=parts.train(steps=600 if text else 1500, eval_every=100),
            checkpoint=parts.checkpoint(every=100, best_metric="nll", best_mode="min"),
        )
    )
    if "tiny" in words:
        config.data.update(name="shapes", batch_size=8, examples=3, height=8, width=8)
        config.tokenizer.vocab_size = 300
        config.model.update(dim=32, num_heads=2, mlp_dim=64, layers=2)
        if not text:
            config.model.update(image_dim=16, image_layers=1, image_heads=2, patch_size=4)
            config.model.update(image_latents=4, resampler_layers=1)
        config.optim.warmup_steps = 4
        config.train.update(steps=16, log_every=4, eval_every=0)
        config.checkpoint.every = 8
    return config
