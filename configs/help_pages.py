"""A SelfDoc that tells regions of LibreOffice help pages apart: title, paragraph, step, table, note.

It sees no boxes: of a region its place in order, its first three tokens and a crop of 4 by 4 pixels, in which
text is grey. ``--config.data.boxes=True`` shows the boxes.
"""

from ml_collections.config_dict import placeholder

from configs import parts

READS = ("both", "text", "picture")
ZOO = {"both": 400}  # made-up pages tell nothing to one modality alone


def get_config(arg: str = ""):
    """Argument: what is read of a region (both, text, picture), tiny; in any order."""
    words = parts.words(arg, READS)
    reads = parts.choice(words, READS)
    config = parts.experiment(
        "regions",
        data=dict(
            name="help_pages",
            options={},
            data_dir=placeholder(str),
            batch_size=8,
            regions=40,
            tokens=4,
            picture_height=4,
            picture_width=4,
            margin=2.0,
            boxes=False,
        ),
        tokenizer=dict(kind="bpe", vocab_size=1000),
        model=dict(
            name="selfdoc",
            dim=128,
            num_heads=4,
            mlp_dim=256,
            activation="gelu",
            norm="layer",
            norm_first=True,
            dropout_rate=0.1,
            attention_dropout_rate=0.0,
            mlp_dropout_rate=0.0,
            dtype="float32",
            part_layers=1,
            # One modality alone has none across them; it gets as many layers.
            region_layers=1 if reads == "both" else 2,
            cross_layers=1,
            patch=4,
            reads=reads,
        ),
        optim=parts.adamw(name="muon", learning_rate=1e-2),
        train=parts.train(steps=1200, ema_decay=0.99, eval_every=200),
        checkpoint=parts.checkpoint(every=200, best_metric="accuracy"),
    )
    if "tiny" not in words:
        return config
    config.data.update(name="help_pages/made", regions=8, tokens=8, batch_size=8)
    config.data.update(picture_height=8, picture_width=32)
    config.tokenizer.vocab_size = 300
    config.model.update(dim=32, num_heads=2, mlp_dim=64, patch=8)
    config.optim.update(name="adamw", learning_rate=2e-3, warmup_steps=2)
    config.train.update(steps=8, ema_decay=None, log_every=2)
    config.checkpoint.every = 4
    return config
