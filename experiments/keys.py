"""Every key that a config may hold: its type, its range, and what it means in one line.

``--help=config`` prints this table, ``settings.check`` holds every config to it, and a key that is not here
does not exist. Ranges are intervals as mathematics writes them, "[0, 1)".
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from crossattn.nn.feedforward import Activation
from crossattn.nn.inputs import PositionScheme
from crossattn.nn.layers import NormName
from crossattn.nn.stack import POLICIES
from crossattn.train.alignment import ROWS

TASKS = ("translation", "language_model", "denoising")
ALIGNMENTS = ("none", "diagonal", "latent", "gold")
OBJECTIVES = ("span_corruption", "prefix_lm")
_METRICS = ("loss", "nll", "perplexity", "accuracy", "bleu", "chrf")
_SYMMETRISED = ("none", "union", "intersection", "grow-diag")
_OPTIMIZERS = ("adamw", "adafactor", "lion", "muon", "sgd")
_SCHEDULES = ("constant", "cosine", "linear", "rsqrt", "wsd")
_PRNGS = ("threefry2x32", "rbg", "unsafe_rbg")
_TEXTS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    object: "a name, or a number from 0",
}


@dataclass(frozen=True)
class Key:
    """What one key of a config holds.

    Attributes:
      kind: bool, int, float or str; a whole number will do for a float; object is the name or the number
        of a column.
      meaning: one line.
      within: the range of a number.
      choices: the texts that there are; () is any. A bool with choices is true, false or one of them.
      none: None is a value too.
      needed: a config has it; otherwise it may be left out.
      only: the tasks that have it; () is every task.
    """

    kind: type
    meaning: str
    within: str = "(-inf, inf)"
    choices: tuple[str, ...] = ()
    none: bool = False
    needed: bool = True
    only: tuple[str, ...] = ()

    def belongs(self, task: Any) -> bool:
        """Whether a config of this task may have it."""
        return not self.only or task in self.only

    def takes(self, value: Any) -> bool:
        """Whether a value is one of those."""
        if value is None:
            return self.none
        if self.kind is object:
            return isinstance(value, str) or (type(value) is int and value >= 0)
        if self.kind is str:
            return isinstance(value, str) and (value in self.choices or not self.choices)
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and (isinstance(value, bool) or value in self.choices)
        if not isinstance(value, int if self.kind is int else (int, float)):
            return False
        low, high = _ends(self.within)
        above = low < value if self.within[0] == "(" else low <= value
        below = value < high if self.within[-1] == ")" else value <= high
        return above and below

    @property
    def expected(self) -> str:
        """Those values in words."""
        if self.choices:
            listed = f"one of {', '.join(self.choices)}"
            text = f"{_TEXTS[bool]}, or {listed}" if self.kind is bool else listed
        elif self.kind in (int, float):
            text = _TEXTS[self.kind] + _range(self.within)
        else:
            text = _TEXTS[self.kind]
        return f"{text}, or none" if self.none else text


def _ends(within: str) -> tuple[float, float]:
    low, high = map(float, within[1:-1].split(","))
    return low, high


def _range(within: str) -> str:
    low, high = _ends(within)
    parts = []
    if low > float("-inf"):
        parts.append(f"above {low:g}" if within[0] == "(" else f"{low:.15g} or more")
    if high < float("inf"):
        parts.append(f"below {high:g}" if within[-1] == ")" else f"at most {high:.15g}")
    return f", {' and '.join(parts)}" if parts else ""


def _keys(section: str, more: Mapping[str, Any], keys: Mapping[str, Key]) -> dict[str, Key]:
    """Keys under the name of their section, with what all of them share."""
    return {f"{section}.{name}": Key(**{**vars(key), **more}) for name, key in keys.items()}


_TRANSLATION = {"only": ("translation",)}
_DENOISING = {"only": ("denoising",)}
_PAIRED = ("translation", "language_model")
_TWO_STACKS = ("translation", "denoising")
_EXTRA = {"needed": False}

KEYS: dict[str, Key] = {
    "task": Key(str, "What is trained.", choices=TASKS),
    "seed": Key(int, "Of parameters, dropout and the order of the data.", "[0, 4294967295]"),
    "data.name": Key(str, "Where the data come from: phrases, files:mine.tsv, text:mine.txt, stream:..."),
    "data.data_dir": Key(str, "Where fetched data lie; none is $CROSSATTN_DATA.", none=True),
    "data.reverse": Key(bool, "Exchange source and target."),
    "data.mode": Key(str, "pack several examples a row, or like lengths.", choices=("pack", "bucket"),
                     only=_PAIRED),
    "data.rows": Key(int, "Rows of a batch; of the longest ones where mode is bucket.", "[1, inf)"),
    "data.source_len": Key(int, "The most tokens of a source, its end included.", "[2, inf)"),
    "data.target_len": Key(int, "The most tokens of a target, its end included.", "[2, inf)"),
    "data.overlong": Key(str, "What is done with longer examples.", choices=("drop", "cut"),
                         only=_PAIRED),
    "data.side": Key(str, "Which side is learnt.", choices=("source", "target"),
                     only=("language_model", "denoising")),
    "tokenizer.kind": Key(str, "Byte-pair encoding or a unigram model.", choices=("bpe", "unigram")),
    "tokenizer.vocab_size": Key(int, "The most tokens; bytes and specials take 261.", "[261, inf)"),
    "tokenizer.joint": Key(bool, "One tokenizer for both sides.", only=_PAIRED),
    **_keys("data", _DENOISING, {
        "objective": Key(str, "Fill in spans that were taken out, or go on after a prefix.",
                         choices=OBJECTIVES),
        "density": Key(float, "Share of the tokens that is taken out.", "(0, 1)"),
        "span": Key(float, "Mean tokens of what is taken out in one piece.", "[1, inf)"),
        "sentinels": Key(int, "Tokens beyond the tokenizer's that stand for spans.", "[1, inf)"),
    }),
    **_keys("data.options", _EXTRA, {
        "source_column": Key(object, "files, text, stream: the column of the source."),
        "target_column": Key(object, "files, stream: the column of the target."),
        "at_end": Key(str, "stream: begin again after the last shard, or wait.", choices=("repeat", "wait")),
        "lanes": Key(int, "stream: parts that processes share; they divide data.rows.", "[1, inf)"),
        "size": Key(int, "copy: training examples.", "[1, inf)"),
        "num_words": Key(int, "copy: kinds of words.", "[1, 4900]"),
        "min_length": Key(int, "copy: the fewest words.", "[1, inf)"),
        "max_length": Key(int, "copy: the most words.", "[1, inf)"),
        "reverse_order": Key(bool, "copy: the target is the source backwards."),
        "seed": Key(int, "copy: of the words.", "[0, 4294967295]"),
    }),
    **_keys("data.splits", _EXTRA, {
        "train": Key(str, "tfds: the split or slice to train on."),
        "validation": Key(str, "tfds: the one to evaluate on while training."),
        "test": Key(str, "tfds: the one to score at the end."),
    }),
    **_keys("model", {}, {
        "dim": Key(int, "Size of the vectors, D.", "[1, inf)"),
        "num_heads": Key(int, "Query heads, N.", "[1, inf)"),
        "mlp_dim": Key(int, "Hidden size of the feed-forward network, F.", "[1, inf)"),
        "encoder_layers": Key(int, "Depth of the encoder.", "[1, inf)", only=_TWO_STACKS),
        "decoder_layers": Key(int, "Depth of the decoder.", "[1, inf)", only=_TWO_STACKS),
        "layers": Key(int, "Depth.", "[1, inf)", only=("language_model",)),
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
    **_keys("model", _EXTRA, {
        "num_kv_heads": Key(int, "Key and value heads, K; none is N.", "[1, inf)", none=True),
        "head_dim": Key(int, "Size of a head, H; none is D / N.", "[1, inf)", none=True),
        "norm_epsilon": Key(float, "Added to the variance.", "(0, inf)"),
        "use_bias": Key(bool, "Biases in linear layers."),
        "key_bias": Key(bool, "A bias in the projection of keys; none is use_bias.", none=True),
        "attention_scale": Key(float, "Of attention logits; none is H ** -0.5.", "(0, inf)", none=True),
        "qk_norm": Key(bool, "Norms on query and key heads."),
        "rope_base": Key(float, "Of rotary positions.", "(0, inf)", none=True),
        "relative_buckets": Key(int, "Of relative positions.", "[4, inf)"),
        "relative_distance": Key(int, "From where on distances share a bucket.", "[1, inf)"),
        "separate_inputs": Key(bool, "Source and target have positions and norms of their own.",
                               only=_TWO_STACKS),
    }),
    **_keys("loss", {}, {
        "label_smoothing": Key(float, "Probability spread over the whole vocabulary.", "[0, 1)"),
        "z_loss": Key(float, "Weight of the squared log-normaliser.", "[0, inf)"),
        "chunks": Key(int, "Parts of a length whose logits are held at once.", "[1, inf)"),
    }),
    **_keys("loss", _TRANSLATION, {
        "alignment": Key(str, "What teaches cross-attention to align words.", choices=ALIGNMENTS),
        "alignment_weight": Key(float, "Of that loss.", "[0, inf)"),
        "alignment_share": Key(float, "Share of the examples whose gold links are given.", "(0, 1]"),
        "alignment_layer": Key(int, "Decoder layer that is taught, from 0; none is the usual.", none=True),
        "alignment_diagonal": Key(float, "How sharp the diagonal prior is.", "[0, inf)"),
        "alignment_coverage": Key(float, "Weight of the loss on sources not looked at.", "[0, inf)"),
    }),
    **_keys("optim", {}, {
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
    **_keys("mesh", {}, {
        "data": Key(int, "Devices that split the batch; -1 takes the rest.", "[-1, inf)"),
        "fsdp": Key(int, "Devices that split batch and parameters; -1 takes the rest.", "[-1, inf)"),
        "tensor": Key(int, "Devices that split heads and vocabulary; -1 takes the rest.", "[-1, inf)"),
        "seq": Key(int, "Devices that split lengths; -1 takes the rest.", "[-1, inf)"),
    }),
    **_keys("train", {}, {
        "steps": Key(int, "Steps of the optimiser in all; a run may be given more later.", "[1, inf)"),
        "accumulate": Key(int, "Parts that a batch is computed in.", "[1, inf)"),
        "ema_decay": Key(float, "Of averaged parameters; none keeps none.", "[0, 1)", none=True),
        "prng": Key(str, "JAX's random implementation; none is its default.", choices=_PRNGS, none=True),
        "log_every": Key(int, "Steps between lines of the log.", "[1, inf)"),
        "eval_every": Key(int, "Steps between evaluations; 0 is only at the end.", "[0, inf)"),
        "compute_dtype": Key(str, "What parameters are cast to for a step.",
                             choices=("float32", "bfloat16"), needed=False),
    }),
    **_keys("checkpoint", {}, {
        "every": Key(int, "Steps between checkpoints.", "[1, inf)"),
        "keep": Key(int, "How many of the newest stay.", "[1, inf)"),
        "best_metric": Key(str, "Metric whose best checkpoint stays too.", choices=_METRICS, none=True),
        "best_mode": Key(str, "Which value of it is best.", choices=("max", "min")),
    }),
    **_keys("evaluate", {}, {
        "examples": Key(int, "Validation sentences translated while training; 0 is none.", "[0, inf)"),
        "bleu_tokenize": Key(str, "sacreBLEU's tokenizer, such as char or ja-mecab.", none=True),
        "decoding.num_beams": Key(int, "1 is greedy.", "[1, inf)"),
        "decoding.length_penalty": Key(float, "Larger favours longer texts.", "[0, inf)"),
        "decoding.max_new_tokens": Key(
            int, "The most tokens; none is data.target_len.", "[2, inf)", none=True
        ),
        "decoding.rows": Key(int, "Sentences decoded together.", "[1, inf)"),
        "alignment.choose": Key(bool, "Choose the other alignment keys on validation pairs."),
        "alignment.layer": Key(int, "Decoder layer whose attention is read; -1 is the last."),
        "alignment.head": Key(int, "Its head; none is the mean of all.", none=True),
        "alignment.row": Key(str, "Which row stands for a target token.", choices=tuple(ROWS)),
        "alignment.symmetrise": Key(str, "How both directions are joined.", choices=_SYMMETRISED),
        "alignment.unlinked": Key(bool, "A target word may stay without a link."),
        "alignment.least": Key(float, "Attention below which a source word stays alone.", "[0, 1]"),
    }),
}  # fmt: skip


def is_key(name: str) -> bool:
    """Whether there is such a key, or such a section."""
    return name in KEYS or any(key.startswith(f"{name}.") for key in KEYS)


def suggestion(name: str, known: Iterable[str] = KEYS) -> str:
    """``; did you mean ...?`` with the known name that comes nearest, or a semicolon."""
    known = list(known)
    last = name.rpartition(".")[2]
    # A key under its own name but in another section comes before one that only looks alike.
    near = [key for key in known if key.rpartition(".")[2] == last]
    near += get_close_matches(name, known, n=1, cutoff=0.75)
    near += [key for key in known if get_close_matches(last, [key.rpartition(".")[2]], cutoff=0.75)]
    return f"; did you mean {near[0]}?" if near else ";"
