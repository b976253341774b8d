"""A small decoder-only language model of the LibreOffice help's English text."""

from configs import translation


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = translation.words(arg)
    config = translation.small()
    config.task = "language_model"
    config.data.update(name="libreoffice_help/en-fr", side="source", rows=16, target_len=128)
    config.model.update(layers=4, activation="gelu", positions="rope")
    config.loss.label_smoothing = 0.0
    config.train.update(steps=600)
    if "tiny" in words:
        config = translation.tiny(config)
        config.model.layers = 1
    for name in ("encoder_layers", "decoder_layers"):
        del config.model[name]
    for name in [name for name in config.loss if name.startswith("alignment")]:
        del config.loss[name]
    return config
