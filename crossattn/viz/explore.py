"""A page to explore attention: one HTML file that needs no network, alone or in a cell of a notebook.

The page has its data in it: weights in 8 bits with a scale a row, so that a weight is off by at most 1/510 of
the largest of its row. Its style and scripts are the files of ``explorer``.
"""

import base64
import hashlib
import html
import json
import math
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from crossattn.viz import pixels
from crossattn.viz.checks import (
    checked_boxes,
    checked_image,
    checked_tokens,
    checked_weights,
    right_to_left,
)
from crossattn.viz.writing import write_whole

LARGEST = 2_000_000
"""Bytes that a page stays under."""

_PLACES = 100, 500  # of a sound: neighbours are added up beyond
_CELLS = 800_000  # of all heads and words of a sound; more are thinned to the fewest places
_SCRIPTS = ("weights.js", "memories.js", "page.js", "ask.js")
_LEVELS = 255


@dataclass(frozen=True)
class Patches:
    """Picture as the memory: S patches in a grid, row by row.

    Attributes:
      image: [H, W], [H, W, 1] or [H, W, 3], uint8, or floats from 0 to 1.
      grid: its rows and columns of patches, S together.
    """

    image: ArrayLike
    grid: tuple[int, int]


@dataclass(frozen=True)
class Sound:
    """Sound as the memory: S places of equal length.

    Attributes:
      spectrogram: [F, M], frames and bands, such as ``data.mel.log_mel``.
      seconds: its length.
      times: [T, 2], start and end of each word in seconds; a click plays from the start. Without them, from
        the place that the word reads most.
      audio: [samples], floats from -1 to 1, which the page plays; None is no sound.
      rate: samples a second.
    """

    spectrogram: ArrayLike
    seconds: float
    times: ArrayLike | None = None
    audio: ArrayLike | None = None
    rate: int = 16_000


@dataclass(frozen=True)
class Regions:
    """Page as the memory: S regions, which are also the readers.

    Attributes:
      image: [H, W], [H, W, 1] or [H, W, 3], uint8, or floats from 0 to 1.
      boxes: [S, 4], left, top, right and bottom in fractions of the page.
    """

    image: ArrayLike
    boxes: ArrayLike


@dataclass(frozen=True)
class Knockouts:
    """Probabilities of the tokens of a text, with all heads and without each one.

    Attributes:
      whole: probabilities with all heads, [T].
      probabilities: the same without head n of layer l, [L, N, T].
      likeliest: the likeliest token at each place without the head, nested lists of L, N and T strings; None
        is not shown.
      likeliest_whole: the same with all heads, T strings; None is the text itself.
    """

    whole: ArrayLike
    probabilities: ArrayLike
    likeliest: Sequence[Sequence[Sequence[str]]] | None = None
    likeliest_whole: Sequence[str] | None = None


@dataclass(frozen=True)
class Explorer:
    """Page of one or several views, which a notebook shows; ``a + b`` has the views of both.

    Attributes:
      views: the data of each, as the scripts read them.
      title: a line above all.
      ask: for a server: "label" of the line to type into, "longest" in characters or bytes, and "accept", the
        kinds of files, where the line chooses one.
    """

    views: tuple[dict[str, Any], ...]
    title: str = "Attention"
    ask: dict[str, Any] | None = None

    def __add__(self, other: "Explorer") -> "Explorer":
        return replace(self, views=self.views + other.views)

    @cached_property
    def html(self) -> str:
        """The page.

        Raises:
          ValueError: it has 2 MB or more.
        """
        script = "".join(_file(name) for name in _SCRIPTS)
        data = to_json({"views": self.views, "ask": self.ask})
        text = string.Template(_file("page.html")).substitute(
            title=html.escape(self.title.encode("utf-8", "replace").decode()),
            policy=_policy(f"\n{script}\n"),
            style=_file("page.css"),
            data=data,
            script=script,
        )
        size = len(text.encode())
        if size >= LARGEST:
            raise ValueError(
                f"the page would have {size / 1e6:.1f} MB, and is to stay under {LARGEST / 1e6:g}; give "
                "fewer views, layers or heads, a shorter text or sound, or a smaller picture."
            )
        return text

    def save(self, path: Any) -> Path:
        """Writes the page, whole or not at all, making the folder if needed; returns the path.

        Raises:
          ValueError: the suffix is not .html, or the page has 2 MB or more.
        """
        path = Path(path)
        if path.suffix.lower() != ".html":
            raise ValueError(f"{path.name!r} must end in .html")
        return write_whole(path, self.html.encode())

    def _repr_html_(self) -> str:
        """Returns the frame that a notebook shows, apart from the notebook's own page."""
        label, inside = html.escape(self.title, quote=True), html.escape(self.html, quote=True)
        style = "width: 100%; height: 720px; border: 0"
        return f'<iframe title="{label}" sandbox="allow-scripts" style="{style}" srcdoc="{inside}"></iframe>'


def explore(
    weights: ArrayLike | None,
    source: Sequence[str] | Patches | Sound | Regions,
    target_tokens: Sequence[str],
    *,
    knockouts: Knockouts | None = None,
    name: str | None = None,
    title: str = "Attention",
) -> Explorer:
    """Makes a page to explore what each target token reads of the source.

    A token that begins with "▁" begins a word; where no token does, each is a word.

    Args:
      weights: [T, S], [N, T, S] or [L, N, T, S], 0 or more.
      source: S tokens, or a picture, a sound, or the regions of a page. Neighbours in a sound are added up
        where it has more than 500 places, or fewer in many heads and words.
      target_tokens: T strings; the names of the regions for ``Regions``.
      knockouts: what the model says without each head; a click shows it.
      name: of the view, where a page has several; the target's text if left out.
      title: a line above all.

    Raises:
      ValueError: an array has another shape, is negative or not finite, does not fit the tokens, or the page
        would have 2 MB or more.
    """
    if weights is None:
        raise ValueError("weights is None; call the model with return_weights=True")
    values = checked_weights(weights, "T, S", "N, T, S", "L, N, T, S")
    values = values.reshape((1,) * (4 - values.ndim) + values.shape)
    if values.min() < 0:
        raise ValueError(f"weights has {values.min():g}; expected attention, numbers of 0 or more")
    T, S = values.shape[2:]
    read = source if isinstance(source, Sequence) else [""] * S
    checked_tokens(values.shape, read, target_tokens)
    tokens = _tokens(target_tokens)
    kind, memory, values = _memory(source, values, T)
    words = [" " * begins + token for token, begins in tokens if token[:1] != "<"]
    shown = name or "".join(words).strip() or "text"
    view = {
        "kind": kind,
        "name": shown if len(shown) <= 60 else f"{shown[:59]}…",
        "tokens": tokens,
        "rtl": right_to_left(target_tokens),
        "memory": memory,
        "shape": values.shape,
        **quantised(values),
    }
    if knockouts is not None:
        view["knockouts"] = _knocked(knockouts, values.shape[:3], target_tokens)
    made = Explorer((view,), title)
    _ = made.html  # refuses a page that is too large
    return made


def quantised(values: np.ndarray) -> dict[str, str]:
    """Returns weights [L, N, T, S] as bytes, and the float32 scale of each row that 255 stands for."""
    scale = values.max(-1).astype(np.float32)
    levels = np.rint(values / np.where(scale > 0, scale, 1)[..., None] * _LEVELS)
    return {"weights": _coded(levels.clip(0, _LEVELS).astype(np.uint8)), "scale": _coded(scale)}


def to_json(value: Any) -> str:
    """Returns JSON in ASCII, without the characters that could end a script or an attribute."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&'"})


def _memory(source: Any, values: np.ndarray, T: int) -> tuple[str, dict[str, Any], np.ndarray]:
    """Returns the kind, the data and the weights of a memory."""
    S = values.shape[-1]
    if isinstance(source, Patches):
        rows, columns = source.grid
        if rows * columns != S:
            raise ValueError(f"grid is {rows} x {columns} patches, but weights has {S} columns (S)")
        return "picture", _picture(source.image) | {"grid": [rows, columns]}, values
    if isinstance(source, Regions):
        boxes = checked_boxes(source.boxes)
        if not len(boxes) == S == T:
            raise ValueError(
                f"boxes has {len(boxes)} regions, but weights has {T} rows and {S} columns"
            )
        return "page", _picture(source.image) | {"boxes": boxes.round(4).tolist()}, values
    if isinstance(source, Sound):
        return "sound", _sound(source, T), _thinned(values)
    return "words", {"tokens": _tokens(source), "rtl": right_to_left(source)}, values


def _picture(image: ArrayLike) -> dict[str, Any]:
    shown = checked_image(image)
    return {"image": pixels.data_uri(shown), "size": [shown.shape[1], shown.shape[0]]}


def _sound(sound: Sound, T: int) -> dict[str, Any]:
    frames = np.asarray(sound.spectrogram, np.float64)
    if frames.ndim != 2 or not frames.size or not np.isfinite(frames).all():
        raise ValueError(
            f"spectrogram has shape {list(frames.shape)}; expected [F, M], finite numbers"
        )
    if not (math.isfinite(sound.seconds) and sound.seconds > 0):
        raise ValueError(f"seconds is {sound.seconds}; expected more than 0")
    low, high = np.quantile(frames, [0.05, 0.995])  # silence and clicks would take the contrast
    shown = {
        "image": pixels.data_uri(
            ((frames - low) / ((high - low) or 1)).clip(0, 1).T[::-1], square=False
        ),
        "seconds": float(sound.seconds),
    }
    if sound.times is not None:
        times = np.asarray(sound.times, np.float64)
        if times.shape != (T, 2) or not np.isfinite(times).all():
            raise ValueError(f"times has shape {list(times.shape)}; expected [{T}, 2], in seconds")
        shown["times"] = times.round(3).tolist()
    if sound.audio is not None:
        audio = np.asarray(sound.audio, np.float64)
        if audio.ndim != 1 or not np.isfinite(audio).all():
            raise ValueError(
                f"audio has shape {list(audio.shape)}; expected [samples], finite numbers"
            )
        shown["audio"] = {"rate": int(sound.rate), "samples": _coded(_mu_law(audio))}
    return shown


def _mu_law(audio: np.ndarray) -> np.ndarray:
    """Returns samples from -1 to 1 as 256 levels. Source: ITU-T G.711, its formula with mu = 255."""
    loud = np.log1p(255 * np.abs(audio).clip(0, 1)) / math.log(256)
    return np.rint((np.sign(audio) * loud + 1) * 127.5).astype(np.uint8)


def _thinned(values: np.ndarray) -> np.ndarray:
    """Adds up neighbours of a sound, which keeps the sum of a row."""
    places = np.clip(_CELLS // math.prod(values.shape[:3]), *_PLACES)
    width = -(-values.shape[-1] // int(places))
    missing = -values.shape[-1] % width
    padded = np.pad(values, ((0, 0), (0, 0), (0, 0), (0, missing)))
    return padded.reshape(*values.shape[:-1], -1, width).sum(-1)


def _knocked(knockouts: Knockouts, shape: Sequence[int], tokens: Sequence[str]) -> dict[str, Any]:
    whole = checked_weights(knockouts.whole, "T", name="whole")
    without = checked_weights(knockouts.probabilities, "L, N, T", name="probabilities")
    if without.shape != tuple(shape) or whole.shape != without.shape[-1:]:
        raise ValueError(
            f"knockouts have probabilities of shape {list(without.shape)} and whole {list(whole.shape)}; "
            f"expected {list(shape)} and {list(shape[-1:])}, those of the weights"
        )
    if min(whole.min(), without.min()) < 0 or max(whole.max(), without.max()) > 1.001:
        raise ValueError("knockouts have numbers outside 0 to 1; expected probabilities")
    floor = 1e-9
    loss = (np.log(without + floor) - np.log(whole + floor)).mean(-1)
    found: dict[str, Any] = {
        "whole": whole.round(4).tolist(),
        "probabilities": without.round(4).tolist(),
        "loss": loss.round(4).tolist(),
    }
    if knockouts.likeliest is not None:
        usual = tokens if knockouts.likeliest_whole is None else knockouts.likeliest_whole
        lengths = {len(own) for layer in knockouts.likeliest for own in layer} | {len(usual)}
        heads = [len(layer) for layer in knockouts.likeliest]
        if heads != [shape[1]] * shape[0] or lengths != {shape[2]}:
            raise ValueError(f"likeliest is not of {list(shape)} strings, as the weights are")
        found["instead"] = [
            [
                [
                    None if new == old else new.lstrip("▁") or new
                    for new, old in zip(own, usual, strict=True)
                ]
                for own in layer
            ]
            for layer in knockouts.likeliest
        ]
    return found


def _tokens(tokens: Sequence[str]) -> list[tuple[str, bool]]:
    """Returns each token, and whether it begins a word."""
    pieces = any(token.startswith("▁") for token in tokens)
    return [(token.removeprefix("▁") or token, not pieces or token[:1] in "▁<") for token in tokens]


def _policy(script: str) -> str:
    """Returns a policy under which the page runs its own script, and loads nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; media-src blob:; connect-src 'self'; form-action 'none'; base-uri 'none'"
    )


def _coded(array: np.ndarray) -> str:
    little = array.astype(array.dtype.newbyteorder("<"))
    return base64.b64encode(little.tobytes()).decode("ascii")


@cache
def _file(name: str) -> str:
    return resources.files("crossattn.viz").joinpath("explorer", name).read_text(encoding="utf-8")
