"""Generation over any model with ``prefill`` and ``decode_step``; ``states`` says what those promise.

``generate`` runs a model; ``greedy``, ``sample``, ``beam_search``, ``contrastive_search`` and
``speculative`` are the searches. They share a ``GenerationConfig`` (lengths, prefix, special tokens), a
list of logits processors (``sampling``, ``constraints``, functions of your own) and a ``Capture`` of
attention.
"""

from crossattn.decode import constraints, penalties, sampling, stopping
from crossattn.decode.beam import beam_search
from crossattn.decode.buckets import Bucketed
from crossattn.decode.capture import Capture
from crossattn.decode.config import GenerationConfig
from crossattn.decode.contrastive import contrastive_search
from crossattn.decode.drafts import ModelDraft, PromptLookup
from crossattn.decode.generate import attention_of, generate
from crossattn.decode.greedy import greedy, sample
from crossattn.decode.hypotheses import Hypotheses
from crossattn.decode.processors import Context, LogitsProcessor
from crossattn.decode.speculative import speculative
from crossattn.decode.states import DecodingStates

__all__ = [
    "Bucketed",
    "Capture",
    "Context",
    "DecodingStates",
    "GenerationConfig",
    "Hypotheses",
    "LogitsProcessor",
    "ModelDraft",
    "PromptLookup",
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
]
