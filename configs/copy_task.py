"""Copy a sequence of synthetic words: no data, a minute to a perfect score. The first thing to run."""

from configs import parts

ZOO = {}  # the row of libreoffice


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = parts.words(arg)
    config = parts.experiment(
        "translation",
        data=parts.pairs("copy", source_len=64, target_len=64),
        tokenizer=parts.tokenizer(vocab_size=400),
        model=parts.transformer(dim=64, mlp_dim=256, dropout_rate=0.0),
        loss=parts.translation_loss(label_smoothing=0.0),
        optim=parts.adamw(learning_rate=3e-3, warmup_steps=50),
        train=parts.train(steps=800, log_every=50),
        evaluate=parts.evaluate(),
    )
    return parts.tiny(config, encoder_layers=1, decoder_layers=1) if "tiny" in words else config
