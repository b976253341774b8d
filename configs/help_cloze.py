"""Cloze questions on LibreOffice's help: a term that is left out, by pointing or generating."""

from ml_collections import ConfigDict

from configs import parts

ANSWERS = ("point", "generate")
ZOO = {"point": 100, "generate": 1300}


def get_config(arg: str = ""):
    """Arguments: point (the default) or generate; tiny."""
    words = parts.words(arg, ANSWERS)
    points = parts.choice(words, ANSWERS) == "point"
    config = parts.experiment(
        "pointing" if points else "cloze",
        data=parts.pairs("cloze", source_len=544, target_len=128, options=dict(repeats=4)),
        tokenizer=parts.tokenizer(vocab_size=4000),
        model=_reader() if points else _transformer(),
        loss=parts.cross_entropy(),
        optim=parts.adamw(learning_rate=2e-3 if points else 1e-3),
        train=parts.train(steps=3000, eval_every=300),
        checkpoint=parts.checkpoint(every=300, best_metric="exact_match"),
        evaluate={"decoding": {"batch_size": 32}},
    )
    if points:
        config.data.mode = "bucket"  # a packed row takes as many steps as it has tokens
        config.optim.schedule = "cosine"
        config.train.update(steps=300, eval_every=50)
        config.checkpoint.every = 50
    return _tiny(config, points) if "tiny" in words else config


def _reader() -> dict:
    sizes = dict(embedding_dim=128, dim=256)
    return dict(name="attention_sum_reader", cell="gru", dropout_rate=0.3, dtype="float32", **sizes)


def _transformer() -> dict:
    layers = dict(encoder_layers=2, decoder_layers=2)
    return parts.model("transformer", positions="relative", dropout_rate=0.2, **layers)


def _tiny(config: ConfigDict, points: bool) -> ConfigDict:
    """Changes a config to seconds of made-up questions."""
    config = parts.tiny(config, **({} if points else dict(encoder_layers=1, decoder_layers=1)))
    config.data.update(name="cloze/made", options=dict(repeats=30), source_len=40, target_len=12)
    config.data.batch_size = 16
    config.model.dropout_rate = 0.0
    if points:
        config.model.embedding_dim = 32
    config.optim.update(learning_rate=3e-3, warmup_steps=4 if points else 50)
    return config
