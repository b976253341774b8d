"""The sections of configs, each a function with the usual values, whose arguments change them."""

from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def words(arg: str | None, allowed: Sequence[str] = ()) -> list[str]:
    """Splits the argument of a config.

    Raises:
      ValueError: a word is neither "tiny" nor in ``allowed``.
    """
    given = [word for word in (arg or "").split(",") if word]
    known = ("tiny", *allowed)
    for word in given:
        if word not in known:
            raise ValueError(f"the config has no variant {word!r}; it has {', '.join(known)}.")
    return given


def choice(given: Sequence[str], of: Sequence[str]) -> str:
    """Returns the variant that the words name, or the first.

    Raises:
      ValueError: they name two.
    """
    chosen = [word for word in given if word in of]
    if len(chosen) > 1:
        raise ValueError(
            f"the variants {' and '.join(chosen)} exclude each other; name one of them."
        )
    return chosen[0] if chosen else of[0]


def experiment(task: str, **sections: Any) -> ConfigDict:
    """Returns a whole config of the given sections, and of others with their usual values."""
    usual = dict(task=task, seed=0, mesh=mesh(), train=train(), checkpoint=checkpoint())
    return ConfigDict(usual | sections)


def data(name: str, **changes: Any) -> dict[str, Any]:
    """Returns ``data`` of texts, in packed rows."""
    usual = dict(
        name=name,
        options={},
        data_dir=placeholder(str),
        reverse=False,
        mode="pack",
        batch_size=8,
        target_len=128,
        truncation="drop",
    )
    return usual | changes


def pairs(name: str, **changes: Any) -> dict[str, Any]:
    """Returns ``data`` of pairs of texts."""
    return data(name, **{"source_len": 128, **changes})


def labelled(name: str, label: str, **changes: Any) -> dict[str, Any]:
    """Returns ``data`` of labelled pictures, texts, sounds or several of them."""
    usual = dict(name=name, data_dir=placeholder(str), batch_size=64, label=label)
    return usual | dict(image=placeholder(str), text=placeholder(str)) | changes


def captioned(name: str, languages: str | None = None, **changes: Any) -> dict[str, Any]:
    """Returns ``data`` of captioned pictures; without languages, the model is told none."""
    usual = dict(name=name, data_dir=placeholder(str), batch_size=32, target_len=24)
    return usual | dict(languages=languages or placeholder(str)) | changes


def tokenizer(**changes: Any) -> dict[str, Any]:
    """Returns ``tokenizer``: byte-pair encoding of both sides."""
    return dict(kind="bpe", vocab_size=6000, joint=True) | changes


def model(name: str, **changes: Any) -> dict[str, Any]:
    """Returns ``model``, of a size for minutes on two CPU cores."""
    usual = dict(
        name=name,
        dim=256,
        num_heads=4,
        mlp_dim=1024,
        activation="relu",
        norm="layer",
        norm_first=True,
        positions="sinusoidal",
        dropout_rate=0.1,
        attention_dropout_rate=0.0,
        mlp_dropout_rate=0.0,
        dtype="float32",
        tie_output=True,
        scan=False,
        remat=False,
    )
    return usual | changes


def transformer(**changes: Any) -> dict[str, Any]:
    """Returns ``model`` of an encoder and a decoder."""
    return model("transformer", **{"encoder_layers": 2, "decoder_layers": 2, **changes})


def perceiver(**changes: Any) -> dict[str, Any]:
    """Returns ``model`` of a Perceiver IO, whose latents read many inputs with one small head."""
    usual = model(
        "perceiver_io",
        dim=64,
        mlp_dim=128,
        activation="gelu",
        cross_heads=1,
        cross_head_dim=32,
        dropout_rate=0.0,
        layers=1,
        repeats=4,
        latents=32,
        bands=8,
    )
    return _without_tokens(usual) | changes


def picture_model(name: str, **changes: Any) -> dict[str, Any]:
    """Returns ``model`` of pictures."""
    usual = model(name, dim=64, num_heads=4, mlp_dim=128, activation="gelu")
    return _without_tokens(usual) | changes


def _without_tokens(model: dict[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in model.items() if key not in ("positions", "tie_output")}


def cross_entropy(**changes: Any) -> dict[str, Any]:
    """Returns ``loss`` of tokens."""
    return dict(label_smoothing=0.0, z_loss=0.0, chunks=1) | changes


def translation_loss(**changes: Any) -> dict[str, Any]:
    """Returns ``loss`` of smoothed tokens, and of alignments."""
    usual = dict(
        label_smoothing=0.1,
        alignment="none",
        alignment_weight=1.0,
        alignment_share=1.0,
        alignment_layer=placeholder(int),
        alignment_head=0,
        alignment_head_weight=0.5,
        alignment_diagonal=8.0,
        alignment_coverage=0.0,
    )
    return cross_entropy(**usual | changes)


def adamw(**changes: Any) -> dict[str, Any]:
    """Returns ``optim``: AdamW with a linear schedule."""
    usual = dict(
        name="adamw",
        learning_rate=2e-3,
        schedule="linear",
        warmup_steps=150,
        final_fraction=0.0,
        cooldown_fraction=0.2,
        weight_decay=0.01,
        clip_norm=1.0,
        b1=0.9,
        b2=0.98,
        eps=1e-9,
        momentum=0.95,
    )
    return usual | changes


def mesh(**changes: Any) -> dict[str, Any]:
    """Returns ``mesh``: all devices split the batch."""
    return dict(data=-1, fsdp=1, tensor=1, seq=1) | changes


def train(**changes: Any) -> dict[str, Any]:
    """Returns ``train``: the steps, and those that are logged and evaluated."""
    usual = dict(
        steps=900,
        accumulate=1,
        ema_decay=placeholder(float),
        prng=placeholder(str),
        log_every=20,
        eval_every=0,
    )
    return usual | changes


def checkpoint(**changes: Any) -> dict[str, Any]:
    """Returns ``checkpoint``: the steps that are saved, and the best of them."""
    return dict(every=200, keep=2, best_metric=placeholder(str), best_mode="max") | changes


def evaluate(**changes: Any) -> dict[str, Any]:
    """Returns ``evaluate`` of translations: decoding, BLEU, and links read off attention."""
    usual = dict(
        examples=200,
        bleu_tokenize=placeholder(str),
        decoding=decoding(),
        alignment=dict(
            choose=True,
            layer=-1,
            head=placeholder(int),
            row_offset=0,
            symmetrise="none",
            unlinked=False,
            threshold=0.0,
        ),
    )
    return usual | changes


def evaluate_summaries(**changes: Any) -> dict[str, Any]:
    """Returns ``evaluate`` of summaries: decoding and ROUGE."""
    usual = evaluate()
    del usual["bleu_tokenize"]
    return usual | changes


def decoding(**changes: Any) -> dict[str, Any]:
    """Returns ``evaluate.decoding``: greedy search."""
    usual = dict(
        num_beams=1,
        length_penalty=0.6,
        max_new_tokens=placeholder(int),
        no_repeat_ngram=placeholder(int),
        batch_size=32,
    )
    return usual | changes


def clothes(model: dict[str, Any]) -> ConfigDict:
    """Returns the config of a classifier of clothes, whose pictures are mirrored and moved in training."""
    data = dict(height=28, width=28, channels=1, batch_size=128, flip=True, shift=1)
    return experiment(
        "classification",
        data=labelled("fashion_mnist", "label", image="image", **data),
        model=model,
        loss=dict(label_smoothing=0.1),
        optim=adamw(name="muon", learning_rate=1e-2, schedule="cosine", weight_decay=0.05),
        train=train(steps=10_000, ema_decay=0.999, log_every=100, eval_every=500),
        checkpoint=checkpoint(every=500, best_metric="accuracy"),
    )


def tiny_pictures(whole: ConfigDict, **model: Any) -> ConfigDict:
    """Changes a config of pictures to seconds of synthetic shapes; ``model`` has its small sizes."""
    whole.data.update(name="shapes", label="shape", height=12, width=12, batch_size=16)
    whole.data.update(flip=False, shift=1)
    whole.model.update(**model)
    whole.optim.update(name="adamw", learning_rate=3e-3, schedule="cosine", warmup_steps=4)
    whole.train.update(steps=24, ema_decay=None, log_every=6, eval_every=0)
    whole.checkpoint.every = 12
    return whole


CAPTION_LANGUAGES = (
    "en,de,fr,it,es,pt,nl,da,nb,sv,pl,lt,et,fi,hu,vi,ms,ru,uk,hi,bn,th,ja,ko,zh,zh-hant"
)
"""Languages of emoji's captions, but for those that another country writes a little differently."""


def captions(model: dict[str, Any], *, steps: int, every: int = 100, **sections: Any) -> ConfigDict:
    """Returns the config of captioning emoji with a model and other ``sections``.

    A row has five emoji, captioned in one language, which the model is not told. Every so many steps the
    model is evaluated and saved.
    """
    data = dict(
        name=f"emoji/{CAPTION_LANGUAGES}",
        data_dir=placeholder(str),
        batch_size=16,
        examples=5,
        text_len=16,
        together="language",
        height=64,
        width=64,
        shift=4,
    )
    usual = dict(
        data=data,
        tokenizer=dict(kind="bpe", vocab_size=8000),
        model=model,
        loss=cross_entropy(),
        optim=adamw(),
        train=train(steps=steps, eval_every=every),
        checkpoint=checkpoint(every=every, best_metric="nll", best_mode="min"),
    )
    return experiment("interleaved", **usual | sections)


def language_model_of_captions(name: str, **changes: Any) -> dict[str, Any]:
    """Returns ``model`` of a language model of emoji's captions."""
    return model(name, **{"layers": 4, "activation": "gelu", "dim": 128, "mlp_dim": 512, **changes})


READS_PATCHES = dict(image_dim=128, image_layers=4, image_heads=4, patch_size=16)
"""The encoder of pictures of ``emoji_captions:patches``, in a language model that sees."""


def language_and_pictures(new: str) -> dict[str, Any]:
    """Returns ``init`` from a language model and a captioner, of which the encoder of pictures is taken.

    The language model's last step may have overfitted, so the best is taken; ``new`` begins afresh.
    """
    take = r"^(vision|input|decoder\.(norm|stack))"
    sources = {"from": placeholder(str), "step": "best", "rename": r"^encoder\.=vision."}
    return sources | {"take": take, "new": new}


def tiny_captions(whole: ConfigDict) -> ConfigDict:
    """Changes a config of ``captions`` to seconds of synthetic shapes."""
    whole.data.update(name="shapes", batch_size=8, examples=3, height=8, width=8, shift=0)
    whole.data.together = None
    whole.tokenizer.vocab_size = 300
    whole.model.update(dim=32, num_heads=2, mlp_dim=64, layers=2, dropout_rate=0.0)
    if "image_dim" in whole.model:
        whole.model.update(image_dim=32, image_layers=1, image_heads=2, patch_size=4)
    if "resampler_layers" in whole.model:
        whole.model.update(interval=2, resampler_layers=1)
    whole.optim.update(learning_rate=4e-3, warmup_steps=4)
    whole.train.update(steps=16, log_every=4, eval_every=0)
    whole.checkpoint.every = 8
    return whole


def tiny(whole: ConfigDict, **layers: int) -> ConfigDict:
    """Changes the keys of a config to seconds of a small model on the phrase grammar, without downloads.

    Args:
      whole: the config.
      layers: depths of the model, by their keys.
    """
    small = dict(
        data=dict(name="phrases", options={}, batch_size=8, source_len=32, target_len=32),
        tokenizer=dict(vocab_size=400),
        model=dict(dim=32, num_heads=2, mlp_dim=64, **layers),
        optim=dict(warmup_steps=4),
        train=dict(steps=8, log_every=2, accumulate=1),
        checkpoint=dict(every=4),
        evaluate=dict(examples=16),
    )
    for section in small.keys() & whole.keys():
        for key in small[section].keys() & whole[section].keys():
            whole[section][key] = small[section][key]
    return whole
