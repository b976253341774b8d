"""Transcription of long recordings with Whisper, window by window, several recordings at once.

A window is 30 seconds. Its last time token sets where the next window begins; a window that failed is decoded
again at a higher temperature. Each recording is a job of its own (``together``), so recordings share batches.

Source: Radford et al. 2022, section 4.5.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.decode.speech import timing, windows
from crossattn.decode.speech.together import Job, Step, together
from crossattn.decode.speech.transcript import (
    FRAME,
    TIME,
    Piece,
    Segment,
    Transcript,
    Word,
    compression,
    join_punctuation,
    probability,
    split,
)
from crossattn.decode.speech.windows import SpeechTokens
from crossattn.models.whisper import STRIDE
from crossattn.types import AnyArray, Array, Float, Key, Params

_ROUND = 32  # tokens: lengths are rounded to this, since a program is compiled for each


@dataclass(frozen=True)
class Retry:
    """Thresholds at which a window is decoded again or left out.

    Attributes:
      temperatures: temperatures tried in turn; the text of the last is kept in any case.
      compression: largest compression ratio; text above it repeats itself.
      log_p: least mean log-probability; text below it is taken for a guess.
      no_speech: largest no-speech probability of a guessed window; above it the window is left out.
    """

    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    compression: float = 2.4
    log_p: float = -1.0
    no_speech: float = 0.6


@dataclass(frozen=True)
class Transcriber:
    """Whisper model that transcribes recordings.

    Attributes:
      build, params: the model, as ``weights.load`` returns it; ``build`` has a ``config``.
      tokens: vocabulary of the model.
      task: "transcribe", or "translate" into English.
      times: whether to generate time tokens; without them each window is one segment.
      heads: (layer, head) aligned with the sound; if given, every word gets its times.
      previous: whether a window is conditioned on the text of those before.
      retry: thresholds for decoding a window again.
      batch: largest number of windows decoded at once.
      key: key of sampling at higher temperatures; each recording, window and temperature derives its own key
        from it, whatever else is in the batch.
    """

    build: Any
    params: Params
    tokens: SpeechTokens
    task: str = "transcribe"
    times: bool = True
    heads: tuple[tuple[int, int], ...] = ()
    previous: bool = True
    retry: Retry = Retry()
    batch: int = 8
    key: Key[AnyArray, ""] = field(default_factory=lambda: jax.random.key(0))

    def __call__(
        self, recordings: Iterable[Float[np.ndarray, "_ M"]], language: str | None = None
    ) -> list[Transcript]:
        """Transcribes recordings, each given as ``data.mel.log_mel`` frames.

        Args:
          recordings: any number of any length; at most ``batch`` are held at once.
          language: a code such as "en"; None identifies it from the first window.
        """
        keys = (jax.random.fold_in(self.key, n) for n in itertools.count())
        jobs = (
            self._listen(frames, language, key)
            for frames, key in zip(recordings, keys, strict=False)
        )
        return together(jobs, self._take, self.batch)

    def attention(
        self, window: Float[np.ndarray, "F M"], words: Sequence[str], language: str = "en"
    ) -> Float[np.ndarray, "W S"]:
        """Returns the mean attention of ``heads`` for each word of one window.

        Args:
          window: frames of at most 30 seconds.
          words: texts of the ``Word``s of a transcript. Words beyond the model's positions get rows of 0;
            characters that were generated in halves take more tokens when they are encoded again.
        """
        ids = [self.tokens.encode(word) for word in words]
        prefix = self._prefix(language, times=False)
        longest = self.build.config.transformer.max_length - len(prefix) - 1

        def job() -> Job[np.ndarray]:
            heard = yield from self._hear(window)
            known = [id for word in ids for id in word][:longest]
            weights, _, first = yield from self._read(heard, known, len(window), language)
            rows = weights.mean(axis=0)[first:]
            ends = np.minimum(np.cumsum([len(word) for word in ids]), len(known))
            own = np.split(rows, ends)[:-1]
            return np.stack([r.mean(axis=0) if len(r) else np.zeros_like(rows[0]) for r in own])

        return together([job()], self._take, 1)[0]

    def _listen(
        self, frames: Float[np.ndarray, "F M"], language: str | None, key: Key[Array, ""]
    ) -> Job[Transcript]:
        """Transcribes one recording."""
        size = self.build.config.max_frames
        segments: list[Segment] = []
        said: list[int] = []
        seek = 0
        while seek < len(frames):
            window = frames[seek : seek + size]
            step = len(window)
            if window.min() < window.max():  # else the window is silent
                heard = yield from self._hear(window)
                language = language or (yield from self._likeliest(heard))
                own = jax.random.fold_in(key, seek)
                text = yield from self._write(heard, said, language, own)
                if text is not None:
                    pieces, step = split(text.tokens, self.tokens.first_time, len(window))
                    pieces = [piece for piece in pieces if self._says_something(piece)]
                    words = yield from self._follow(heard, pieces, len(window), language)
                    segments += self._segments(text, pieces, words, seek * FRAME)
                    calm = self.previous and text.temperature <= 0.5
                    said = [*said, *(id for p in pieces for id in p.tokens)] if calm else []
            seek += step or len(window)
        return Transcript(language or "en", tuple(segments))

    def _hear(self, window: Float[np.ndarray, "F M"]) -> Job[Array]:
        missing = self.build.config.max_frames - len(window)
        return (yield Step(("hear",), (np.pad(window, ((0, missing), (0, 0))),)))

    def _likeliest(self, heard: Float[Array, "S D"]) -> Job[str]:
        """Identifies the language of a window."""
        if not self.tokens.multilingual:
            return "en"
        probabilities = yield Step(("language",), (heard,))
        return list(self.tokens.languages)[int(np.argmax(probabilities))]

    def _write(
        self,
        heard: Float[Array, "S D"],
        said: Sequence[int],
        language: str,
        key: Key[Array, ""],
    ) -> "Job[_Text | None]":
        """Decodes a window at the first temperature whose text passes ``retry``; None for silence."""
        prefix = self._prefix(language, times=self.times)
        longest = self.build.config.transformer.max_length
        shown = min(len(said), longest // 2 - 1)
        if shown < longest // 2 - 1:
            shown -= shown % _ROUND
        if shown:
            prefix = [self.tokens.previous, *said[-shown:], *prefix]
        limit = min(longest // 2, longest - len(prefix) + 1)
        retry, text = self.retry, None
        for attempt, temperature in enumerate(retry.temperatures):
            group = ("write", len(prefix), limit, temperature)
            arrays = heard, np.array(prefix, np.int32), jax.random.fold_in(key, attempt)
            written = yield Step(group, arrays if temperature else arrays[:2])
            ids = tuple(written.tokens[: written.lengths].tolist())
            text = _Text(ids, temperature, float(written.log_p), float(written.no_speech))
            guessed = text.log_p < retry.log_p
            if guessed and text.no_speech > retry.no_speech:
                return None
            if not guessed and compression(self.tokens.decode(ids)) <= retry.compression:
                break
        return text

    def _follow(
        self, heard: Float[Array, "S D"], pieces: Sequence[Piece], frames: int, language: str
    ) -> Job[list[tuple[Word, ...]]]:
        """Returns the words of each piece, in seconds of the window."""
        texts = [self._text_ids(piece) for piece in pieces]
        ids = [id for text in texts for id in text]
        if not (self.heads and ids):
            return [() for _ in pieces]
        weights, log_p, first = yield from self._read(heard, ids, frames, language)
        starts = timing.token_starts(weights, first, -1)
        words, index = [], 0
        for text in texts:
            own = []
            for word, group in self.tokens.words(text, language):
                begin, index = index, index + len(group)
                start, end = starts[begin] * TIME, starts[index] * TIME
                own.append(Word(word, start, end, probability(log_p[begin:index].tolist())))
            words.append(join_punctuation(own))
        return words

    def _read(
        self, heard: Float[Array, "S D"], ids: Sequence[int], frames: int, language: str
    ) -> Job[tuple[Float[np.ndarray, "n T S"], Float[np.ndarray, " t"], int]]:
        """Returns attention of ``heads``, log-probabilities of ``ids``, and the first row of ``ids``.

        A row predicts the token after it, so the first row is that of the last token of the prefix.
        """
        prefix = self._prefix(language, times=False)
        known = [*prefix, *ids, self.tokens.end]
        longest = self.build.config.transformer.max_length
        padded = np.full(min(-(-len(known) // _ROUND) * _ROUND, longest), self.tokens.end, np.int32)
        padded[: len(known)] = known
        followed = yield Step(("follow", len(padded)), (heard, padded))
        weights = followed.weights[:, : len(known), : max(frames // STRIDE, 1)]
        return weights, followed.log_p[len(prefix) : len(known) - 1], len(prefix) - 1

    def _segments(
        self,
        text: "_Text",
        pieces: Sequence[Piece],
        words: Sequence[Sequence[Word]],
        offset: float,
    ) -> list[Segment]:
        """Converts the pieces of a window into segments, in seconds of the recording."""
        return [
            Segment(
                start=round(offset + piece.start, 2),
                end=round(offset + piece.end, 2),
                text=self.tokens.decode(piece.tokens),
                tokens=self._text_ids(piece),
                temperature=text.temperature,
                log_p=text.log_p,
                no_speech=text.no_speech,
                words=tuple(word.later(offset) for word in own),
            )
            for piece, own in zip(pieces, words, strict=True)
        ]

    def _take(self, steps: Sequence[Step]) -> list[Any]:
        """Runs steps of one group in one call of the model."""
        kind, *group = steps[0].group  # type: ignore[misc]
        rows = [jnp.stack(column) for column in zip(*(s.arrays for s in steps), strict=True)]
        model = self.build, self.params
        if kind == "hear":
            return list(windows.hear(*model, *rows))
        if kind == "language":
            return list(jax.device_get(windows.likely_languages(*model, *rows, tokens=self.tokens)))
        if kind == "write":
            _, limit, temperature = group
            drawn = (temperature,) if temperature else ()
            options: dict[str, Any] = dict(times=self.times, max_new_tokens=limit)
            written: Any = windows.write(*model, *rows, *drawn, tokens=self.tokens, **options)
        else:
            written = windows.follow(*model, *rows, heads=self.heads)
        written = jax.device_get(written)
        return [type(written)(*(x[i] for x in written)) for i in range(len(steps))]

    def _prefix(self, language: str, *, times: bool) -> list[int]:
        return self.tokens.prefix(language, self.task, times=times)

    def _text_ids(self, piece: Piece) -> tuple[int, ...]:
        return tuple(id for id in piece.tokens if id < self.tokens.end)

    def _says_something(self, piece: Piece) -> bool:
        return piece.start < piece.end and bool(self.tokens.decode(piece.tokens).strip())


@dataclass(frozen=True)
class _Text:
    """Generated text of one window."""

    tokens: tuple[int, ...]
    temperature: float
    log_p: float
    no_speech: float
