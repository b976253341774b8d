"""Translation and pronunciation by RNNs with and without attention, each of equal parameters."""

from ml_collections.config_dict import placeholder

from configs import parts

ATTENTION = {
    "bahdanau": dict(attention="bahdanau"),
    "luong": dict(attention="luong", score="general", scope="global", input_feeding=True),
    "none": dict(attention=placeholder(str)),
}
DATA = ("french", "greek", "phonemes")
_DIM = {
    "bahdanau": 320,
    "luong": 336,
    "none": 368,
}  # as many parameters as the Transformer of libreoffice
_SMALL = {"bahdanau": 180, "luong": 200, "none": 244}  # as many as g2p-en
ZOO = {"bahdanau": 320, "luong": 400, "none": 800}


def get_config(arg: str = ""):
    """Arguments: bahdanau (the default), luong or none; french (the default), greek or phonemes; tiny."""
    words = parts.words(arg, (*ATTENTION, *DATA))
    attention, data = parts.choice(words, tuple(ATTENTION)), parts.choice(words, DATA)
    phonemes = data == "phonemes"
    layers = 1 if phonemes else 2
    config = parts.experiment(
        "translation",
        data=_pairs(data),
        tokenizer=_tokenizer(data),
        model=dict(
            name="rnn_encoder_decoder",
            dim=(_SMALL if phonemes else _DIM)[attention],
            encoder_layers=layers,
            decoder_layers=layers,
            cell="gru",
            dropout_rate=0.2,
            dtype="float32",
            tie_output=True,
            **ATTENTION[attention],
        ),
        loss=parts.translation_loss(),
        # After 800 steps on French: 2.90 nats and BLEU 16.3; AdamW at 2e-3 3.00 and 15.8. 1e-2 diverges.
        optim=parts.adamw(name="muon", learning_rate=4e-3, schedule="cosine"),
        evaluate=parts.evaluate(),
    )
    if "tiny" in words:
        config = parts.tiny(config, encoder_layers=1, decoder_layers=1)
        config.data.mode = "pack"  # one shape to compile
        config.tokenizer.joint = True
    return config


def _pairs(data: str):
    """A packed row of 128 tokens takes 128 steps; a bucket takes as many as its longest text."""
    if data == "french":
        return parts.pairs("libreoffice_help/en-fr", mode="bucket")
    if data == "greek":
        return parts.pairs("greek_english", mode="bucket", batch_size=4)
    lengths = dict(source_len=32, target_len=32, batch_size=64)
    return parts.pairs("cmudict", mode="bucket", options={"letters": True}, **lengths)


def _tokenizer(data: str):
    if data == "phonemes":  # a token is a letter, a phoneme or a stress
        return parts.tokenizer(vocab_size=400, joint=False)
    return parts.tokenizer(vocab_size=4000 if data == "greek" else 6000)
