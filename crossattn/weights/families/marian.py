"""Marian and Pegasus: BART with sinusoids for positions and no norm of the embeddings."""

from typing import Any

from crossattn.weights.families import bart
from crossattn.weights.rules import Names, Rules
from crossattn.weights.settings import Settings

PREFIX = bart.PREFIX


def configure(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    """Module, config and rules of this checkpoint. Pegasus is pre-norm."""
    return bart.family(
        settings,
        names,
        norm_first=settings["model_type"] == "pegasus",
        positions="sinusoidal",
        norm_epsilon=None,
        # Marian learns it, and a model saved without its head has lost it.
        needs_bias=settings.get("architectures") == ["MarianModel"],
        dtype=dtype,
    )
