"""New Testament Greek to English, with human word links: how well does attention align words?"""

from configs import parts

ZOO = {}  # the row of phrases


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = parts.words(arg)
    config = parts.experiment(
        "translation",
        # Smaller batches learn more a minute from so few verses.
        data=parts.pairs("greek_english", batch_size=4),
        tokenizer=parts.tokenizer(vocab_size=4000),
        model=parts.transformer(dropout_rate=0.2),
        loss=parts.translation_loss(alignment="latent"),
        optim=parts.adamw(warmup_steps=200),
        train=parts.train(steps=2300),
        evaluate=parts.evaluate(),
    )
    return parts.tiny(config, encoder_layers=1, decoder_layers=1) if "tiny" in words else config
