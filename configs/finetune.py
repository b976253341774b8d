"""A published checkpoint, trained on: --config.init.from=DIR.

Arguments: translation (a model that reads a text and writes another), language_model,
masked_language_model or captioning (a model that reads pictures); tiny.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import parts

TASKS = ("translation", "language_model", "masked_language_model", "captioning")
_TINY = {
    "translation": "tiny:t5",
    "language_model": "tiny:gpt2",
    "masked_language_model": "tiny:bert",
    "captioning": "tiny:vision-encoder-decoder",
}
ZOO = {"masked_language_model": 1500, "captioning": 120}


def get_config(arg: str = "translation"):
    """Argument: the task of the checkpoint, tiny; in any order."""
    words = parts.words(arg, TASKS)
    task = parts.choice(words, TASKS)
    config = parts.experiment(
        task,
        model=dict(name="pretrained"),
        init={"from": placeholder(str)},
        data=_data(task),
        loss=parts.translation_loss() if task == "translation" else parts.cross_entropy(),
        optim=parts.adamw(
            learning_rate=5e-5, warmup_steps=100, b2=0.999, eps=1e-8, train=placeholder(str)
        ),
        train=parts.train(steps=2000),
    )
    if task == "translation":
        config.evaluate = parts.evaluate(decoding=parts.decoding(length_penalty=1.0))
    if task == "captioning":
        config.evaluate = dict(examples=200, decoding=dict(num_beams=1, batch_size=32))
    return _tiny(config) if "tiny" in words else config


def _data(task: str):
    if task == "translation":
        return parts.pairs("libreoffice_help/en-fr")
    if task == "captioning":
        return parts.captioned("emoji/en", height=224, width=224)
    masks = dict(density=0.15) if task == "masked_language_model" else {}
    return parts.data("libreoffice_help/en-fr", side="source", **masks)


def _tiny(config: ConfigDict) -> ConfigDict:
    config.init["from"] = _TINY[config.task]
    config.data.update(name="phrases", batch_size=8, target_len=64)
    if config.task == "captioning":
        config.data.update(name="shapes", height=16, width=16, target_len=32)
        config.evaluate.examples = 0
    if config.task == "translation":
        config.data.source_len = 64
        config.evaluate.examples = 8
    config.optim.update(learning_rate=3e-3, warmup_steps=2)
    if config.task == "masked_language_model":  # norms after the sum want a slow start
        config.optim.update(learning_rate=5e-3, warmup_steps=100)
    config.train.update(steps=8, log_every=2)
    config.checkpoint.every = 4
    return config
