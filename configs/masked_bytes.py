"""A Perceiver IO that fills in bytes which were taken out of the LibreOffice help. Argument: tiny.

Latents, as many as bytes, begin at the bytes' places; random ones stay at the frequencies of bytes for long.
"""

from ml_collections import ConfigDict

from configs import parts

ZOO = {"": 900}


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = parts.words(arg)
    config = ConfigDict(
        dict(
            task="masked_language_model",
            seed=0,
            data=parts.data(
                "libreoffice_help/en-fr", side="source", batch_size=16, target_len=256, density=0.15,
                truncation="cut",
            ),
            tokenizer=dict(kind="bpe", vocab_size=261),
            model=parts.perceiver(dim=128, mlp_dim=256, latents=256, layers=2, repeats=1,
                                  cross_heads=4, dropout_rate=0.0, start="diagonal"),
            loss=parts.cross_entropy(seen_weight=1.0),
            optim=parts.adamw(schedule="cosine"),
            mesh=parts.mesh(),
            train=parts.train(steps=2000, log_every=100, eval_every=500),
            checkpoint=parts.checkpoint(every=500, best_metric="loss", best_mode="min"),
        )
    )  # fmt: skip
    if "tiny" in words:
        config = parts.tiny(config, layers=2)
        config.data.batch_size = 16
        config.tokenizer.vocab_size = 261
        config.model.update(latents=32, cross_heads=2, cross_head_dim=16)
        config.optim.learning_rate = 4e-3
        config.train.update(steps=16, log_every=4)
    return config
