"""Cloze questions on LibreOffice's help: a term that is left out, by pointing or generating."""

from configs import parts

ANSWERS = ("point", "generate")
ZOO = {"point": 500, "generate": 800}


def get_config(arg: str = ""):
    """Arguments: point (the default) or generate; tiny."""
    words = parts.words(arg, ANSWERS)
    points = parts.choice(words, ANSWERS) == "point"
    own = dict(generates=False) if points else {}
    config = parts.experiment(
        "cloze",
        data=parts.pairs("cloze", source_len=544, target_len=128, options=dict(repeats=4)),
        tokenizer=parts.tokenizer(vocab_size=4000),
        model=parts.model(
            "pointer_generator" if points else "transformer",
            encoder_layers=2,
            decoder_layers=2,
            positions="relative",
            dropout_rate=0.2,
            **own,
        ),
        loss=parts.cross_entropy(),
        optim=parts.adamw(learning_rate=1e-3),
        train=parts.train(steps=3000, eval_every=300),
        checkpoint=parts.checkpoint(every=300, best_metric="exact_match"),
        evaluate={"decoding": {"batch_size": 32}},
    )
    if "tiny" in words:
        config = parts.tiny(config, encoder_layers=1, decoder_layers=1)
        config.data.update(
            name="cloze/made", options=dict(repeats=30), source_len=40, target_len=12
        )
        config.data.batch_size = 16
        config.model.dropout_rate = 0.0
        config.optim.update(learning_rate=3e-3, warmup_steps=50)
    return config
