r"""A Flamingo that captions emoji after none, two or four examples, all in one language that it is not told.

Arguments: text, the language model alone, without pictures; gated, which begins from the folders of a
language model and of a captioner and trains gated layers and the resampler alone; neither, all at once from
the start; tiny.

    python -m experiments.train --config=configs/emoji_captions.py:patches --workdir=runs/captions
    python -m experiments.train --config=configs/emoji_flamingo.py:text --workdir=runs/text
    python -m experiments.train --config=configs/emoji_flamingo.py:gated --workdir=runs/flamingo \
        --config.init.from=runs/text,runs/captions
"""

from configs import parts

_NEW = "gated|resampler"
ZOO = {"": 240}


def get_config(arg: str = ""):
    """``whole``, ``text`` or ``gated``; tiny."""
    words = parts.words(arg, ("whole", "text", "gated"))
    kind = parts.choice(words, ("whole", "text", "gated"))
    model, sections = parts.language_model_of_captions("decoder"), {}
    steps, every = {"whole": (600, 100), "text": (1500, 500), "gated": (600, 300)}[kind]
    if kind == "text":
        sections = dict(optim=parts.adamw(learning_rate=4e-3))
    else:
        resampler = dict(interval=1, image_latents=8, resampler_layers=2)
        model = parts.language_model_of_captions("flamingo", **parts.READS_PATCHES, **resampler)
        # At the rate of the rest, gates stay at 0.1.
        sections = dict(optim=parts.adamw(rates=r"\.gate$=10"))
    if kind == "gated":
        sections["optim"].update(train=_NEW, warmup_steps=50)
        sections["init"] = parts.language_and_pictures(_NEW)
    config = parts.captions(model, steps=steps, every=every, **sections)
    return parts.tiny_captions(config) if "tiny" in words else config
