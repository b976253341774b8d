"""Encoder-decoders that begin with the weights of an encoder: MiniLM, on 2,000 pairs of German and English.

Arguments: both (encoder and decoder begin with MiniLM's weights, cross-attention afresh), encoder (the whole
decoder begins afresh) or scratch (all begins afresh, with the sizes and the tokenizer of the others); tiny.

Source: Rothe et al. 2020, "Leveraging Pre-trained Checkpoints for Sequence Generation Tasks": BERT2BERT,
BERT2RND and RND2RND.
"""

from ml_collections import ConfigDict

from configs import parts

NEW = {"both": r"cross|^decoder\.output", "encoder": r"^decoder", "scratch": "."}
ZOO = {"both": 500}


def get_config(arg: str = ""):
    """Arguments: both (the default), encoder or scratch; tiny."""
    words = parts.words(arg, tuple(NEW))
    variant = parts.choice(words, tuple(NEW))
    config = parts.experiment(
        "translation",
        model=dict(name="pretrained"),
        init={"from": "pair:minilm", "new": NEW[variant]},
        data=parts.pairs(
            "libreoffice_help/de-en",
            batch_size=8,
            source_len=64,
            target_len=32,
            options=dict(pairs=2000),
        ),
        loss=parts.translation_loss(),
        optim=parts.adamw(learning_rate=3e-4, warmup_steps=20, b2=0.999, eps=1e-8),
        train=parts.train(steps=150),
        checkpoint=parts.checkpoint(every=150, keep=1),
        evaluate=parts.evaluate(examples=0, decoding=parts.decoding(max_new_tokens=32)),
    )
    config.evaluate.alignment.choose = False
    return _tiny(config) if "tiny" in words else config


def _tiny(config: ConfigDict) -> ConfigDict:
    """Changes the config to seconds of a small random BERT on the phrase grammar."""
    config.init["from"] = "pair:tiny:bert"
    config.data.options = ConfigDict()
    config.data.update(name="phrases", batch_size=8, source_len=64, target_len=64)
    config.optim.update(learning_rate=5e-3, warmup_steps=50)
    config.evaluate.decoding.max_new_tokens = None
    config.train.update(steps=24, log_every=4, eval_every=0)
    config.checkpoint.every = 12
    return config
