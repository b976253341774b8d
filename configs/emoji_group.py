"""A Perceiver IO that tells the Unicode group of an emoji from its picture and its caption together.

Arguments: image or caption, for one of them alone; stamps, the kinds of stamps, or of stamps voice, which is
the caption spoken in French, or all, picture, caption and voice; tiny.
"""

from configs import parts

_READS = ("both", "image", "caption", "voice", "all")
ZOO = {"both": 800, "image": 1500}


def get_config(arg: str = ""):
    """``both``, ``image`` or ``caption``; stamps, or of stamps ``voice`` or ``all``; tiny."""
    words = parts.words(arg, (*_READS, "stamps"))
    read = parts.choice(words, _READS)
    hears, tiny = read in ("voice", "all"), "tiny" in words
    stamps = hears or "stamps" in words
    name, label = ("stamps/en", "kind") if stamps else ("emoji/en", "group")
    data, text = parts.labelled(name, label, batch_size=32), {}
    if hears:
        voice = True if tiny else "fr"
        data |= dict(options=dict(voice=voice), sound="sound", frames=32 if tiny else 730, mels=40)
    if read in ("both", "image", "all"):
        data |= dict(image="image", height=24, width=24, channels=3)
    if read in ("both", "caption", "all"):
        data |= dict(text="caption", text_len=24)
        text = dict(tokenizer=dict(kind="bpe", vocab_size=1000))
    config = parts.experiment(
        "classification",
        data=data,
        **text,
        model=parts.perceiver(dropout_rate=0.2),
        loss=dict(label_smoothing=0.1),
        optim=parts.adamw(learning_rate=1e-3, schedule="cosine", weight_decay=0.1),
        train=parts.train(steps=400, log_every=50, eval_every=50),
        checkpoint=parts.checkpoint(every=50, best_metric="accuracy"),
    )
    if tiny:
        config.data.update(name="shapes", label="shape", batch_size=16)
        if config.data.image is not None:
            config.data.update(height=12, width=12, shift=1)
        if config.data.text is not None:
            config.tokenizer.vocab_size = 300
        config.model.update(dim=32, num_heads=2, mlp_dim=64, latents=8, repeats=2, dropout_rate=0.0)
        config.loss.label_smoothing = 0.0
        config.optim.update(learning_rate=3e-3, warmup_steps=4)
        config.train.update(steps=24, log_every=6, eval_every=0)
        config.checkpoint.every = 12
    return config
