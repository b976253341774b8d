r"""A LLaVA that captions emoji after none, two or four examples: what the Flamingo has, but for how it reads.

Arguments: projector, stage one of Liu et al. 2023, which begins from the folders of a language model and of a
captioner and trains the projector alone; tuned, stage two, which goes on from stage one and trains projector
and language model; neither, all at once from the start; tiny.

    python -m experiments.train --config=configs/emoji_llava.py:projector --workdir=runs/projector \
        --config.init.from=runs/text,runs/captions
    python -m experiments.train --config=configs/emoji_llava.py:tuned --workdir=runs/llava \
        --config.init.from=runs/projector
"""

from ml_collections.config_dict import placeholder

from configs import parts

ZOO = {"": 300}


def get_config(arg: str = ""):
    """``whole``, ``projector`` or ``tuned``; tiny."""
    words = parts.words(arg, ("whole", "projector", "tuned"))
    kind = parts.choice(words, ("whole", "projector", "tuned"))
    model, sections = parts.language_model_of_captions("llava", **parts.READS_PATCHES), {}
    if kind == "projector":
        optim = parts.adamw(train="projector", warmup_steps=20)
        sections = dict(init=parts.language_and_pictures("projector"), optim=optim)
    elif kind == "tuned":
        init = {"from": placeholder(str)}
        optim = parts.adamw(train="^(projector|decoder|input)", warmup_steps=50)
        sections = dict(init=init, optim=optim)
    steps, every = {"whole": (600, 100), "projector": (200, 200), "tuned": (400, 200)}[kind]
    config = parts.captions(model, steps=steps, every=every, **sections)
    return parts.tiny_captions(config) if "tiny" in words else config
