"""Pictures of attention weights: arrays and tokens in, a matplotlib figure or a page of HTML out.

Only drawing imports matplotlib (`pip install matplotlib`); ``explore`` needs nothing.
"""

from crossattn.viz.alignment import alignment, gallery, heads
from crossattn.viz.checks import GlyphWarning
from crossattn.viz.explore import Explorer, Knockouts, Patches, Regions, Sound, explore
from crossattn.viz.page import page
from crossattn.viz.pictures import captions, growth, patches
from crossattn.viz.speech import speech
from crossattn.viz.statistics import statistics
from crossattn.viz.texts import texts
from crossattn.viz.writing import save

__all__ = [
    "Explorer",
    "GlyphWarning",
    "Knockouts",
    "Patches",
    "Regions",
    "Sound",
    "alignment",
    "captions",
    "explore",
    "gallery",
    "growth",
    "heads",
    "page",
    "patches",
    "save",
    "speech",
    "statistics",
    "texts",
]
