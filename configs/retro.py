"""A RETRO that reads passages of other pages of the LibreOffice help. Arguments: ngrams, plain, tiny.

The passages that MiniLM finds nearest, or those with most runs of characters in common, without weights:
``ngrams``. ``plain`` is a wider decoder of as many parameters, 3.82 M, which reads the same pages alone.

    python -m experiments.train --config=configs/retro.py --workdir=runs/retro
    python -m experiments.train --config=configs/retro.py:plain --workdir=runs/plain
"""

from ml_collections.config_dict import placeholder

from configs import parts

PLAIN = dict(dim=224, mlp_dim=928)
ZOO = {"": 150}


def get_config(arg: str = ""):
    """``minilm``, ``ngrams`` or ``plain``; tiny."""
    words = parts.words(arg, ("minilm", "ngrams", "plain"))
    kind = parts.choice(words, ("minilm", "ngrams", "plain"))
    model = dict(layers=4, activation="gelu", positions="rope", dim=192, num_heads=4, mlp_dim=768)
    if kind == "plain":
        model |= PLAIN
        shape = parts.model("decoder", **model)
    else:
        shape = parts.model("retro", **model, interval=2, encoder_layers=1)
    data = dict(
        name="help_documents",
        data_dir=placeholder(str),
        batch_size=16,
        target_len=256,
        chunk=32,
        neighbours=2,
        neighbour_len=64,
        passages="train",
        embedder="ngrams" if kind == "ngrams" else "minilm",
    )
    config = parts.experiment(
        "retrieval_language_model",
        data=data,
        tokenizer=dict(kind="bpe", vocab_size=6000),
        model=shape,
        loss=parts.cross_entropy(),
        optim=parts.adamw(),
        train=parts.train(steps=1500, log_every=50, eval_every=250),
        checkpoint=parts.checkpoint(every=250, best_metric="nll", best_mode="min"),
    )
    return _tiny(config) if "tiny" in words else config


def _tiny(config):
    """Changes the config to seconds of persons whose things stand in passages alone."""
    config.data.update(name="facts", passages="passages", embedder="ngrams", batch_size=16)
    config.data.update(target_len=64, chunk=8, neighbour_len=16)
    config.tokenizer.vocab_size = 1000
    config.model.update(dim=64, num_heads=4, mlp_dim=128, layers=2, dropout_rate=0.0)
    config.optim.update(learning_rate=4e-3, warmup_steps=20)
    config.train.update(steps=24, log_every=6, eval_every=0)
    config.checkpoint.every = 12
    return config
