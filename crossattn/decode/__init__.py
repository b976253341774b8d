"""Generation over any model with ``prefill`` and ``decode_step``; ``states`` says what those promise.

``generate`` runs a model; ``greedy``, ``sample``, ``beam_search``, ``contrastive_search`` and
``speculative`` are the searches of tokens. They share a ``GenerationConfig`` (lengths, prefix, special
tokens), a list of logits processors (``sampling``, ``constraints``, functions of your own) and a ``Capture``
of attention. ``Simultaneous`` writes while its source arrives, by a policy (``AlignAtt``, ``WaitK``).
``generate_frames`` runs a model of frames, by the search ``UntilStop``. ``diffusion`` draws pictures from
noise, by any model of noisy arrays.
"""

from crossattn.decode import diffusion
from crossattn.decode.buckets import Bucketed
from crossattn.decode.capture import Capture
from crossattn.decode.config import GenerationConfig
from crossattn.decode.generate import attention_of, generate
from crossattn.decode.hypotheses import Hypotheses
from crossattn.decode.logits import constraints, sampling
from crossattn.decode.logits.processors import Context, LogitsProcessor
from crossattn.decode.search import penalties, stopping
from crossattn.decode.search.beam import beam_search
from crossattn.decode.search.contrastive import contrastive_search
from crossattn.decode.search.drafts import ModelDraft, PromptLookup
from crossattn.decode.search.frames import Groups, UntilStop, generate_frames
from crossattn.decode.search.greedy import greedy, sample
from crossattn.decode.search.simultaneous import AlignAtt, Simultaneous, SoFar, WaitK, write_along
from crossattn.decode.search.speculative import speculative
from crossattn.decode.states import DecodingStates

__all__ = [
    "AlignAtt",
    "Bucketed",
    "Capture",
    "Context",
    "DecodingStates",
    "GenerationConfig",
    "Groups",
    "Hypotheses",
    "LogitsProcessor",
    "ModelDraft",
    "PromptLookup",
    "Simultaneous",
    "SoFar",
    "UntilStop",
    "WaitK",
    "attention_of",
    "beam_search",
    "constraints",
    "contrastive_search",
    "diffusion",
    "generate",
    "generate_frames",
    "greedy",
    "penalties",
    "sample",
    "sampling",
    "speculative",
    "stopping",
    "write_along",
]
