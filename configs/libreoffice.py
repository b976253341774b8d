"""English to another language on the LibreOffice help: the demo. Arguments: fr de es ja hi, tiny."""

from configs import parts

ZOO = {"": 300}
LANGUAGES = ("fr", "de", "es", "ja", "hi")


def get_config(arg: str = "fr"):
    """``fr`` and ``fr,tiny`` alike: a language, a size, in any order."""
    words = parts.words(arg, LANGUAGES)
    language = parts.choice(words, LANGUAGES)
    scores = {"bleu_tokenize": "char"} if language == "ja" else {}
    config = parts.experiment(
        "translation",
        data=parts.pairs(f"libreoffice_help/en-{language}"),
        tokenizer=parts.tokenizer(),
        model=parts.transformer(),
        loss=parts.translation_loss(),
        optim=parts.adamw(),
        evaluate=parts.evaluate(**scores),
    )
    return parts.tiny(config, encoder_layers=1, decoder_layers=1) if "tiny" in words else config
