"""WMT 2014 German to English, transformer-base for eight devices, from TensorFlow Datasets.

Source: Vaswani et al. 2017, sections 5 and 6.1 (base model; its batches of about 25,000 tokens).
"""

from configs import translation


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = translation.words(arg)
    config = translation.small()
    config.data.update(name="tfds:wmt14_translate/de-en", rows=104, source_len=256, target_len=256)
    config.tokenizer.vocab_size = 37000
    config.model.update(
        dim=512,
        num_heads=8,
        mlp_dim=2048,
        encoder_layers=6,
        decoder_layers=6,
        norm_first=True,
        dtype="bfloat16",
        scan=True,
    )
    config.loss.update(chunks=4, z_loss=1e-4)
    config.optim.update(
        name="adamw", learning_rate=7e-4, schedule="rsqrt", warmup_steps=4000, weight_decay=0.0
    )
    config.mesh.update(data=-1, fsdp=2, tensor=1)
    config.train.update(steps=100_000, log_every=100, eval_every=5000)
    config.checkpoint.update(every=1000, keep=3, best_metric="bleu")
    config.evaluate.update(examples=500)
    config.evaluate.decoding.update(beams=4, rows=64)
    if "tiny" in words:
        config = translation.tiny(config)
        config.mesh.update(fsdp=1)
        config.model.dtype = "float32"
        config.checkpoint.best_metric = None
    return config
