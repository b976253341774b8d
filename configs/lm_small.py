"""A small decoder-only language model of the LibreOffice help's English text.

``all_attention`` has no feed-forward networks: every head reads 1,024 learnt vectors beside the text, which
are as many parameters (Sukhbaatar et al. 2019).

    python -m experiments.train --config=configs/lm_small.py:all_attention --workdir=runs/all_attention
"""

from ml_collections.config_dict import placeholder

from configs import parts

ZOO = {"": 320, "all_attention": 480}


def get_config(arg: str = ""):
    """Arguments: feedforward (the default) or all_attention; tiny."""
    kinds = ("feedforward", "all_attention")
    words = parts.words(arg, kinds)
    config = parts.experiment(
        "language_model",
        data=parts.data("libreoffice_help/en-fr", side="source", batch_size=16),
        tokenizer=parts.tokenizer(),
        model=parts.model("decoder", layers=4, activation="gelu", positions="rope"),
        loss=parts.cross_entropy(),
        optim=parts.adamw(),
        train=parts.train(steps=600),
    )
    config = parts.tiny(config, layers=1) if "tiny" in words else config
    if parts.choice(words, kinds) == "all_attention":
        config.model.num_persistent = config.model.mlp_dim
        config.model.mlp_dim = placeholder(int)
    return config
