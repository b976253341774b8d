"""A Perceiver IO that fills in bytes which were taken out of the LibreOffice help. Argument: tiny."""

from ml_collections import ConfigDict

from configs import parts


def get_config(arg: str = ""):
    """Argument: tiny, or nothing."""
    words = parts.words(arg)
    config = ConfigDict(
        dict(
            task="masked_language_model",
            seed=0,
            data=parts.data(
                "libreoffice_help/en-fr", side="source", batch_size=16, target_len=256, density=0.15
            ),
            tokenizer=dict(kind="bpe", vocab_size=261),
            model=parts.perceiver(dim=128, mlp_dim=256, latents=96, layers=2, repeats=1,
                                  cross_heads=4, dropout_rate=0.0),
            loss=parts.cross_entropy(),
            optim=parts.adamw(schedule="cosine"),
            mesh=parts.mesh(),
            train=parts.train(steps=6000, log_every=100, eval_every=1000),
            checkpoint=parts.checkpoint(every=1000, best_metric="loss", best_mode="min"),
        )
    )  # fmt: skip
    if "tiny" in words:
        config = parts.tiny(config, layers=1)
        config.tokenizer.vocab_size = 261
        config.model.update(latents=16, cross_heads=2, cross_head_dim=16)
        config.train.update(steps=16, log_every=4)
    return config
