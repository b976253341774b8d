"""French to English, and children of that run: another source language, of which a part is trained.

A child, ``--config.init.from=RUN``, keeps the run's English tokenizer and table and has a source tokenizer
and table of its own. After Gheini et al. 2021, "Cross-Attention is All You Need: Adapting Pretrained
Transformers for Machine Translation". Arguments: parent, or a language and what is trained
besides its table; tiny.
"""

from ml_collections.config_dict import placeholder

from configs import parts

LANGUAGES = ("de", "es", "hi")
_TABLE = r"^source_input\."
_CROSS = r"\.cross"  # cross-attention and its norm
TRAINED = {
    "cross": dict(new=_TABLE, train=rf"{_TABLE}|{_CROSS}"),
    "table": dict(new=_TABLE, train=_TABLE),
    "body": dict(new=_TABLE, train=r"^(?!target_input\.)"),
    "random": dict(new=rf"{_TABLE}|{_CROSS}", train=rf"{_TABLE}|{_CROSS}"),
    "scratch": dict(new=".", train=placeholder(str)),
}
ZOO = {}  # the row of libreoffice


def get_config(arg: str = "parent"):
    """``parent``, or a language and one of cross, table, body, random, scratch; tiny; in any order."""
    words = parts.words(arg, ("parent", *LANGUAGES, *TRAINED))
    language = parts.choice(words, ("parent", *LANGUAGES))
    child = TRAINED[parts.choice(words, tuple(TRAINED))]
    config = parts.experiment(
        "translation",
        data=parts.pairs(f"libreoffice_help/{'fr' if language == 'parent' else language}-en"),
        tokenizer=parts.tokenizer(vocab_size=4000, joint=False),
        model=parts.transformer(dim=128, mlp_dim=512),
        loss=parts.translation_loss(),
        optim=parts.adamw(),
        train=parts.train(steps=2000 if language == "parent" else 400),
        evaluate=parts.evaluate(),
    )
    if language != "parent":
        config.tokenizer.new = "source"
        config.init = {"from": placeholder(str), "new": child["new"]}
        config.optim.update(train=child["train"], warmup_steps=40)
    return parts.tiny(config, encoder_layers=1, decoder_layers=1) if "tiny" in words else config
