"""Pictures of attention weights: arrays and tokens in, a matplotlib figure out.

Only drawing imports matplotlib (`pip install matplotlib`).
"""

from crossattn.viz.alignment import alignment, gallery, heads
from crossattn.viz.checks import GlyphWarning
from crossattn.viz.page import page
from crossattn.viz.pictures import captions, growth, patches
from crossattn.viz.speech import speech
from crossattn.viz.statistics import statistics
from crossattn.viz.writing import save

__all__ = [
    "GlyphWarning",
    "alignment",
    "captions",
    "gallery",
    "growth",
    "heads",
    "page",
    "patches",
    "save",
    "speech",
    "statistics",
]
