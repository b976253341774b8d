"""Whisper's vocabulary: text, and the special tokens of languages, tasks and times.

Ids below ``end`` are text; from ``first_time`` on they are times, one every 0.02 s; specials are between.
Read from the ``tokenizer.json`` of any Whisper checkpoint; English-only ones have other ids.
"""

import functools
import json
import os
import string
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from crossattn.data.errors import DataError
from crossattn.data.tokenizers import open_backend

SECONDS = 0.02
"""From one time token to the next."""

_REPLACEMENT = "\ufffd"  # of bytes that are no character yet
_UNSPACED = {"zh", "ja", "th", "lo", "my", "yue"}  # languages that put no space between words


class WhisperTokens:
    """Ids and texts of one checkpoint.

    Attributes:
      start, end: begin of a transcript; end of it, which is also padding.
      previous: begins the text before the transcript.
      no_speech: its probability after ``start`` is that of silence.
      no_times: asks for text alone, in the place of a first time.
      first_time: 0.00 s.
      languages: {code: id}; English-only checkpoints use none of them.
      tasks: {"transcribe": id, "translate": id}.
      multilingual: whether language and task are told to the model.
    """

    def __init__(
        self, backend: Tokenizer, name: str = "the tokenizer", multilingual: bool | None = None
    ):
        self._backend = backend

        def special(*spellings: str) -> int:
            for spelling in spellings:
                if (id := backend.token_to_id(f"<|{spelling}|>")) is not None:
                    return id
            raise DataError(f"{name} has no token <|{spellings[0]}|>; expected that of a Whisper.")

        self.end = special("endoftext")
        self.start = special("startoftranscript")
        self.previous = special("startofprev")
        self.no_speech = special("nospeech", "nocaptions")
        self.no_times = special("notimestamps")
        self.first_time = self.no_times + 1
        self.tasks = {task: special(task) for task in ("transcribe", "translate")}
        between = range(self.start + 1, min(self.tasks.values()))
        if any(backend.id_to_token(id) is None for id in between):
            raise DataError(f"{name} has ids without a token between its languages.")
        self.languages = {backend.id_to_token(id).strip("<|>"): id for id in between}
        # The vocabulary of English alone has one text token fewer, and the same specials.
        self.multilingual = self.end >= 50257 if multilingual is None else multilingual
        self._start_of_lm = special("startoflm")

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "WhisperTokens":
        """Reads ``tokenizer.json`` in a checkpoint's folder, and from its configs whether it is multilingual.

        Raises:
          DataError: the file is missing, damaged, or not that of a Whisper.
        """
        path = Path(folder) / "tokenizer.json"
        try:
            backend = open_backend(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from None
        except ValueError as error:
            raise DataError(f"{path} is no tokenizer: {error}.") from None
        backend.no_padding()  # parts of a text are encoded here, whole
        backend.no_truncation()
        configs = path.parent / "generation_config.json"
        try:
            hints = json.loads(configs.read_text(encoding="utf-8")) if configs.exists() else {}
            if not isinstance(hints, dict):
                raise ValueError("it is no object")
        except (ValueError, OSError, RecursionError) as error:
            raise DataError(f"{configs} is not JSON: {error}.") from None
        return cls(backend, str(path), hints.get("is_multilingual"))

    def prefix(
        self, language: str | None = None, task: str = "transcribe", *, times: bool = True
    ) -> list[int]:
        """Returns the tokens that begin a transcript.

        Raises:
          DataError: the checkpoint does not know the language or the task.
        """
        if not self.multilingual:
            if language not in (None, "en") or task != "transcribe":
                raise DataError(
                    f"this Whisper only transcribes English; {task} of {language or 'en'} was asked for."
                )
            head = [self.start]
        else:
            if language not in self.languages:
                raise DataError(f"there is no language {language!r}; expected a code such as 'en'.")
            if task not in self.tasks:
                raise DataError(f"there is no task {task!r}; expected transcribe or translate.")
            head = [self.start, self.languages[language], self.tasks[task]]
        return head if times else [*head, self.no_times]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text alone."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids without specials and times."""
        text = [int(id) for id in ids if id < self.end]
        return self._backend.decode(text, skip_special_tokens=False)

    def words(self, ids: Sequence[int], language: str | None = "en") -> list[tuple[str, list[int]]]:
        """Returns the words of text ids, each as it is written, its space included, and its ids.

        Punctuation stands for itself. Languages without spaces are cut wherever a character ends.
        """
        words: list[tuple[str, list[int]]] = []
        for piece, group in self._characters(ids):
            begins = piece.startswith(" ") or piece.strip() in string.punctuation
            if not words or begins or language in _UNSPACED:
                words.append((piece, group))
            else:
                word, before = words[-1]
                words[-1] = (word + piece, before + group)
        return words

    def _characters(self, ids: Sequence[int]) -> Iterable[tuple[str, list[int]]]:
        """Yields the smallest groups of ids that decode to whole characters."""
        whole, done, group = self.decode(ids), 0, []
        for id in ids:
            group = [*group, id]
            piece = self.decode(group)
            cut = piece.find(_REPLACEMENT)
            # A replacement that the whole text has too is no half character.
            if cut < 0 or whole[done + cut : done + cut + 1] == _REPLACEMENT:
                yield piece, group
                done, group = done + len(piece), []

    @functools.cached_property
    def suppressed(self) -> tuple[int, ...]:
        """Ids that are never generated: annotations and specials."""
        specials = [self.start, self.previous, self._start_of_lm, self.no_speech]
        return tuple(sorted({*self._annotations(), *specials, *self.tasks.values()}))

    @functools.cached_property
    def suppressed_first(self) -> tuple[int, ...]:
        """Ids that are never generated first: a lone space, and the end."""
        return (*self.encode(" "), self.end)

    def _annotations(self) -> set[int]:
        """Returns brackets, notes and marks of speakers; hyphens and quotes only where a word begins."""
        annotations = {self.encode(" -")[0], self.encode(" '")[0]}
        marks = list('"#()*+/:;<=>@[\\]^_`{|}~「」『』')
        marks += "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split()
        notes = list("♩♪♫♬♭♮♯")
        for mark in marks + notes:
            for ids in (self.encode(mark), self.encode(" " + mark)):
                # The notes share their first bytes, which spell nothing that is spoken.
                if len(ids) == 1 or mark in notes:
                    annotations.add(ids[0])
        return annotations
