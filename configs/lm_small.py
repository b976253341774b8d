"""A small decoder-only language model of the LibreOffice help's English text."""

from configs import parts


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = parts.words(arg)
    config = parts.experiment(
        "language_model",
        data=parts.data("libreoffice_help/en-fr", side="source", batch_size=16),
        tokenizer=parts.tokenizer(),
        model=parts.model("decoder", layers=4, activation="gelu", positions="rope"),
        loss=parts.cross_entropy(),
        optim=parts.adamw(),
        train=parts.train(steps=600),
    )
    return parts.tiny(config, layers=1) if "tiny" in words else config
