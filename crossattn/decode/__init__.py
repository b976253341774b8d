"""Generation over any model with ``start`` and ``step``.

``translate`` and ``generate`` run a model; ``greedy``, ``sample``, ``beam_search``, ``contrastive_search``
and ``speculative`` are the searches. They share a ``Target`` (lengths, prefix, special tokens), a list of
processors (``sampling``, ``constraints``, functions of your own) and a ``Capture`` of attention.
"""

from crossattn.decode import constraints, penalties, sampling, stopping
from crossattn.decode.beam import beam_search
from crossattn.decode.buckets import Bucketed
from crossattn.decode.capture import Capture
from crossattn.decode.contrastive import contrastive_search
from crossattn.decode.drafts import ModelDraft, PromptLookup
from crossattn.decode.generate import attention_of, generate, translate
from crossattn.decode.greedy import greedy, sample
from crossattn.decode.hypotheses import Hypotheses
from crossattn.decode.processors import Context
from crossattn.decode.speculative import speculative
from crossattn.decode.target import Target

__all__ = [
    "Bucketed",
    "Capture",
    "Context",
    "Hypotheses",
    "ModelDraft",
    "PromptLookup",
    "Target",
    "attention_of",
    "beam_search",
    "constraints",
    "contrastive_search",
    "generate",
    "greedy",
    "penalties",
    "sample",
    "sampling",
    "speculative",
    "stopping",
    "translate",
]
