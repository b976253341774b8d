"""The step that is held to what sixteen accelerators should hold and send: 91.6 M parameters, 256 rows."""

from configs import translation


def get_config(arg: str = ""):
    """No argument."""
    translation.words(arg)
    config = translation.small()
    config.data.update(name="phrases", rows=256, source_len=256, target_len=256)
    config.tokenizer.vocab_size = 32000
    config.model.update(dim=1024, num_heads=16, mlp_dim=4096, encoder_layers=2, decoder_layers=2)
    config.model.update(dtype="bfloat16", dropout_rate=0.0)
    config.loss.label_smoothing = 0.0
    config.train.compute_dtype = "bfloat16"
    return config
