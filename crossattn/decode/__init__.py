"""Generation: greedy and beam search over any model with ``start`` and ``step``."""

from crossattn.decode.beam import beam_search
from crossattn.decode.generate import attention_of, generate, translate
from crossattn.decode.greedy import greedy
from crossattn.decode.hypotheses import Hypotheses

__all__ = ["Hypotheses", "attention_of", "beam_search", "generate", "greedy", "translate"]
