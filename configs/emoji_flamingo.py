r"""A Flamingo that captions emoji after none, two or four examples.

Arguments: text, the language model alone, without pictures; gated, which begins from its folder and trains
gates, resampler and the encoder of pictures alone; neither, all at once from the start; tiny.

    python -m experiments.train --config=configs/emoji_flamingo.py:text --workdir=runs/text
    python -m experiments.train --config=configs/emoji_flamingo.py:gated --workdir=runs/flamingo \
        --config.init.from=runs/text
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import parts

_NEW = "gated|resampler|vision"


def get_config(arg: str = ""):
    """``whole``, ``text`` or ``gated``; tiny."""
    words = parts.words(arg, ("whole", "text", "gated"))
    kind = parts.choice(words, ("whole", "text", "gated"))
    text, gated = kind == "text", kind == "gated"
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
            **(dict(init=init) if gated else {}),
            loss=parts.cross_entropy(),
            optim=parts.adamw(**(dict(train=_NEW) if gated else {})),
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
