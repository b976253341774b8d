"""What the translation configs share: every value that a run of ``experiments.train`` reads."""

from collections.abc import Sequence

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def words(arg: str | None, allowed: Sequence[str] = ()) -> list[str]:
    """The parts of a config's argument.

    Raises:
      ValueError: one is neither "tiny" nor in ``allowed``.
    """
    found = [word for word in (arg or "").split(",") if word]
    known = ("tiny", *allowed)
    for word in found:
        if word not in known:
            raise ValueError(f"the config has no variant {word!r}; it has {', '.join(known)}.")
    return found


def choice(given: Sequence[str], of: Sequence[str]) -> str:
    """The one of several variants that the words name, the first where they name none.

    Raises:
      ValueError: they name two.
    """
    found = [word for word in given if word in of]
    if len(found) > 1:
        raise ValueError(
            f"the variants {' and '.join(found)} exclude each other; name one of them."
        )
    return found[0] if found else of[0]


def small() -> ConfigDict:
    """An encoder-decoder that learns the most in minutes on two CPU cores."""
    return ConfigDict(
        dict(
            task="translation",
            seed=0,
            data=dict(
                name="",
                options={},
                data_dir=placeholder(str),
                reverse=False,
                mode="pack",
                rows=8,
                source_len=128,
                target_len=128,
                overlong="drop",
            ),
            tokenizer=dict(kind="bpe", vocab_size=6000, joint=True),
            model=dict(
                dim=256,
                num_heads=4,
                mlp_dim=1024,
                encoder_layers=2,
                decoder_layers=2,
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
            ),
            loss=dict(
                label_smoothing=0.1,
                z_loss=0.0,
                chunks=1,
                alignment="none",
                alignment_weight=1.0,
                alignment_share=1.0,
                alignment_layer=placeholder(int),
                alignment_diagonal=8.0,
                alignment_coverage=0.0,
            ),
            optim=dict(
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
            ),
            mesh=dict(data=-1, fsdp=1, tensor=1, seq=1),
            train=dict(
                steps=900,
                accumulate=1,
                ema_decay=placeholder(float),
                prng=placeholder(str),
                log_every=20,
                eval_every=0,
            ),
            checkpoint=dict(every=200, keep=2, best_metric=placeholder(str), best_mode="max"),
            evaluate=dict(
                examples=200,
                bleu_tokenize=placeholder(str),
                decoding=dict(
                    num_beams=1, length_penalty=0.6, max_new_tokens=placeholder(int), rows=32
                ),
                alignment=dict(
                    choose=True,
                    layer=-1,
                    head=placeholder(int),
                    row="output",
                    symmetrise="none",
                    unlinked=False,
                    least=0.0,
                ),
            ),
        )
    )


def tiny(config: ConfigDict) -> ConfigDict:
    """The same experiment in seconds: a small model on the phrase grammar, no download."""
    config.data.name = "phrases"
    config.data.options = {}
    config.data.update(rows=8, source_len=32, target_len=32)
    config.tokenizer.vocab_size = 400
    config.model.update(dim=32, num_heads=2, mlp_dim=64, encoder_layers=1, decoder_layers=1)
    config.optim.update(warmup_steps=4)
    config.train.update(steps=8, log_every=2, accumulate=1)
    config.checkpoint.update(every=4)
    config.evaluate.update(examples=16)
    return config
