"""English to another language on the LibreOffice help: the demo. Arguments: fr de es ja hi, tiny."""

from configs import translation


def get_config(arg: str = "fr"):
    """``fr`` and ``fr,tiny`` alike: a language, a size, in any order."""
    words = translation.words(arg, ("fr", "de", "es", "ja", "hi"))
    language = next((word for word in words if word != "tiny"), "fr")
    config = translation.small()
    config.data.name = f"libreoffice_help/en-{language}"
    if language == "ja":
        config.evaluate.bleu_tokenize = "char"
    return translation.tiny(config) if "tiny" in words else config
