r"""A Flamingo that captions emoji after none, two or four examples.

Arguments: text, the language model alone, without pictures; gated, which begins from its folder and trains
gates, resampler and the encoder of pictures alone; neither, all at once from the start; tiny.

    python -m experiments.train --config=configs/emoji_flamingo.py:text --workdir=runs/text
    python -m experiments.train --config=configs/emoji_flamingo.py:gated --workdir=runs/flamingo \
        --config.init.from=runs/text
"""

from ml_collections.config_dict import placeholder

from configs import parts

_NEW = "gated|resampler|vision"
ZOO = {"": 600}


def get_config(arg: str = ""):
    """``whole``, ``text`` or ``gated``; tiny."""
    words = parts.words(arg, ("whole", "text", "gated"))
    kind = parts.choice(words, ("whole", "text", "gated"))
    text, sections = kind == "text", {}
    model = parts.language_model_of_captions("decoder")
    if not text:
        model = parts.language_model_of_captions(
            "flamingo",
            interval=2,
            image_dim=128,
            image_layers=2,
            image_heads=4,
            patch_size=8,
            image_latents=8,
            resampler_layers=2,
        )
    if kind == "gated":
        # The language model's last step has overfitted; and at the rate of the rest, gates stay at 0.1.
        init = {"from": placeholder(str), "step": "best", "new": _NEW}
        sections = dict(init=init, optim=parts.adamw(train=_NEW, rates=r"\.gate$=10"))
        model["dropout_rate"] = 0.3
    config = parts.captions(model, steps=300 if kind != "whole" else 500, **sections)
    if "tiny" in words:
        small = dict(image_dim=16, image_layers=1, image_heads=2, patch_size=4)
        small |= dict(image_latents=4, resampler_layers=1)
        parts.tiny_captions(config, **({} if text else small))
    return config
