"""Analysis of attention: what it does, told from its weights."""

from crossattn.analysis import scores

__all__ = ["scores"]
