"""What a checkpoint's ``config.json`` says, with errors for people."""

import json
from pathlib import Path
from typing import Any, cast

from crossattn.nn.blocks import BlockConfig
from crossattn.nn.feedforward import Activation
from crossattn.weights.safetensors import CheckpointError

# "gelu" of transformers has the error function; ours of that name is the approximation.
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "silu": "silu",
    "swish": "silu",
}
_GATED = {
    "relu": "reglu",
    "gelu": "geglu",
    "gelu_exact": "geglu_exact",
    "silu": "swiglu",
}


class Settings(dict[str, Any]):
    """A config as a dict; what is asked for and missing is an error."""

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"config.json lacks {key}.")

    def activation(self, key: str, default: str | None = None, gated: bool = False) -> Activation:
        """Our name of the activation that this entry names.

        Raises:
          CheckpointError: it is unknown.
        """
        name = self[key] if default is None else self.get(key, default)
        if name not in _ACTIVATIONS:
            raise CheckpointError(
                f"config.json has {key} {name!r}; expected one of {', '.join(_ACTIVATIONS)}."
            )
        ours = _ACTIVATIONS[name]
        return cast(Activation, _GATED[ours] if gated else ours)

    def refuse(self, key: str, *allowed: Any) -> None:
        """Raises CheckpointError when an entry asks for what the models here do not do."""
        if key in self and self[key] not in allowed:
            raise CheckpointError(
                f"config.json has {key} {self[key]!r}, which is not supported; expected {allowed[0]!r}."
            )


def read_settings(path: Path) -> tuple[str, Settings]:
    """The text of a JSON file, and what it holds.

    Raises:
      CheckpointError: there is no such file, or it is no JSON object.
    """
    try:
        text = path.read_bytes().decode("utf-8")  # line ends as they are
        found = json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}.") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no JSON object.")
    return text, Settings(found)


def bart_block(settings: Settings, half: str, **others: Any) -> BlockConfig:
    """A block of the ``encoder`` or ``decoder`` of BART and all whose config is like BART's."""
    return BlockConfig(
        dim=settings["d_model"],
        num_heads=settings[f"{half}_attention_heads"],
        mlp_dim=settings[f"{half}_ffn_dim"],
        activation=settings.activation("activation_function", "gelu"),
        norm_epsilon=1e-5,
        dropout_rate=settings.get("dropout", 0.1),
        attention_dropout_rate=settings.get("attention_dropout", 0.0),
        mlp_dropout_rate=settings.get("activation_dropout", 0.0),
        **others,
    )
