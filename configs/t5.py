"""The common part of the T5 configs: a T5 v1.1 that learns from text alone.

Sources: Raffel et al. 2020 (objectives, section 3.1.4; lengths and batches, section 3.7); t5x's
``t5_1_1/base.gin`` and ``c4_pretrain.gin`` (gated GELU, RMS norms, no biases, an output table of its own, no
dropout, z-loss 1e-4; Adafactor at 0.01 for 10,000 steps, then falling as 1 / sqrt(step)).

T5 multiplies neither attention logits by H ** -0.5 nor embeddings by D ** 0.5, and draws smaller queries and
larger embeddings; here these constants are in the functions, and the products are the same.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import parts

CHIPS = ("v5e", "v5p", "h100")
OBJECTIVES = ("span_corruption", "prefix_lm")


def pretraining(
    arg: str, shape: Mapping[str, int], meshes: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> ConfigDict:
    """Returns the config of a shape for a chip and an objective.

    Args:
      arg: a chip (v5e), an objective (span_corruption), tiny; in any order, separated by commas.
      shape: values of the section ``model``.
      meshes: for each chip, values of the sections "mesh" and "train".
    """
    words = parts.words(arg, (*CHIPS, *OBJECTIVES))
    chip, objective = (parts.choice(words, names) for names in (CHIPS, OBJECTIVES))
    laid = meshes[chip]
    config = parts.experiment(
        "denoising",
        data=_data(objective),
        tokenizer=dict(kind="unigram", vocab_size=32000),
        model=_model(shape),
        loss=parts.cross_entropy(z_loss=1e-4, chunks=2),
        optim=parts.adamw(
            name="adafactor",
            learning_rate=0.01,
            schedule="rsqrt",
            warmup_steps=10_000,
            weight_decay=0.0,
            clip_norm=placeholder(float),  # T5 has none
        ),
        mesh=parts.mesh(**laid["mesh"]),
        train=parts.train(steps=1_000_000, log_every=100, eval_every=5000, **laid["train"]),
        checkpoint=parts.checkpoint(every=2000, keep=3, best_metric="loss", best_mode="min"),
    )
    return _tiny(config) if "tiny" in words else config


def _data(objective: str) -> dict[str, Any]:
    # 2,048 rows of 512 tokens, the 2 ** 20 a step of T5 v1.1. Of 568 tokens, a source of 512 and a target of
    # 114 are made; of two texts of 510, sources and targets of 512 together.
    return dict(
        name="tfds:c4/en",
        options={},
        splits=dict(train="train", validation="validation[:20000]", test="validation"),
        data_dir=placeholder(str),
        reverse=False,
        side="source",
        batch_size=2048,
        source_len=512,
        target_len=114 if objective == "span_corruption" else 512,
        objective=objective,
        density=0.15,
        span=3.0,
        sentinels=100,
    )


def _model(shape: Mapping[str, int]) -> dict[str, Any]:
    return parts.transformer(
        **shape,
        head_dim=64,
        activation="geglu",
        norm="rms",
        positions="relative",
        relative_buckets=32,
        relative_distance=128,
        use_bias=False,
        dropout_rate=0.0,
        dtype="bfloat16",
        tie_output=False,
        scan=True,
        remat=True,
    )


def _tiny(config: ConfigDict) -> ConfigDict:
    config = parts.tiny(config, encoder_layers=1, decoder_layers=1)
    config.data.splits = dict(train="train", validation="validation", test="test")
    prefix = config.data.objective == "prefix_lm"
    # French agrees in gender and number, so that what is hidden follows from what is shown.
    config.data.update(source_len=48, target_len=48 if prefix else 16, side="target")
    config.model.update(head_dim=16, dtype="float32", remat=False, dropout_rate=0.1)
    config.optim.update(learning_rate=0.1, schedule="cosine", warmup_steps=50)
    config.mesh.update(data=-1, fsdp=1, tensor=1, seq=1)
    config.checkpoint.best_metric = placeholder(str)
    return config
