"""English to another language by a grammar with gold word links, none of which are seen in training.

Arguments: hi de ja es fr, tiny.
"""

from configs import parts

LANGUAGES = ("hi", "de", "ja", "es", "fr")
ZOO = {"de": 700}


def get_config(arg: str = "hi"):
    """Arguments: a language, tiny; in any order."""
    words = parts.words(arg, LANGUAGES)
    config = parts.experiment(
        "translation",
        data=parts.pairs(
            f"phrases/en-{parts.choice(words, LANGUAGES)}",
            batch_size=16,
            source_len=32,
            target_len=32,
        ),
        tokenizer=parts.tokenizer(vocab_size=1500),
        model=parts.transformer(
            dim=128, num_heads=4, mlp_dim=256, encoder_layers=1, decoder_layers=1
        ),
        loss=parts.translation_loss(alignment="latent"),
        optim=parts.adamw(warmup_steps=100),
        train=parts.train(steps=1000, log_every=100),
        checkpoint=parts.checkpoint(every=500),
        evaluate=parts.evaluate(),
    )
    if "tiny" in words:
        name, config = config.data.name, parts.tiny(config)
        config.data.name = name
    return config
