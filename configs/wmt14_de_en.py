"""WMT 2014 German to English from TensorFlow Datasets: Transformer base and big, for eight devices and more.

Source: Vaswani et al. 2017, table 3 (both models), sections 5.1 to 5.4 (batches of about 25,000 tokens,
steps, rates, smoothing) and 6.1 (beam search). Unlike theirs, norms come first.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import parts

ZOO = {}  # the row of libreoffice

SHAPES = {
    "base": dict(dim=512, num_heads=8, mlp_dim=2048, dropout_rate=0.1),
    "big": dict(dim=1024, num_heads=16, mlp_dim=4096, dropout_rate=0.3),
}
# The highest of dim ** -0.5 * min(step ** -0.5, step * 4000 ** -1.5), and how long each was trained.
SCHEDULES = {
    "base": (dict(learning_rate=7e-4), dict(steps=100_000)),
    "big": (dict(learning_rate=5e-4), dict(steps=300_000)),
}


def get_config(arg: str = ""):
    """Arguments: base (the default) or big; tiny."""
    words = parts.words(arg, tuple(SHAPES))
    size = parts.choice(words, tuple(SHAPES))
    optim, train = SCHEDULES[size]
    config = parts.experiment(
        "translation",
        # 96 rows of 256 tokens are 24,576, and divide over 8, 16 and 32 devices.
        data=parts.pairs(
            "tfds:wmt14_translate/de-en", batch_size=96, source_len=256, target_len=256
        ),
        tokenizer=parts.tokenizer(vocab_size=37000),
        model=parts.transformer(
            encoder_layers=6, decoder_layers=6, dtype="bfloat16", scan=True, **SHAPES[size]
        ),
        loss=parts.translation_loss(chunks=4, z_loss=1e-4),
        optim=parts.adamw(schedule="rsqrt", warmup_steps=4000, weight_decay=0.0, **optim),
        train=parts.train(log_every=100, eval_every=5000, **train),
        checkpoint=parts.checkpoint(every=1000, keep=3, best_metric="bleu"),
        evaluate=parts.evaluate(examples=500, decoding=parts.decoding(num_beams=4, batch_size=64)),
    )
    return _tiny(config) if "tiny" in words else config


def _tiny(config: ConfigDict) -> ConfigDict:
    config = parts.tiny(config, encoder_layers=1, decoder_layers=1)
    config.model.dtype = "float32"
    config.optim.learning_rate = 1e-2  # which falls from step 4 on
    config.checkpoint.best_metric = placeholder(str)
    return config
