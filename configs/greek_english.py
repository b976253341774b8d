"""New Testament Greek to English, with human word links: how well does attention align words?"""

from configs import translation


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = translation.words(arg)
    config = translation.small()
    config.data.name = "greek_english"
    config.tokenizer.vocab_size = 4000
    config.model.dropout_rate = 0.2
    config.loss.alignment = "latent"
    config.data.rows = 4  # smaller batches learn more a minute from so few verses
    config.optim.warmup_steps = 200
    config.train.update(steps=2300)
    return translation.tiny(config) if "tiny" in words else config
