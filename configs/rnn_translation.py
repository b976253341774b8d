"""English to French on the LibreOffice help by RNNs with and without attention."""

from ml_collections.config_dict import placeholder

from configs import parts

ATTENTION = {
    "bahdanau": dict(attention="bahdanau"),
    "luong": dict(attention="luong", score="general", scope="global", input_feeding=True),
    "none": dict(attention=placeholder(str)),
}
ZOO = dict.fromkeys(ATTENTION, 1600)


def get_config(arg: str = ""):
    """Arguments: bahdanau (the default), luong or none, the model without attention; tiny."""
    words = parts.words(arg, tuple(ATTENTION))
    config = parts.experiment(
        "translation",
        # A packed row of 128 tokens takes 128 steps; a bucket takes as many as its longest text.
        data=parts.pairs("libreoffice_help/en-fr", mode="bucket"),
        tokenizer=parts.tokenizer(),
        model=dict(
            name="rnn_encoder_decoder",
            dim=384,
            encoder_layers=2,
            decoder_layers=2,
            cell="gru",
            dropout_rate=0.2,
            dtype="float32",
            tie_output=True,
            **ATTENTION[parts.choice(words, tuple(ATTENTION))],
        ),
        loss=parts.translation_loss(),
        optim=parts.adamw(),
        evaluate=parts.evaluate(),
    )
    if "tiny" in words:
        config = parts.tiny(config, encoder_layers=1, decoder_layers=1)
        config.data.mode = "pack"  # one shape to compile
    return config
