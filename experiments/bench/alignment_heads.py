"""Heads of a Whisper that follow the sound, chosen by the times of words that espeak-ng tells.

    python -m experiments.bench.alignment_heads
    python -m experiments.bench.alignment_heads base --out=checkpoints/base

A voice reads sentences of LibreOffice's help, the model reads each text with its sound, and heads are chosen
by the error of word times on training sentences (``timing.choose_heads``). Held-out sentences, of the same
voice and of another one, compare the heads of the checkpoint, the chosen ones, all of the upper half of the
layers (openai-whisper's default) and times in proportion to the tokens. Errors are those of begins and of
ends of words. ``--out`` writes the checkpoint with the chosen ``alignment_heads`` in
``generation_config.json``, where ``transformers`` and this library read them.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from crossattn import weights
from crossattn.data.sources import espeak
from crossattn.decode.speech.timing import Timed, choose_heads, sharpened
from crossattn.decode.speech.transcript import TIME
from experiments import launch
from experiments.options import Options
from experiments.transcribe import frames_of, open_whisper

_LETTERS = (40, 200)  # of a sentence
_WITHIN = 0.2  # seconds


def main() -> None:
    """Chooses, compares, writes."""
    parser = Options(__doc__)
    parser.add_argument("model", nargs="?", default="tiny.en", help="as in transcribe; tiny.en")
    parser.add_argument(
        "--voice", metavar="NAME", default="en-us", help="of espeak-ng, to choose by; en-us"
    )
    parser.add_argument(
        "--other",
        metavar="NAME",
        default="en-gb-scotland+f2",
        help="a voice that is not heard before",
    )
    parser.add_argument("--sentences", metavar="N", type=int, default=60, help="to choose by; 60")
    parser.add_argument(
        "--held_out", metavar="N", type=int, default=80, help="sentences to compare on; 80"
    )
    parser.add_argument("--out", metavar="FOLDER", help="folder to write the checkpoint to")
    options = parser.parse_args()
    launch.keep_compiled()
    whisper = open_whisper(options.model)
    layers = whisper.build.config.transformer.decoder_layers
    published = tuple(map(tuple, whisper.build.settings.get("alignment_heads") or ()))
    texts = timed(whisper, sentences("train", options.sentences), options.voice)
    if not texts:
        parser.error("no sentence fits the model's window; give more --sentences.")
    chosen = choose_heads(texts)
    print(f"chosen by {len(texts)} sentences: {[*map(list, chosen)]}", flush=True)
    upper = tuple(
        (i, j) for i in range(layers // 2, layers) for j in range(texts[0].sharp.shape[1])
    )
    for voice in (options.voice, options.other):
        held_out = timed(whisper, sentences("test", options.held_out), voice)
        print(f"{voice}: {len(held_out)} sentences, {sum(len(t.rows) for t in held_out)} words")
        for name, heads in {"published": published, "chosen": chosen, "upper half": upper}.items():
            if heads:
                row(f"{name}, {len(heads)} heads", held_out, lambda text: text.errors(heads))  # noqa: B023
        row("in proportion", held_out, in_proportion)
    if options.out:
        own = json.loads(whisper.build.generation_text or "{}")
        own["alignment_heads"] = [*map(list, chosen)]
        model = replace(whisper.build, generation_text=json.dumps(own, indent=2) + "\n")
        print(f"written: {weights.save(options.out, model, whisper.params)}")


def sentences(split: str, count: int) -> list[str]:
    """Returns sentences of a split at equal distances, in small letters."""
    few, many = _LETTERS
    texts = [text for text in espeak.all_sentences() if few <= len(text) <= many]
    return espeak.spread([text for text in texts if espeak.split_of(text) == split], count)


def timed(whisper: Any, texts: Sequence[str], voice: str) -> list[Timed]:
    """Returns what all heads do while a voice reads the texts, of those that fit a window."""
    transformer, found = whisper.build.config.transformer, []
    L, N = transformer.decoder_layers, transformer.block.attention.num_heads
    every = replace(whisper, heads=tuple((layer, head) for layer in range(L) for head in range(N)))
    for text, (audio, words) in zip(texts, espeak.timed(texts, voice), strict=True):
        frames = frames_of(audio, whisper)
        ids = whisper.tokens.encode(" " + text.capitalize())
        rows = rows_of(whisper.tokens.words(ids, "en"), [word.text for word in words])
        if rows is None or len(frames) > whisper.build.config.max_frames:
            continue
        weights, first = every.follow(frames, ids)
        sharp = np.stack([sharpened(head[None])[first:-1] for head in weights])
        times = np.array([word[1:] for word in words]) / TIME
        found.append(Timed(sharp.reshape(L, N, *sharp.shape[1:]), rows, times))
    return found


def rows_of(words: Sequence[tuple[str, Sequence[int]]], spoken: Sequence[str]) -> np.ndarray | None:
    """Returns the tokens [W 2] at which spoken words begin and end; None if they are not cut alike."""
    letters = np.cumsum([0, *(len(_letters(text)) for text, _ in words)])
    tokens = np.cumsum([0, *(len(ids) for _, ids in words)])
    edges = np.cumsum([0, *(len(_letters(text)) for text in spoken)])
    begins = (
        np.searchsorted(letters, edges[:-1], side="right") - 1
    )  # marks before a word are not its own
    ends = np.searchsorted(letters, edges[1:])
    cut_alike = np.array_equal(letters[begins], edges[:-1]) and edges[-1] == letters[-1]
    if not cut_alike or not np.array_equal(letters[ends], edges[1:]):
        return None
    return np.stack([tokens[begins], tokens[ends]], axis=1)


def _letters(text: str) -> str:
    return re.sub("[^a-z]", "", text.lower())


def in_proportion(text: Timed) -> np.ndarray:
    """Returns the errors of times that give every token the same part of the sound."""
    T, S = text.sharp.shape[2:]
    return np.abs(text.rows / (T - 1) * S - text.times)


def row(name: str, texts: Sequence[Timed], errors: Callable[[Timed], np.ndarray]) -> None:
    """Prints the errors of all words."""
    apart = TIME * np.concatenate([errors(text) for text in texts])
    within = 100 * np.mean(apart <= _WITHIN)
    print(
        f"  {name:<22} mean {1000 * apart.mean():4.0f} ms (begins {1000 * apart[:, 0].mean():4.0f}, ends "
        f"{1000 * apart[:, 1].mean():4.0f}), within 200 ms {within:5.1f} %",
        flush=True,
    )


if __name__ == "__main__":
    launch.script(main)
