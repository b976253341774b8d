"""Speech to text from nothing, in the shape of Whisper: sentences of a help, read by voices of a synthesiser.

Validation and test have other sentences and other voices. Arguments: translate, spoken French captions of
stamps to their English captions; tiny.

    python -m experiments.train    --config=configs/speech.py --workdir=runs/speech
    python -m experiments.evaluate --workdir=runs/speech --step=best --baselines
"""

from ml_collections import ConfigDict

from configs import parts

ZOO = {"": 150, "translate": 150}
# With five voices, other voices had three times the word errors of the five (40 and 12 %).
VOICES = ",".join(["en-us", *(f"en-us+{x}" for x in "m1 m3 m4 m6 m7 f1 f2 f3 f5".split())])
HELD_OUT = "en-us+m2,en-us+f4"


def get_config(arg: str = ""):
    """``translate``; tiny."""
    words = parts.words(arg, ("translate",))
    hears = parts.transformer(dim=128, mlp_dim=512, activation="gelu", dropout_rate=0.1)
    del hears["name"]
    # Three vectors of the encoder are 0.06 s.
    alignment = dict(alignment="times", alignment_weight=0.5, alignment_width=3.0)
    config = parts.experiment(
        "transcription",
        data=dict(
            name=f"espeak/{VOICES}",
            options=dict(longest=40, held_out=HELD_OUT),
            data_dir=parts.placeholder(str),
            batch_size=16,
            target_len=48,
            warp=0.12,
        ),
        # Nearly letters.
        tokenizer=dict(kind="bpe", vocab_size=300),
        model=dict(name="whisper", mels=40, max_frames=340, transformer=hears),
        loss=parts.cross_entropy(label_smoothing=0.1) | alignment,
        optim=parts.adamw(name="muon", learning_rate=1e-2, schedule="cosine", warmup_steps=200),
        train=parts.train(steps=2700, ema_decay=0.998, log_every=50, eval_every=450),
        checkpoint=parts.checkpoint(every=450, best_metric="wer", best_mode="min"),
        evaluate=dict(examples=100, decoding=dict(num_beams=1, batch_size=32)),
    )
    if "translate" in words:
        config.data.options = dict(voice="fr")
        config.loss.alignment = "none"
        config.tokenizer.vocab_size = 600
        config.optim = parts.adamw(learning_rate=2e-3, warmup_steps=200)
        config.data.update(name="stamps/en", sound="sound", text="caption")
        config.data.update(target_len=40)
        config.model.max_frames = 800
        config.checkpoint.update(best_metric="chrf", best_mode="max")
    return _tiny(config, words) if "tiny" in words else config


def _tiny(config: ConfigDict, words: list[str]) -> ConfigDict:
    config.data.options = {}
    said = "translation" if "translate" in words else "text"
    # The letters of tones are frequencies.
    config.data.update(name="tones", sound="audio", text=said, batch_size=8, warp=0.0)
    config.data.target_len = 24
    config.loss.alignment = "none"
    config.model.update(mels=40, max_frames=60)
    config.model.transformer.update(
        dim=32, num_heads=2, mlp_dim=64, encoder_layers=1, decoder_layers=1, dropout_rate=0.0
    )
    config.optim = parts.adamw(learning_rate=4e-3, warmup_steps=4)
    config.train.update(steps=24, ema_decay=None, log_every=6, eval_every=0)
    config.checkpoint.update(every=12, best_metric="loss", best_mode="min")
    config.evaluate.examples = 0
    return config
