"""The step of the tests on sixteen accelerators: 91.6 M parameters, 256 rows."""

from ml_collections import ConfigDict

from configs import parts


def get_config(arg: str = ""):
    """Returns the config; takes no argument."""
    parts.words(arg)
    return ConfigDict(
        dict(
            task="translation",
            seed=0,
            data=parts.pairs("phrases", batch_size=256, source_len=256, target_len=256),
            tokenizer=parts.tokenizer(vocab_size=32000),
            model=parts.transformer(
                dim=1024, num_heads=16, mlp_dim=4096, dtype="bfloat16", dropout_rate=0.0
            ),
            loss=parts.translation_loss(label_smoothing=0.0),
            optim=parts.adamw(),
            mesh=parts.mesh(),
            train=parts.train(compute_dtype="bfloat16"),
            checkpoint=parts.checkpoint(),
            evaluate=parts.evaluate(),
        )
    )
