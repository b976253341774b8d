"""Reads and checks a checkpoint's ``config.json``."""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from crossattn.nn.feedforward import Activation
from crossattn.nn.sublayers import BlockConfig
from crossattn.weights.formats.safetensors import CheckpointError

# "gelu" is exact in transformers; ours of that name is the approximation.
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}
_GATED = {"relu": "reglu", "gelu": "geglu", "gelu_exact": "geglu_exact", "silu": "swiglu"}

# Entries that are sizes or counts.
_SIZE = re.compile(
    r"(.*_)?(d_model|d_ff|d_kv|d_latents|head_dim|projection_dim|latents|channels|blocks|per_block|widening_factor|n_embd|n_inner|n_positions|n_head|n_layer|vocab_size|num_mel_bins|layers|"
    r"heads|\w+_size|ffn_dim|num_buckets|max_distance|\w+_positions|\w+_position_embeddings)"
)
_LARGEST = 2**31 - 1
# Entries that are other numbers.
_NUMBER = re.compile(r"(.*_)?(eps|epsilon|dropout|prob|rate|pdrop|theta|factor|beta_\w+|mscale\w*)")

# Entries that are configs of a part of the model.
_NESTED = (
    "encoder", "decoder", "text_config", "vision_config", "text_config_dict", "vision_config_dict",
    "rope_parameters", "rope_scaling",
)  # fmt: skip


class Settings(dict[str, Any]):
    """A config; reading a missing entry raises CheckpointError."""

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"config.json lacks {key}.")

    @property
    def architecture(self) -> str:
        """The class of the model in ``transformers``; "" is unknown."""
        return str((self.get("architectures") or [""])[0])

    @property
    def num_labels(self) -> int:
        """The number of classes."""
        labels = self.get("id2label")
        return self.get("num_labels", 2) if labels is None else len(labels)

    def activation(self, key: str, default: str | None = None, gated: bool = False) -> Activation:
        """Returns our name of the activation in this entry.

        Raises:
          CheckpointError: it is unknown.
        """
        name = self[key] if default is None else self.get(key, default)
        known = [name for name, ours in _ACTIVATIONS.items() if ours in _GATED or not gated]
        if name not in known:
            raise CheckpointError(
                f"config.json has {key} {name!r}; expected one of {', '.join(known)}."
            )
        ours = _ACTIVATIONS[name]
        return cast(Activation, _GATED[ours] if gated else ours)

    def refuse(self, key: str, *allowed: Any) -> None:
        """Raises CheckpointError if an entry has another value than those that are supported."""
        if key in self and self[key] not in allowed:
            raise CheckpointError(
                f"config.json has {key} {self[key]!r}, which is not supported; expected {allowed[0]!r}."
            )


def read_settings(path: Path) -> tuple[str, Settings]:
    """Reads a JSON file: its text and its object.

    Raises:
      CheckpointError: there is no such file, or it is no JSON object.
    """
    try:
        text = path.read_bytes().decode("utf-8")  # line ends as they are
        settings = json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}.") from None
    except RecursionError:
        raise CheckpointError(
            f"{path} is not JSON that can be read: it is nested too deeply."
        ) from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} is no JSON object.")
    return text, Settings(settings)


def check_numbers(settings: Mapping[str, Any], tensors: int | None = None) -> None:
    """Checks the numbers of a config, which has no more layers than the checkpoint has tensors.

    Raises:
      CheckpointError: a size is no whole number, negative or too large; another number is none, or negative.
    """
    for key, value in settings.items():
        if key in _NESTED and isinstance(value, dict):
            check_numbers(value, tensors)
        elif key.startswith(("use_", "dola_")) or value is None:
            continue
        elif _SIZE.fullmatch(key):
            of_layers = key.endswith(("layers", "n_layer", "per_block")) and key[:4] != "max_"
            most = _LARGEST if tensors is None or not of_layers else tensors
            # Pictures have height and width.
            several = isinstance(value, list) and key.endswith("_size")
            sizes = value if several else [value]
            if not all(type(size) is int and 0 <= size <= most for size in sizes):
                raise CheckpointError(
                    f"config.json has {key} {value!r}; expected a whole number from 0 to {most}"
                    + (", as many as there are tensors." if most != _LARGEST else ".")
                )
        elif _NUMBER.fullmatch(key) and not (type(value) in (int, float) and 0 <= value < math.inf):
            raise CheckpointError(f"config.json has {key} {value!r}; expected a number, 0 or more.")


@contextlib.contextmanager
def buildable(kind: str = "model") -> Iterator[None]:
    """Turns errors that a config's values cause inside a model into an error about the config.

    Raises:
      CheckpointError: the block raised; the message has its reason.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise CheckpointError(
            f"config.json describes no {kind} that can be built: {reason}."
        ) from error


def bart_block(
    settings: Settings, half: str, *, dropout_rate: float = 0.1, **others: Any
) -> BlockConfig:
    """Returns the block of a half, "encoder" or "decoder", of a model whose config is like BART's."""
    return BlockConfig.of(
        dim=settings["d_model"],
        num_heads=settings[f"{half}_attention_heads"],
        mlp_dim=settings[f"{half}_ffn_dim"],
        activation=settings.activation("activation_function", "gelu"),
        norm_epsilon=1e-5,
        dropout_rate=settings.get("dropout", dropout_rate),
        attention_dropout_rate=settings.get("attention_dropout", 0.0),
        mlp_dropout_rate=settings.get("activation_dropout", 0.0),
        **others,
    )


def bert_block(settings: Settings, *, dropout_rate: float = 0.0, **others: Any) -> BlockConfig:
    """Returns the block of a model whose config is like BERT's."""
    return BlockConfig.of(
        dim=settings["hidden_size"],
        num_heads=settings["num_attention_heads"],
        mlp_dim=settings["intermediate_size"],
        activation=settings.activation("hidden_act", "gelu"),
        norm_epsilon=settings.get("layer_norm_eps", 1e-12),
        dropout_rate=settings.get("hidden_dropout_prob", dropout_rate),
        attention_dropout_rate=settings.get("attention_probs_dropout_prob", dropout_rate),
        **others,
    )


def pair_of(size: int | Sequence[int]) -> tuple[int, int]:
    """Returns height and width of a size that may be one number."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
