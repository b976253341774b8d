"""New Testament Greek to English, with human word links: how well does attention align words?"""

from configs import translation


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = translation.words(arg)
    config = translation.small()
    config.data.name = "greek_english"
    config.tokenizer.vocab_size = 4000
    config.model.update(dropout_rate=0.2, reader=True)
    config.loss.update(read_back=1.0, read_back_layer=0)
    config.train.update(steps=1500)
    return translation.tiny(config) if "tiny" in words else config
