"""Text to speech: one voice of espeak-ng reads short sentences of LibreOffice's help. Argument: tiny.

python -m experiments.train --config=configs/speak.py --workdir=runs/speak
python -m experiments.speak --workdir=runs/speak "select the cells." --out=cells.wav --plot=cells.png
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import parts

ZOO = {"": 200}


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = parts.words(arg)
    model = dict(
        name="transformer_tts",
        dim=128,
        num_heads=4,
        mlp_dim=512,
        activation="relu",
        norm_first=True,
        dropout_rate=0.05,
        encoder_layers=2,
        decoder_layers=3,
        group=5,
        prenet_dim=64,
        postnet_layers=3,
        postnet_dim=64,
    )
    data = dict(
        name="espeak/en-us",
        options=dict(longest=50),
        data_dir=placeholder(str),
        letters="abcdefghijklmnopqrstuvwxyz ,.?'",
        batch_size=16,
        source_len=52,
        max_frames=360,
        mode="pad",
    )
    config = parts.experiment(
        "text_to_speech",
        data=data,
        model=model,
        loss=dict(
            stop=1.0,
            stop_last=5.0,
            alignment="times",
            alignment_weight=0.5,
            alignment_width=0.7,
            unseen=0.2,
        ),
        optim=parts.adamw(name="muon", learning_rate=1e-2, schedule="cosine", warmup_steps=200),
        train=parts.train(steps=2500, ema_decay=0.99, log_every=50, eval_every=500),
        checkpoint=parts.checkpoint(every=500, best_metric="mel", best_mode="min"),
        evaluate=dict(examples=1000, batch_size=32),
    )
    return _tiny(config) if "tiny" in words else config


def _tiny(config: ConfigDict) -> ConfigDict:
    config.data.update(name="tones", batch_size=8, source_len=16, max_frames=64, mode="pad")
    del config.data["options"]
    config.model.update(dim=32, num_heads=2, mlp_dim=64, encoder_layers=1, decoder_layers=2)
    config.model.update(prenet_dim=32, postnet_dim=32, dropout_rate=0.0)
    # A letter of tones has four frames.
    config.model.update(group=4, postnet_layers=5)
    config.loss.update(alignment="diagonal", alignment_weight=1.0, unseen=0.0)
    config.optim.update(learning_rate=4e-3, warmup_steps=8)
    config.train.update(steps=8, ema_decay=None, log_every=2, eval_every=0)
    config.checkpoint.update(every=4)
    config.evaluate.update(examples=4, batch_size=4)
    return config
