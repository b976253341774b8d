"""Captions of emoji, in English and in German, by one model that is told the language.

Arguments: de (German beside English), fr (French beside English); stamps, captions of stamps in place of
emoji; patches, whose encoder of sixteen patches begins a Flamingo and a LLaVA; tiny.

    python -m experiments.train --config=configs/emoji_captions.py --workdir=runs/captions
    python -m experiments.caption --workdir=runs/captions cat.png --language=de --plot=read.png
"""

from ml_collections import ConfigDict

from configs import parts

ZOO = {"": 150}


def get_config(arg: str = ""):
    """``de`` or ``fr``; stamps; patches; tiny."""
    words = parts.words(arg, ("de", "fr", "stamps", "patches"))
    languages = f"en,{parts.choice(words, ('de', 'fr'))}"
    reader = parts.picture_model(
        "vit", dim=128, num_heads=4, mlp_dim=384, layers=4, patch_size=8, dropout_rate=0.1
    )
    writer = parts.model(
        "decoder", dim=192, num_heads=4, mlp_dim=576, layers=2, activation="gelu", dropout_rate=0.2
    )
    for part in (reader, writer):
        del part["name"]  # the architecture names them
    config = parts.experiment(
        "captioning",
        data=parts.captioned(
            f"{'stamps' if 'stamps' in words else 'emoji'}/{languages}",
            languages,
            batch_size=32,
            target_len=20,
            row_len=32,
            height=64,
            width=64,
            shift=4,
        ),
        tokenizer=dict(kind="bpe", vocab_size=2000),
        model=dict(name="vision_encoder_decoder", encoder=reader, decoder=writer),
        loss=parts.cross_entropy(label_smoothing=0.1),
        optim=parts.adamw(learning_rate=2e-3, schedule="cosine", weight_decay=0.05),
        train=parts.train(steps=2000, eval_every=500),
        checkpoint=parts.checkpoint(every=500, best_metric="chrf"),
        evaluate=dict(examples=1000, decoding=dict(num_beams=2, batch_size=64)),
    )
    if "patches" in words:
        config.model.encoder.update(patch_size=16, mlp_dim=512, class_token=False)
        config.train.update(steps=1000, eval_every=250)
        config.checkpoint.update(every=250, best_metric="accuracy")
        config.evaluate.examples = 0
    return _tiny(config, words) if "tiny" in words else config


def _tiny(config: ConfigDict, words: list[str]) -> ConfigDict:
    config.data.update(name="shapes/en,de", languages="en,de", batch_size=16, target_len=12)
    config.data.update(row_len=24, height=16, width=16, shift=1)
    config.tokenizer.vocab_size = 400
    config.model.encoder.update(dim=32, num_heads=2, mlp_dim=64, layers=1, patch_size=4)
    if "patches" in words:
        config.data.update(height=8, width=8)
        config.model.encoder.mlp_dim = 128
    config.model.decoder.update(dim=48, num_heads=2, mlp_dim=96, layers=1)
    config.optim.warmup_steps = 4
    config.train.update(steps=24, log_every=6, eval_every=0)
    config.checkpoint.update(every=12, best_metric="nll", best_mode="min")
    config.evaluate.examples = 0
    return config
