"""Every key that a config may hold: its type, its range, and what it means in one line.

``--help=config`` prints them, and ``settings.check`` holds every config to them. Common ones stand in this
file; those that a task or a model has beside them stand in its own, under ``KEYS``, and ``of`` puts them
together.
"""

import functools
import sys
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any, get_args

from crossattn import models
from crossattn.keys import ConfigKey as Key
from crossattn.nn import BLOCK_KEYS, BlockConfig
from crossattn.nn.feedforward import Activation
from crossattn.nn.inputs import PositionScheme
from crossattn.nn.layers import NormName
from crossattn.nn.stack import POLICIES
from experiments import tasks
from experiments.errors import SettingsError

_OPTIMIZERS = ("adamw", "adafactor", "lion", "muon", "sgd")
_SCHEDULES = ("constant", "cosine", "linear", "rsqrt", "wsd")
_PRNGS = ("threefry2x32", "rbg", "unsafe_rbg")
_SECTIONS = (
    "task", "seed", "data", "tokenizer", "model", "init", "loss", "optim", "mesh", "train", "checkpoint",
    "evaluate",
)  # fmt: skip
_EXTRA = {"needed": False}
NAME_OF_PRETRAINED = "pretrained"
"""``config.model.name`` of the model, and tokenizer, of the checkpoint that ``config.init.from`` names."""


def under(section: str, keys: Mapping[str, Key], **more: Any) -> dict[str, Key]:
    """Keys under the name of their section, with what all of them share."""
    return {f"{section}.{name}": replace(key, **more) for name, key in keys.items()}


COMMON: dict[str, Key] = {
    "task": Key(str, "What is trained: a file of experiments/tasks, or a module of your own, a.b."),
    "seed": Key(int, "Of parameters, dropout and the order of the data.", "[0, 4294967295]"),
    "model.name": Key(str, "The architecture: a file of crossattn/models, or a module of your own, a.b."),
    **under("optim", {
        "name": Key(str, "The optimiser.", choices=_OPTIMIZERS),
        "learning_rate": Key(float, "At its peak.", "[0, inf)"),
        "schedule": Key(str, "How the learning rate goes after its rise.", choices=_SCHEDULES),
        "warmup_steps": Key(int, "Steps of its linear rise.", "[0, inf)"),
        "final_fraction": Key(float, "Of the peak, at the last step (cosine, linear, wsd).", "[0, 1]"),
        "cooldown_fraction": Key(float, "Share of the steps that wsd falls over.", "[0, 1]"),
        "weight_decay": Key(float, "Decoupled, of matrices and tables.", "[0, inf)"),
        "clip_norm": Key(float, "Largest norm of the gradient; none is any.", "(0, inf)", none=True),
        "b1": Key(float, "Decay of the first moment (adamw, lion).", "[0, 1)"),
        "b2": Key(float, "Decay of the second moment (adamw, lion).", "[0, 1)"),
        "eps": Key(float, "Added to adamw's denominator.", "[0, inf)"),
        "momentum": Key(float, "Of muon's matrices and of sgd.", "[0, 1)"),
    }),
    **under("optim", {
        "train": Key(str, "Regular expression in names of parameters that are trained; none is all.",
                     none=True),
        "rates": Key(str, "Factors of the learning rate, PATTERN=FACTOR,...", none=True),
        "mu_dtype": Key(str, "Of the first moment (adamw, lion, muon, sgd).",
                        choices=("float32", "bfloat16")),
    }, **_EXTRA),
    **under("init", {
        "from": Key(str, "Begin with a run, a folder of weights, a name on the hub, tiny.en or tiny:t5.",
                    none=True),
        "step": Key(str, "Which checkpoint of a run: a step, last or best; none is last.", none=True),
        "take": Key(str, "Regular expression: which of its parameters are taken; none is all.", none=True),
        "rename": Key(str, "PATTERN=TEXT,...: how its parameters are called here.", none=True),
        "new": Key(str, "Regular expression: which parameters of the model begin afresh.", none=True),
    }, **_EXTRA),
    **under("mesh", {
        "data": Key(int, "Devices that split the batch; -1 takes the rest.", "[-1, inf)"),
        "fsdp": Key(int, "Devices that split batch and parameters; -1 takes the rest.", "[-1, inf)"),
        "tensor": Key(int, "Devices that split heads and vocabulary; -1 takes the rest.", "[-1, inf)"),
        "seq": Key(int, "Devices that split lengths; -1 takes the rest.", "[-1, inf)"),
    }),
    **under("train", {
        "steps": Key(int, "Steps of the optimiser in all; a run may be given more later.", "[1, inf)"),
        "accumulate": Key(int, "Parts that a batch is computed in.", "[1, inf)"),
        "ema_decay": Key(float, "Of averaged parameters; none keeps none.", "[0, 1)", none=True),
        "prng": Key(str, "JAX's random implementation; none is its default.", choices=_PRNGS, none=True),
        "log_every": Key(int, "Steps between lines of the log.", "[1, inf)"),
        "eval_every": Key(int, "Steps between evaluations; 0 is only at the end.", "[0, inf)"),
        "compute_dtype": Key(str, "What parameters are cast to for a step.",
                             choices=("float32", "bfloat16"), needed=False),
        "xla_flags": Key(str, "Flags of XLA for the step, NAME=VALUE,...; xla_dump_to=DIR writes its HLO.",
                         none=True, needed=False),
        "offload_optimizer": Key(bool, "Keep the optimiser's state in the hosts' memory between steps.",
                                 needed=False),
        "profile_first": Key(int, "First step of a jax.profiler trace in WORKDIR/profile; none is no trace.",
                             "[1, inf)", none=True, needed=False),
        "profile_steps": Key(int, "Steps of the trace; 5 where it is left out.", "[1, inf)", needed=False),
    }),
    **under("checkpoint", {
        "every": Key(int, "Steps between checkpoints.", "[1, inf)"),
        "keep": Key(int, "How many of the newest stay.", "[1, inf)"),
        "best_metric": Key(str, "Metric whose best checkpoint stays too.", none=True),
        "best_mode": Key(str, "Which value of it is best.", choices=("max", "min")),
    }),
}  # fmt: skip
"""Those that every config has."""

_MODEL: dict[str, Key] = {
    **under("model", {
        "dim": Key(int, "Size of the vectors, D.", "[1, inf)"),
        "num_heads": Key(int, "Query heads, N.", "[1, inf)"),
        "mlp_dim": Key(int, "Hidden size of the feed-forward network, F.", "[1, inf)"),
        "activation": Key(str, "Of the feed-forward network.", choices=get_args(Activation)),
        "norm": Key(str, "Layer norm or RMS norm.", choices=get_args(NormName)),
        "norm_first": Key(bool, "Norms before sublayers (pre-norm), or after."),
        "positions": Key(str, "How self-attention knows positions.", choices=get_args(PositionScheme)),
        "dropout_rate": Key(float, "On the outputs of sublayers.", "[0, 1)"),
        "attention_dropout_rate": Key(float, "On attention weights.", "[0, 1)"),
        "mlp_dropout_rate": Key(float, "On hidden features of the feed-forward network.", "[0, 1)"),
        "dtype": Key(str, "Of the computation.", choices=("float32", "bfloat16", "float16")),
        "tie_output": Key(bool, "The output layer is the table of embeddings."),
        "scan": Key(bool, "Scan over layers: compiles once for all of them."),
        "remat": Key(
            bool, "Compute activations again in the backward pass, to save memory: all, or by policy.",
            choices=POLICIES,
        ),
    }),
    **under("model", {
        "num_kv_heads": Key(int, "Key and value heads, K; none is N.", "[1, inf)", none=True),
        "head_dim": Key(int, "Size of a head, H; none is D / N.", "[1, inf)", none=True),
        "cross_heads": Key(int, "Heads of cross-attention where it has others.", "[1, inf)"),
        "cross_head_dim": Key(int, "Size of a head of cross-attention where it is another.", "[1, inf)"),
        "norm_epsilon": Key(float, "Added to the variance.", "(0, inf)"),
        "use_bias": Key(bool, "Biases in linear layers."),
        "key_bias": Key(bool, "A bias in the projection of keys; none is use_bias.", none=True),
        "attention_scale": Key(float, "Of attention logits; none is H ** -0.5.", "(0, inf)", none=True),
        "qk_norm": Key(bool, "Norms on query and key heads."),
        "rope_base": Key(float, "Of rotary positions.", "(0, inf)", none=True),
        "window": Key(int, "Positions that a token reads; none is all before it.", "[1, inf)", none=True),
        "relative_buckets": Key(int, "Of relative positions.", "[4, inf)"),
        "relative_distance": Key(int, "From where on distances share a bucket.", "[1, inf)"),
    }, **_EXTRA),
}  # fmt: skip
"""Those of models whose config has a field of that name, its own or its blocks'."""

TEXT: dict[str, Key] = {
    "data.name": Key(str, "Where the data come from: phrases, files:mine.tsv, text:mine.txt, stream:..."),
    "data.data_dir": Key(str, "Where fetched data lie; none is $CROSSATTN_DATA.", none=True),
    "data.reverse": Key(bool, "Exchange source and target."),
    "data.batch_size": Key(int, "Rows of a batch; of the longest ones where mode is bucket.", "[1, inf)"),
    "data.target_len": Key(int, "The most tokens of a target, its end included.", "[2, inf)"),
    "tokenizer.kind": Key(str, "Byte-pair encoding or a unigram model.", choices=("bpe", "unigram")),
    "tokenizer.vocab_size": Key(int, "The most tokens; bytes and specials take 261.", "[261, inf)"),
    **under("data.options", {
        "source_column": Key(object, "files, text, stream: the column of the source."),
        "target_column": Key(object, "files, stream: the column of the target."),
        "at_end": Key(str, "stream: begin again after the last shard, or wait.", choices=("repeat", "wait")),
        "lanes": Key(int, "stream: parts that processes share; they divide data.batch_size.", "[1, inf)"),
        "size": Key(int, "copy: training examples.", "[1, inf)"),
        "num_words": Key(int, "copy: kinds of words.", "[1, 4900]"),
        "min_length": Key(int, "copy: the fewest words.", "[1, inf)"),
        "max_length": Key(int, "copy: the most words.", "[1, inf)"),
        "reverse_order": Key(bool, "copy: the target is the source backwards."),
        "seed": Key(int, "copy: of the words.", "[0, 4294967295]"),
    }, **_EXTRA),
    **under("data.splits", {
        "train": Key(str, "tfds: the split or slice to train on."),
        "validation": Key(str, "tfds: the one to evaluate on while training."),
        "test": Key(str, "tfds: the one to score at the end."),
    }, **_EXTRA),
    **under("loss", {
        "label_smoothing": Key(float, "Probability spread over the whole vocabulary.", "[0, 1)"),
        "z_loss": Key(float, "Weight of the squared log-normaliser.", "[0, inf)"),
        "chunks": Key(int, "Parts of a length whose logits are held at once.", "[1, inf)"),
    }),
}  # fmt: skip
"""Those that tasks on text share."""

PRETRAINED: dict[str, Key] = {
    **under("model", {
        "dtype": Key(str, "Of the computation.", choices=("float32", "bfloat16", "float16")),
        "remat": _MODEL["model.remat"],
    }, **_EXTRA),
    **under("tokenizer", {
        "source_language": Key(str, "Of an mBART: the language that is read, en_XX.", none=True),
        "target_language": Key(str, "Of an mBART, fr_XX, or a Whisper, en: the language that is written.",
                               none=True),
    }, **_EXTRA),
}  # fmt: skip
"""Those of a model that a checkpoint describes, instead of a model's and a tokenizer's."""

SOURCE_LEN: dict[str, Key] = {
    "data.source_len": Key(int, "The most tokens of a source, its end included.", "[2, inf)"),
}
"""Of tasks that read one text and write another."""

BATCHES: dict[str, Key] = {
    "data.mode": Key(
        str, "pack several examples a row, or like lengths.", choices=("pack", "bucket")
    ),
    "data.truncation": Key(str, "What is done with longer examples.", choices=("drop", "cut")),
}
"""Of tasks whose examples are rows as they are."""

PIXELS = "[1, 8192]"
"""Of a picture's side; both together are at most as many as a file's that is read."""

PICTURES: dict[str, Key] = {
    "data.height": Key(int, "Of pictures, in pixels.", PIXELS),
    "data.width": Key(int, "Of pictures, in pixels.", PIXELS),
    **under("data", {
        "flip": Key(bool, "Half of the pictures are mirrored in training."),
        "shift": Key(int, "Pixels by which they are shifted in training, at most.", "[0, inf)"),
        "unreadable": Key(str, "What is done with files that are no pictures: skip says which, and how many.",
                          choices=("refuse", "skip")),
    }, **_EXTRA),
}  # fmt: skip
"""Of tasks that read pictures."""

SIDE: dict[str, Key] = {
    "data.side": Key(str, "Which side is learnt.", choices=("source", "target")),
}
"""Of tasks that learn from one side of a corpus."""


def of(task: Any, model: Any) -> dict[str, Key]:
    """The keys of a config with these names of a task and a model, in the order of its sections.

    Raises:
      SettingsError: there is no such task, or no such model.
    """
    kind = tasks.find(task)
    keys = COMMON | _own(kind)
    if model == NAME_OF_PRETRAINED:
        keys = {k: key for k, key in keys.items() if not k.startswith("tokenizer.")} | PRETRAINED
    else:
        keys |= _of_model(model)
    metric = replace(keys["checkpoint.best_metric"], choices=kind.metrics)
    return _ordered(keys | {"checkpoint.best_metric": metric})


@functools.cache
def every() -> dict[str, Key]:
    """The keys of all tasks and models that there are here; what one may leave out, may be left out."""
    keys: dict[str, Key] = COMMON | _MODEL
    for own in (
        {k: key for k, key in PRETRAINED.items() if k.startswith("tokenizer.")},
        *(_own(tasks.find(name)) for name in tasks.known()),
        *(_of_model(name) for name in models.known()),
    ):
        keys |= {k: key for k, key in own.items() if k not in keys or not key.needed}
    return _ordered(keys)


def owners(name: str) -> list[str]:
    """The tasks, or models, that have a key which not all have."""
    if name in COMMON:
        return []
    if name in PRETRAINED and name.startswith("tokenizer."):
        return [f"{NAME_OF_PRETRAINED!r} model"]
    tasks_with_it = [task for task in tasks.known() if name in _own(tasks.find(task))]
    return tasks_with_it or [model for model in models.known() if name in _of_model(model)]


def _own(task: type) -> dict[str, Key]:
    return getattr(sys.modules[task.__module__], "KEYS", {})


def _of_model(name: Any) -> dict[str, Key]:
    try:
        module = models.find(name)
    except ValueError as error:
        raise SettingsError(f"config.model.name: {error}") from None
    return under("model", _of_shape(module.config, module.keys))


def _of_shape(config: type, own: Mapping[str, Key]) -> dict[str, Key]:
    """The keys of an architecture's config, with those of each of its parts in a section of its own."""
    has = {f"model.{field}" for field in model_fields(config)}
    found = {k.removeprefix("model."): key for k, key in _MODEL.items() if k in has} | dict(own)
    for name, part in model_parts(config).items():
        keys_of_part = getattr(sys.modules[part.__module__], "KEYS", {})
        found |= under(name, _of_shape(part, keys_of_part))
    return found


def model_fields(config: type) -> set[str]:
    """The fields of an architecture's config, and of its ``block`` if it has one."""
    has_block = typing.get_type_hints(config).get("block") is BlockConfig
    return {field.name for field in fields(config)} | (BLOCK_KEYS if has_block else set())


def model_parts(config: type) -> dict[str, type]:
    """The configs of other architectures that an architecture's config is made of, by their fields."""
    hints = typing.get_type_hints(config)
    needed = [
        f.name for f in fields(config) if f.default is MISSING and f.default_factory is MISSING
    ]
    return {
        name: hints[name]
        for name in needed
        if is_dataclass(hints[name]) and hints[name] is not BlockConfig
    }


def _ordered(keys: Mapping[str, Key]) -> dict[str, Key]:
    def place(name: str) -> int:
        section = name.partition(".")[0]
        return _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS)

    return {name: keys[name] for name in sorted(keys, key=place)}


def is_key(name: str) -> bool:
    """Whether there is such a key, or such a section."""
    return name in every() or any(key.startswith(f"{name}.") for key in every())


def suggestion(name: str, known: Iterable[str] | None = None) -> str:
    """``; did you mean ...?`` with the known name that comes nearest, or a semicolon."""
    known = list(every() if known is None else known)
    section, _, last = name.rpartition(".")
    parts = {key: key.rpartition(".") for key in known}
    names = {own for _, _, own in parts.values()}
    alike = get_close_matches(last, names, n=len(names) + 1, cutoff=0.75)
    # One that looks alike in its section, then its own name in another, then what looks alike anywhere.
    near = [key for own in alike for key in known if parts[key][::2] == (section, own)]
    near += [key for key in known if parts[key][2] == last]
    near += get_close_matches(name, known, n=1, cutoff=0.8)
    near += [key for own in alike for key in known if parts[key][2] == own]
    return f"; did you mean {near[0]}?" if near else ";"
