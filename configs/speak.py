"""Text to speech: one voice of espeak-ng reads short sentences of LibreOffice's help.

Arguments: a second voice that begins with that run, asterisk (prompts of a telephone exchange, English) or
stamps (captions, French), whose letters' times espeak-ng's readings of them tell; tiny.

    python -m experiments.train --config=configs/speak.py --workdir=runs/speak
    python -m experiments.train --config=configs/speak.py:asterisk --workdir=runs/prompts_voice
        --config.init.from=runs/speak
    python -m experiments.speak --workdir=runs/speak "select the cells." --out=cells.wav --plot=cells.png
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import parts

ZOO = {"": 200}
VOICES = ("espeak", "asterisk", "stamps")
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.?'"
FRENCH = "àâçèéêëîïôùûœ"


def get_config(arg: str = ""):
    """``asterisk``, ``stamps`` or nothing; tiny."""
    words = parts.words(arg, VOICES)
    voice = parts.choice(words, VOICES)
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
        letters=LETTERS,
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
    if "tiny" in words:
        return _tiny(config)
    if voice != "espeak":
        _second(config, voice)
    return config


def _second(config: ConfigDict, voice: str) -> None:
    config.init = {"from": placeholder(str)}
    if voice == "asterisk":
        config.data.options = dict(spelled=True, max_seconds=3.6)
        config.data.update(name="asterisk", source_len=64, timed_by="en-us")
    else:
        letters = LETTERS + FRENCH + 'ä-!:;()="“”0123456789'
        config.init.new = "^letters"  # of another language
        config.data.options = dict(voice="fr")
        config.data.update(name="stamps/fr", text="caption", sound="sound", letters=letters)
        config.data.update(source_len=160, max_frames=736, mode="bucket", timed_by="fr")
    config.optim.update(learning_rate=3e-3, warmup_steps=50)
    config.train.update(steps=600, eval_every=100)
    config.checkpoint.every = 100


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
