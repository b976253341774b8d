"""Manual pages of Linux: the NAME line from the description, by generating and with a copy head."""

from configs import parts

COPIES = ("copy", "generate")
ZOO = {"copy": 120, "generate": 200}


def get_config(arg: str = ""):
    """Arguments: copy (the default) or generate; tiny."""
    words = parts.words(arg, COPIES)
    copies = parts.choice(words, COPIES) == "copy"
    config = parts.experiment(
        "summarization",
        data=parts.pairs("man_pages", source_len=256, target_len=64, truncation="cut"),
        tokenizer=parts.tokenizer(vocab_size=4000),
        model=parts.model(
            "pointer_generator" if copies else "transformer",
            encoder_layers=2,
            decoder_layers=2,
            dropout_rate=0.2,
        ),
        # Both are trained on -log p alone, which is all that a mixture has.
        loss=parts.translation_loss(label_smoothing=0.0),
        optim=parts.adamw(name="muon", learning_rate=1e-2),
        train=parts.train(steps=900, eval_every=150),
        checkpoint=parts.checkpoint(every=150, best_metric="nll", best_mode="min"),
        # Without, a head that copies writes a piece of a name again and again.
        evaluate=parts.evaluate_summaries(decoding=parts.decoding(no_repeat_ngram=3)),
    )
    if "tiny" in words:
        config = parts.tiny(config, encoder_layers=1, decoder_layers=1)
        config.data.update(name="copy", source_len=64, target_len=64)
        config.model.dropout_rate = 0.0
        config.optim.update(name="adamw", learning_rate=3e-3, warmup_steps=50)
    return config
