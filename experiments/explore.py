"""Explore attention in a browser: a page of HTML, or one with a line to type into.

    python -m experiments.explore --workdir=runs/fr "The black cat sleeps." --out=cat.html
    python -m experiments.explore --workdir=runs/captions cat.png rocket.png
    python -m experiments.explore --workdir=runs/pages 0 12 --split=test
    python -m experiments.explore --model=tiny.en talk.wav --out=talk.html
    python -m experiments.explore --workdir=runs/fr --serve

A run of ``translation`` takes texts, one of ``captioning`` or ``interleaved`` (Flamingo, LLaVA) pictures, one
of ``regions`` numbers of pages. Without ``--workdir``, the Whisper of ``--model`` takes sounds, of which the
first 30 seconds are shown. Texts, captions and transcripts knock heads out. A page is one file of less than
2 MB that needs no network, explore.html without ``--out``. ``--serve`` is for this machine alone, and ends
with Ctrl-C.
"""

import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from crossattn import functional, viz
from crossattn.data.audio import read_audio
from crossattn.data.errors import DataError
from crossattn.data.mel import HOP, RATE
from crossattn.decode.speech.transcript import FRAME
from crossattn.viz.explore import Explorer
from experiments import inputs, launch
from experiments.caption import language_of
from experiments.runs import BASE, MEMBER, NUM_BEAMS, SPLIT, STEP, open_run
from experiments.serving import PageServer
from experiments.tasks.captioning import CaptioningTask
from experiments.tasks.generation import without_each_head
from experiments.tasks.interleaved import InterleavedTask
from experiments.tasks.regions import RegionsTask
from experiments.tasks.translation import TranslationTask
from experiments.transcribe import LANGUAGE, MODEL, frames_of, open_whisper

_SERVE = flags.DEFINE_bool("serve", False, "Serve the page on 127.0.0.1, with a line to type into.")
_PORT = flags.DEFINE_integer(
    "port", 8000, "Of --serve; 0 is any free one.", lower_bound=0, upper_bound=65535
)
FLAGS = (
    launch.CONFIG, launch.WORKDIR, STEP, MEMBER, BASE, MODEL, LANGUAGE, NUM_BEAMS, SPLIT,
    launch.OUT, _SERVE, _PORT,
)  # fmt: skip
_TEXT, _FILE = 2000, 10_000_000  # characters of a text, bytes of a file, that a page may send


@dataclass(frozen=True)
class Reader:
    """A model that reads what it is given, a text, or the path or bytes of a file, and shows what it read.

    Attributes:
      read: from one of them to its page.
      title: of the page.
      label: of the line to type into.
      accept: kinds of files, comma separated; "" is a text.
    """

    read: Callable[[Any], Explorer]
    title: str
    label: str
    accept: str = ""

    @property
    def ask(self) -> dict[str, Any]:
        """The line to type into, as the page reads it."""
        return dict(label=self.label, accept=self.accept, longest=_FILE if self.accept else _TEXT)

    def answer(self, body: bytes, name: str) -> dict[str, Any]:
        """Returns the views of a text or a file that the page sent."""
        if self.accept:
            given: Any = io.BytesIO(body)
            given.name = name or "the file"
        else:
            given = body.decode("utf-8", "replace").strip()
            if not given or len(given) > _TEXT:
                raise launch.Refused(
                    f"the text has {len(given)} characters; expected 1 to {_TEXT}."
                )
        return {"views": self.read(given).views}


def main(arguments: Sequence[str]) -> int:
    launch.keep_compiled()
    out = Path(launch.OUT.value or "explore.html")
    if not _SERVE.value:
        if not arguments:
            raise launch.Refused(
                "got nothing to read; give texts, pictures or sounds, or --serve to type on the page."
            )
        if out.suffix.lower() != ".html":
            raise launch.Refused(f"--out names {out}; expected a name that ends in .html.")
        launch.writable(out)
    reader = _reader()
    pages = [_read(reader, each) for each in arguments]
    views = tuple(itertools.chain.from_iterable(page.views for page in pages))
    page = Explorer(views, reader.title, reader.ask if _SERVE.value else None)
    try:
        html = page.html
    except ValueError as error:
        raise launch.Refused(str(error)) from None
    if not _SERVE.value:
        page.save(out)
        print(f"{out}: {len(html.encode()) / 1e3:.0f} kB")
        return 0
    longest = reader.ask["longest"] if reader.accept else 4 * _TEXT
    with PageServer(html, reader.answer, _PORT.value, longest) as server:
        print(f"open {server.address} in a browser; Ctrl-C ends", flush=True)
        server.serve_forever()
    return 0


def _read(reader: Reader, given: str) -> Explorer:
    try:
        return reader.read(given)
    except DataError:
        raise  # which names what was given
    except ValueError as error:
        raise launch.Refused(f"{given}: {error}") from None


def _reader() -> Reader:
    if not launch.WORKDIR.value:
        return sounds_of()
    _, task, params = open_run(TranslationTask, CaptioningTask, InterleavedTask, RegionsTask)
    if isinstance(task, TranslationTask):
        return texts_of(task, params)
    return (pages_of if isinstance(task, RegionsTask) else pictures_of)(task, params)


def texts_of(task: Any, params: Any) -> Reader:
    if getattr(task.model_config, "attention", "") is None:
        raise launch.Refused("this model has no cross-attention, so there is nothing to explore.")
    options = {} if NUM_BEAMS.value is None else {"num_beams": NUM_BEAMS.value}
    translator = task.translator(params, **options)

    def read(text: str) -> Explorer:
        (written,) = translator.texts([text])
        if translator.cut_sources:
            raise launch.Refused(
                f"the text is longer than the {translator.source_len} tokens that this run reads; give its"
                " sentences one by one."
            )
        pair = (text, written)
        (seen,), knocked = translator.attention([pair]), translator.knockouts([pair])
        shape = seen.weights.shape[:2]
        outs = None
        if knocked is not None and knocked[0].heads == shape:
            outs = _knocked(knocked[0].probabilities, knocked[0].likeliest, shape)
        return viz.explore(
            seen.weights, seen.source_tokens, seen.target_tokens, knockouts=outs, name=text
        )

    return Reader(read, f"What each word of a {task.written} reads", "A text to read")


def _knocked(
    probabilities: np.ndarray, likeliest: Sequence[Sequence[str]], shape: tuple[int, int]
) -> viz.Knockouts:
    """Returns what is said with all heads, and without each of [L N], of [1 + L N, T]."""
    L, N = shape
    instead = [likeliest[1 + layer * N : 1 + (layer + 1) * N] for layer in range(L)]
    by_head = probabilities[1:].reshape(L, N, -1)
    return viz.Knockouts(probabilities[0], by_head, instead, likeliest[0])


def pictures_of(task: Any, params: Any) -> Reader:
    launch.need("PIL", install="crossattn[images]")
    prompt = np.array([task.prompt_in(language_of(task, LANGUAGE.value))], np.int32)
    writer, weights = task.writer(params, NUM_BEAMS.value), task.head_weights(params)
    without = task.without_heads(params) if isinstance(task, CaptioningTask) else None
    first = prompt.shape[1] - 1
    feature = task.features["source"]

    def read(picture: Any) -> Explorer:
        name = getattr(picture, "name", picture)
        value = picture.read() if isinstance(picture, io.BytesIO) else picture
        x = feature.prepare(value)[None]
        ids = writer(x, prompt)[0]
        # Row t belongs to the step that predicts the token after it.
        text = np.concatenate([prompt, ids[None]], 1)
        seen = weights(x, text)[:, 0, :, first:]
        tokens = _names(task, ids.tolist())
        kept = [i for i, token in enumerate(tokens) if token != "<pad>"]
        grid = seen.shape[-2:]
        flat = seen.reshape(*seen.shape[:3], -1)[:, :, kept]
        outs = None
        if without is not None:
            own, likeliest = (each[:, 0, first:][:, kept] for each in without(x, text))
            others = [_names(task, each.tolist()) for each in likeliest]
            outs = _knocked(own, others, seen.shape[:2])
        image = viz.Patches(inputs.shown(feature, value), grid)
        shown = [tokens[i] for i in kept]
        return viz.explore(flat, image, shown, knockouts=outs, name=Path(name).name)

    return Reader(read, "What each word of a caption reads", "A picture to describe", "image/*")


def _names(task: Any, ids: Sequence[int]) -> list[str]:
    """Returns readable tokens, those of languages among them."""
    tokenizer = task.corpus.tokenizer
    known = tokenizer.vocab_size
    return [
        tokenizer.tokens([id])[0] if id < known else f"<{task.languages[id - known]}>" for id in ids
    ]


def pages_of(task: Any, params: Any) -> Reader:
    launch.need("PIL", install="crossattn[images]")
    pages = task.corpus.split(SPLIT.value)

    def read(number: str) -> Explorer:
        if not (number.isascii() and number.isdigit() and int(number) < len(pages)):
            raise launch.Refused(
                f"there is no page {number!r}; the {SPLIT.value} split has 0 to {len(pages) - 1}."
            )
        page = pages[int(number)]
        found = task.read_page(params, page)
        regions = viz.Regions(inputs.pixels(page["pictures"]["page"]), found.boxes)
        names = [f"{i} {name}" for i, name in enumerate(found.classes)]
        return viz.explore(found.weights, regions, names, name=f"page {number}: {page['id']}")

    return Reader(read, "What each region of a page reads", "The number of a page")


def sounds_of() -> Reader:
    launch.need("soundfile", "soxr", install="crossattn[speech]")
    transcriber = open_whisper(MODEL.value, words=True)
    tokens, config = transcriber.tokens, transcriber.build.config
    if LANGUAGE.value or not tokens.multilingual:
        tokens.prefix(LANGUAGE.value, "transcribe", times=True)  # refuses what it does not know
    text = config.transformer
    shape = text.decoder_layers, text.block.attention.num_heads
    every = replace(transcriber, heads=tuple(itertools.product(*map(range, shape))))

    def read(sound: Any) -> Explorer:
        audio = read_audio(sound)[: config.max_frames * HOP]
        frames = frames_of(audio, transcriber)
        (transcript,) = transcriber([frames], LANGUAGE.value)
        words = [word for word in transcript.words if word.text.strip()]
        if not words:
            raise launch.Refused("nothing was said, so there is nothing to explore.")
        seen = every.head_attention(frames, [word.text for word in words], transcript.language)
        times = [[word.start, word.end] for word in words]
        memory = viz.Sound(frames, len(frames) * FRAME, times, audio, RATE)
        name = Path(getattr(sound, "name", sound)).name
        weights = seen.reshape(*shape, *seen.shape[1:])
        texts = [word.text for word in words]
        outs = _unheard(transcriber, frames, texts, transcript.language, shape)
        said = [word.text.strip() for word in words]
        return viz.explore(weights, memory, said, knockouts=outs, name=name)

    return Reader(read, "What each word of a transcript hears", "A sound to write down", "audio/*")


def _unheard(
    transcriber: Any, frames: np.ndarray, words: Sequence[str], language: str, shape: tuple
) -> viz.Knockouts:
    """Returns the probabilities of words, products of those of tokens; 1 beyond the model's positions."""
    tokens, config = transcriber.tokens, transcriber.build.config
    ids = [tokens.encode(word) for word in words]
    before = tokens.prefix(language, transcriber.task, times=False)
    longest = config.transformer.max_length
    text = [*before, *itertools.chain.from_iterable(ids)][:longest]
    size = min(-(-len(text) // 32) * 32, longest)  # a program for each
    padded = np.full(size, tokens.end, np.int32)
    padded[: len(text)] = text
    window = np.pad(frames, ((0, config.max_frames - len(frames)), (0, 0)))
    found = jax.device_get(_without(transcriber.build, transcriber.params, window, padded))
    ends = np.cumsum([len(before) - 1, *map(len, ids)])
    parts = list(itertools.pairwise(ends.tolist()))
    own, likeliest = found
    products = np.stack([own[:, a:b].prod(1) for a, b in parts], 1)
    said = [[tokens.decode(each[a:b].tolist()).strip() for a, b in parts] for each in likeliest]
    return _knocked(products, said, shape)


@partial(jax.jit, static_argnames="build")
def _without(build: Any, params: Any, frames: Any, text: Any) -> Any:
    model = functional.bind(build, params)
    encoded = model.encode(frames[None]).vectors

    def logits(edited: Any) -> Any:
        states = edited.prefill(1, 1, len(text), encoded=encoded)
        return edited.decode_step(text[None, None, :-1], states)[0][0, 0]

    return without_each_head(model, "decoder.cross.heads", logits, text[1:])


if __name__ == "__main__":
    launch.run(main)
