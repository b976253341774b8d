"""A LLaVA that captions emoji after none, two or four examples: what the Flamingo has, but for how it reads.

Arguments: whole; tiny. Its language model alone is ``emoji_flamingo.py:text``.

    python -m experiments.train --config=configs/emoji_llava.py --workdir=runs/llava
"""

from configs import parts


def get_config(arg: str = ""):
    """``whole``; tiny."""
    words = parts.words(arg, ("whole",))
    model = parts.language_model_of_captions(
        "llava", image_dim=128, image_layers=2, image_heads=4, patch_size=8
    )
    config = parts.captions(model, steps=500)
    if "tiny" in words:
        parts.tiny_captions(config, image_dim=16, image_layers=1, image_heads=2, patch_size=4)
    return config
