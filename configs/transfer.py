"""French to English, and children of that run: another language on one side, of which a part is trained.

A child, ``--config.init.from=RUN``, keeps the run's tokenizer and table of one side and has its own of the
other: ``de`` reads German in place of French, ``fr-de`` writes it in place of English. After Gheini et al.
2021, "Cross-Attention is All You Need: Adapting Pretrained Transformers for Machine Translation". Arguments:
parent, or a language and what is trained besides its table; tiny.
"""

from ml_collections.config_dict import placeholder

from configs import parts

LANGUAGES = ("de", "es", "hi")
TARGETS = ("fr-de", "fr-es", "fr-hi")
TRAINED = ("cross", "table", "body", "random", "scratch")
_CROSS = r"\.cross"  # cross-attention and its norm
ZOO = {"de": 150}
ZOO_PARENT = {"de": ("parent", 250)}


def get_config(arg: str = "parent"):
    """``parent``, or a language and one of cross, table, body, random, scratch; tiny; in any order."""
    words = parts.words(arg, ("parent", *LANGUAGES, *TARGETS, *TRAINED))
    language = parts.choice(words, ("parent", *LANGUAGES, *TARGETS))
    trained = parts.choice(words, TRAINED)
    side = "target" if language in TARGETS else "source"
    pair = {"parent": "fr-en"}.get(language, language if side == "target" else f"{language}-en")
    config = parts.experiment(
        "translation",
        data=parts.pairs(f"libreoffice_help/{pair}"),
        tokenizer=parts.tokenizer(vocab_size=4000, joint=False),
        model=parts.transformer(dim=128, mlp_dim=512),
        loss=parts.translation_loss(),
        optim=parts.adamw(),
        train=parts.train(steps=2000 if language == "parent" else 400),
        evaluate=parts.evaluate(),
    )
    if language != "parent":
        child = _trained(trained, side)
        config.tokenizer.new = side
        config.init = {"from": placeholder(str), "new": child["new"]}
        config.optim.update(train=child["train"], warmup_steps=40)
    if "tiny" in words:
        parts.tiny(config, encoder_layers=1, decoder_layers=1)
        # French has English sentences of its own, so the parent reads Japanese.
        if side == "source":
            config.data.name = f"phrases/{pair.replace('fr', 'ja')}"
    return config


def _trained(name: str, side: str) -> dict:
    """Returns the patterns of what begins afresh and of what is trained; a side has a table of its own."""
    table, other = rf"^{side}_input\.", "target" if side == "source" else "source"
    return {
        "cross": dict(new=table, train=rf"{table}|{_CROSS}"),
        "table": dict(new=table, train=table),
        "body": dict(new=table, train=rf"^(?!{other}_input\.)"),
        "random": dict(new=rf"{table}|{_CROSS}", train=rf"{table}|{_CROSS}"),
        "scratch": dict(new=".", train=placeholder(str)),
    }[name]
