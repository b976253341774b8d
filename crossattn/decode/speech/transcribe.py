"""Transcription of long recordings with Whisper, window by window, several recordings at once.

A window is 30 seconds. Its last time token sets where the next window begins; a window that failed is decoded
again at a higher temperature. Each recording is a job (``together``), so that recordings share batches.

Source: Radford et al. 2022, section 4.5.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
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
    split,
)
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
      tokens: vocabulary of the model, a ``data.whisper_tokens.WhisperTokens``.
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
    tokens: Any
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
        jobs = (
            self._listen(frames, language, jax.random.fold_in(self.key, n))
            for n, frames in enumerate(recordings)
        )
        return together(jobs, self._take, self.batch)

    def attention(
        self, window: Float[np.ndarray, "F M"], words: Sequence[str], language: str = "en"
    ) -> Float[np.ndarray, "W S"]:
        """Returns the mean of ``head_attention`` over the heads."""
        return self.head_attention(window, words, language).mean(axis=0)

    def head_attention(
        self, window: Float[np.ndarray, "F M"], words: Sequence[str], language: str = "en"
    ) -> Float[np.ndarray, "n W S"]:
        """Returns the attention of each of the ``heads`` for each word of one window.

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
            rows = weights.transpose(1, 0, 2)[first:]
            ends = np.minimum(np.cumsum([len(word) for word in ids]), len(known))
            own = np.split(rows, ends)[:-1]
            means = [r.mean(axis=0) if len(r) else np.zeros_like(rows[0]) for r in own]
            return np.stack(means, axis=1)

        return together([job()], self._take, 1)[0]

    def follow(
        self, window: Float[np.ndarray, "F M"], ids: Sequence[int], language: str = "en"
    ) -> tuple[Float[np.ndarray, "n T S"], int]:
        """Returns the attention of ``heads`` to one window as a given text is read, and the first row of it.

        Args:
          window: frames of at most 30 seconds.
          ids: tokens of the text; the rows after theirs are those of the end.
        """

        def job() -> Job[tuple[np.ndarray, int]]:
            heard = yield from self._hear(window)
            weights, _, first = yield from self._read(heard, ids, len(window), language)
            return weights, first

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
            step, offset = len(window), seek * FRAME
            if window.min() < window.max():  # else the window is silent
                heard = yield from self._hear(window)
                language = language or (yield from self._likeliest(heard))
                text = yield from self._write(heard, said, language, jax.random.fold_in(key, seek))
                if text is not None:
                    pieces, step = split(text.tokens, self.tokens.first_time, len(window))
                    pieces = [piece for piece in pieces if self._says_something(piece)]
                    words = yield from self._follow(heard, pieces, len(window), language, offset)
                    segments += [
                        replace(
                            text,
                            start=round(offset + piece.start, 2),
                            end=round(offset + piece.end, 2),
                            text=self.tokens.decode(piece.tokens),
                            tokens=self._text_ids(piece),
                            words=own,
                        )
                        for piece, own in zip(pieces, words, strict=True)
                    ]
                    calm = self.previous and text.temperature <= 0.5
                    said = [*said, *(id for p in pieces for id in p.tokens)] if calm else []
            seek += step or len(window)
        return Transcript(language or "en", tuple(segments))

    def _hear(self, window: Float[np.ndarray, "F M"]) -> Job[Array]:
        missing = self.build.config.max_frames - len(window)
        return (yield _step("hear", np.pad(window, ((0, missing), (0, 0)))))

    def _likeliest(self, heard: Float[Array, "S D"]) -> Job[str]:
        """Identifies the language of a window."""
        if not self.tokens.multilingual:
            return "en"
        probabilities = yield _step("likely_languages", heard, tokens=self.tokens)
        return list(self.tokens.languages)[int(np.argmax(probabilities))]

    def _write(
        self, heard: Float[Array, "S D"], said: Sequence[int], language: str, key: Key[Array, ""]
    ) -> Job[Segment | None]:
        """Decodes a window at the first temperature whose text passes ``retry``; None for silence."""
        prefix = self._prefix(language, times=self.times)
        longest = self.build.config.transformer.max_length
        shown = min(len(said), longest // 2 - 1)
        if shown < longest // 2 - 1:
            shown -= shown % _ROUND
        if shown:
            prefix = [self.tokens.previous, *said[-shown:], *prefix]
        limit = min(longest // 2, longest - len(prefix) + 1)
        options: dict[str, Any] = dict(tokens=self.tokens, times=self.times, max_new_tokens=limit)
        retry, text = self.retry, None
        for attempt, temperature in enumerate(retry.temperatures):
            arrays: tuple[Any, ...] = heard, np.array(prefix, np.int32)
            drawn = {}
            if temperature:
                arrays, drawn = (
                    (*arrays, jax.random.fold_in(key, attempt)),
                    dict(temperature=temperature),
                )
            written = yield _step("write", *arrays, **options, **drawn)
            ids = tuple(written.tokens[: written.lengths].tolist())
            log_p, no_speech = float(written.log_p), float(written.no_speech)
            text = Segment(0.0, 0.0, self.tokens.decode(ids), ids, temperature, log_p, no_speech)
            guessed = log_p < retry.log_p
            if guessed and no_speech > retry.no_speech:
                return None
            if not guessed and compression(text.text) <= retry.compression:
                break
        return text

    def _follow(
        self,
        heard: Float[Array, "S D"],
        pieces: Sequence[Piece],
        frames: int,
        language: str,
        offset: float,
    ) -> Job[list[tuple[Word, ...]]]:
        """Returns the words of each piece, in seconds of the recording."""
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
                start, end = (round(float(starts[i] * TIME + offset), 2) for i in (begin, index))
                own.append(
                    Word(
                        word, start, end, float(np.exp(log_p[begin:index], dtype=np.float64).mean())
                    )
                )
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
        followed = yield _step("follow", heard, padded, heads=self.heads)
        weights = followed.weights[:, : len(known), : max(frames // STRIDE, 1)]
        return weights, followed.log_p[len(prefix) : len(known) - 1], len(prefix) - 1

    def _take(self, steps: Sequence[Step]) -> list[Any]:
        """Runs steps of one group in one call of the model."""
        name, _, options = steps[0].group  # type: ignore[misc]
        rows = [jnp.stack(column) for column in zip(*(s.arrays for s in steps), strict=True)]
        found = getattr(windows, name)(self.build, self.params, *rows, **dict(options))
        if name == "hear":  # stays on the device
            return list(found)
        found = jax.device_get(found)
        return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(len(steps))]

    def _prefix(self, language: str, *, times: bool) -> list[int]:
        return self.tokens.prefix(language, self.task, times=times)

    def _text_ids(self, piece: Piece) -> tuple[int, ...]:
        return tuple(id for id in piece.tokens if id < self.tokens.end)

    def _says_something(self, piece: Piece) -> bool:
        return piece.start < piece.end and bool(self.tokens.decode(piece.tokens).strip())


def _step(name: str, *arrays: Any, **options: Any) -> Step:
    """Requests ``windows.NAME``; steps of the same shapes and options share a call."""
    return Step((name, tuple(map(np.shape, arrays)), tuple(options.items())), arrays)
