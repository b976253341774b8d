"""Whisper tiny.en, trained on the prompts of a telephone exchange.

Arguments: espeak, on the synthetic voices of ``configs/speech.py``; stamps, on spoken French captions, to
write English ones; tiny.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import parts, speech

ZOO = {"": 120}
HEARD = ("asterisk", "espeak", "stamps")


def get_config(arg: str = ""):
    """``espeak`` or ``stamps``; tiny."""
    words = parts.words(arg, HEARD)
    heard = parts.choice(words, HEARD)
    config = parts.experiment(
        "transcription",
        model=dict(name="pretrained"),
        init={"from": "tiny.en"},
        data=dict(name="asterisk", data_dir=placeholder(str), batch_size=8, target_len=96),
        loss=parts.cross_entropy(),
        # The encoder stays as it is: no gradient of it is computed, and few recordings cannot spoil it.
        optim=parts.adamw(learning_rate=5e-5, warmup_steps=5, b2=0.999, eps=1e-8, train="^decoder"),
        train=parts.train(steps=60, log_every=5, eval_every=20),
        checkpoint=parts.checkpoint(every=20, best_metric="wer", best_mode="min"),
        evaluate=dict(examples=100, decoding=dict(num_beams=1, batch_size=8)),
    )
    if "tiny" in words:
        return _tiny(config)
    if heard == "espeak":
        data = speech.get_config().data
        config.data.update(name=data.name, options=data.options)
        config.train.update(steps=150, eval_every=50)
        config.checkpoint.every = 50
    elif heard == "stamps":
        data = speech.get_config("translate").data
        config.data.update(name=data.name, options=data.options, sound=data.sound, text=data.text)
        config.train.update(steps=200, eval_every=50)
        config.checkpoint.update(every=50, best_metric="chrf", best_mode="max")
    return config


def _tiny(config: ConfigDict) -> ConfigDict:
    config.init["from"] = "tiny:whisper"
    config.data.update(name="tones", target_len=24)
    config.optim.update(learning_rate=3e-3, warmup_steps=2, train=".")
    config.train.update(steps=8, log_every=2, eval_every=0)
    config.checkpoint.update(every=4, best_metric="loss")
    config.evaluate.examples = 0
    return config
