"""Copy a sequence of made-up words: no data, a minute to a perfect score. The first thing to run."""

from configs import translation


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = translation.words(arg)
    config = translation.small()
    config.data.update(name="copy", rows=8, source_len=64, target_len=64)
    config.tokenizer.vocab_size = 400
    config.model.update(dim=64, num_heads=4, mlp_dim=256, encoder_layers=2, decoder_layers=2)
    config.model.dropout_rate = 0.0
    config.loss.label_smoothing = 0.0
    config.optim.update(learning_rate=3e-3, warmup_steps=50)
    config.train.update(steps=800, log_every=50)
    return translation.tiny(config) if "tiny" in words else config
