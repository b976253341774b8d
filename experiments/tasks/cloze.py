"""Cloze questions: a model reads a passage and a question, and answers with a token of the passage.

The source is the passage; the target is the question, with ``___`` where the answer stood, then the answer.
The loss counts the answer alone, which a ``transformer`` generates; ``pointing`` is for models that point.

Source: Hermann et al. 2015, "Teaching machines to read and comprehend".
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.data.evaluation import eval_batches
from crossattn.data.sources import SPLITS
from crossattn.data.sources.cloze import BLANK, NAMES
from crossattn.train.losses import token_losses
from experiments.errors import SettingsError
from experiments.tasks import protocols, sections
from experiments.tasks.texts import TextTask
from experiments.tasks.translation import PairData
from experiments.tasks.written import tokens_of_words

WINDOWS = (1, 2, 3, 5, 8, 12, 20)
"""Words on either side of a blank that the baseline of shared words chooses from."""


@dataclass(frozen=True)
class Question:
    """An example as words: the passage, the question with its blank, and the answer."""

    passage: list[str]
    question: list[str]
    answer: str

    @property
    def candidates(self) -> list[str]:
        """The names in the passage, as often as they stand there."""
        return [word for word in self.passage if word in NAMES]


@dataclass(frozen=True)
class Answered:
    """A question as a model answers it.

    Attributes:
      question: the example.
      chances: the probability of each name in the passage, the likeliest first.
      read: attention of the answer's place to each word of the passage, [words].
    """

    question: Question
    chances: dict[str, float]
    read: np.ndarray


class ClozeTask(TextTask):
    """An encoder-decoder, and examples {"id", "source", "target"} as the source `cloze` gives them.

    Attributes:
      asked: words besides the answers that are one token.
    """

    sections = {
        "data": PairData,
        "tokenizer": sections.PairTokenizer,
        "loss": sections.CrossEntropy,
        "evaluate": sections.PlannedEvaluation,
    }
    metrics = ("loss", "nll", "exact_match")
    headline = ("exact_match", "max")
    asks = protocols.TranslationModel
    memory = ("source",)
    asked: tuple[str, ...] = ()

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if not config.tokenizer.joint:
            raise SettingsError(
                "config.tokenizer.joint is False; an answer is a token of the passage: expected True."
            )

    def sizes(self) -> dict[str, Any]:
        data = self.config.data
        longest = max(data.source_len, data.target_len)
        return dict(vocab_size=self.corpus.tokenizer.vocab_size, max_length=longest)

    def refuse_unready(self) -> None:
        """Raises SettingsError also where a question cannot be answered from what the model reads."""
        super().refuse_unready()
        for split in SPLITS:
            # The same questions come again with other names, each of one token as the first.
            repeats = self.config.data.get("options", {}).get("repeats", 1)
            count = len(self.examples(split)) // (repeats if split == "train" else 1)
            self._refuse_unfit(self.examples(split, count))

    def _refuse_unfit(self, examples: Sequence[Mapping[str, Any]]) -> None:
        read, data, tokenizer = list(examples), self.config.data, self.corpus.tokenizer
        for each in read:
            question = question_of(each)
            if question.question.count(BLANK) < 1 or question.answer not in NAMES:
                raise SettingsError(
                    f"question {each['id']} ends with {question.answer!r}; expected a question with {BLANK},"
                    f" then its answer, one of {NAMES[0]} to {NAMES[-1]}."
                )
            if question.answer not in question.passage:
                raise SettingsError(
                    f"question {each['id']} asks for {question.answer!r}, which is not in its passage; leave"
                    " it out."
                )
        for name in sorted({*self.asked, *(question_of(each).answer for each in read)}):
            count = len(tokenizer.encode(f"a {name}")) - len(tokenizer.encode("a"))
            if count != 1:
                raise SettingsError(
                    f"{name!r} is {count} tokens; expected one: give config.tokenizer.vocab_size more than it"
                    " has."
                )
        ends = len(tokenizer.frame)
        for side, part in (("source", "passage"), ("target", "question with its answer")):
            lengths = [len(ids) + ends for ids in tokenizer.encode_batch([e[side] for e in read])]
            longest = int(np.argmax(lengths))
            if lengths[longest] > data[f"{side}_len"]:
                raise SettingsError(
                    f"the {part} of {read[longest]['id']} has {lengths[longest]} tokens;"
                    f" config.data.{side}_len is {data[f'{side}_len']}, and none may be cut: give it more."
                )

    def told(self, batch: Any) -> Any:
        """Returns the mask [B T] of the answers: of each text the last token before its end."""
        return answer_places(batch["target_segment_ids"])

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        scores = super().scores(sums)
        scores["exact_match"] = scores.pop("accuracy")
        return {name: scores[name] for name in self.metrics}

    def outcomes(self, params: Any, split: str) -> dict[str, list[Any]]:
        """Returns loss and exact match of each question; a group is a page."""
        nll, right = self.of_examples(self._answers, params, split).tolist()
        examples = self.examples(split)
        group = [str(examples[i]["id"]).partition("#")[0] for i in range(len(examples))]
        return {"group": group, "weight": [1.0] * len(group), "nll": nll, "exact_match": right}

    def _answers(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Returns loss [B] and exact match [B] of the answer of each row."""
        model, told = self.bind(params), self.told(batch)
        logits = model.logits(self.read_source(model, batch, None)[0])
        labels = self.labels(batch)
        nll = token_losses(logits, labels, 0.0, 0.0)[0][1]
        right = logits.argmax(-1) == labels
        return (nll * told).sum(-1), (right & told).sum(-1).astype(nll.dtype)

    def answered(self, params: Any, example: Mapping[str, Any]) -> Answered:
        """Returns what a model answers to an example, and reads: the mean of the last layer's heads.

        Raises:
          SettingsError: the example is no question, or is longer than the model.
        """
        self._refuse_unfit([example])
        data, tokenizer, question = self.config.data, self.corpus.tokenizer, question_of(example)
        lengths = dict(source_len=data.source_len, target_len=data.target_len)
        (item,) = eval_batches([dict(example)], tokenizer, batch_size=1, **lengths)
        batch = item.batch
        place = int(np.flatnonzero(self.told(batch)[0])[0])
        chances, read = (np.asarray(x[0, place]) for x in self._chances(params, batch))
        ids = tokenizer.encode(example["source"])
        names = {name: tokenizer.encode(f"a {name}")[-1] for name in question.candidates}
        found = {name: float(chances[token]) for name, token in names.items()}
        rows = tokens_of_words(tokenizer.decode, ids)
        likeliest = dict(sorted(found.items(), key=lambda each: -each[1]))
        return Answered(question, likeliest, np.array([read[row].sum() for row in rows]))

    @cached_property
    def _chances(self) -> Callable[[Any, Any], tuple[jax.Array, jax.Array]]:
        """The function from a batch to probabilities [B T V] and attention [B T S]."""

        def chances(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
            model = self.bind(params)
            hidden, weights = self.read_source(model, batch, None, return_weights=True)
            return jax.nn.softmax(model.logits(hidden)), weights[-1].mean(-3)

        return jax.jit(chances)

    def baselines(self, split: str) -> dict[str, float]:
        """Returns exact matches of answers that need no model.

        These are the most frequent name of the passage, the most frequent that is not in the question, and
        the one whose neighbours share most words with those of the blank, in the window, among all names or
        those that are not in the question, that is best on validation.
        """
        known, asked = ([question_of(x) for x in self.examples(s)] for s in ("validation", split))
        kinds: list[tuple[int, bool]] = [(w, other) for w in WINDOWS for other in (False, True)]
        best = max(kinds, key=lambda kind: exact_match(known, lambda q: nearest(q, *kind)))
        answers: dict[str, Callable[[Question], str]] = {
            "most_frequent": most_frequent,
            "most_frequent_not_asked": lambda q: most_frequent(q, other=True),
            "nearest": lambda q: nearest(q, *best),
        }
        return {f"{n}_exact_match": exact_match(asked, answer) for n, answer in answers.items()}


def answer_places(segment_ids: Any) -> Any:
    """Returns where the answers of targets [B T] stand: of each text the last token before its end."""
    after = [jnp.pad(segment_ids[:, n:], ((0, 0), (0, n))) for n in (1, 2)]
    return (segment_ids > 0) & (after[0] == segment_ids) & (after[1] != segment_ids)


def question_of(example: Mapping[str, Any]) -> Question:
    """Returns an example as words."""
    *question, answer = example["target"].split() or [""]
    return Question(example["source"].split(), question, answer)


def exact_match(questions: Sequence[Question], answer: Callable[[Question], str]) -> float:
    """Returns the share of the questions that are answered right."""
    return float(np.mean([answer(each) == each.answer for each in questions]))


def most_frequent(question: Question, other: bool = False) -> str:
    """Returns the most frequent candidate, the first of several; ``other`` than those in the question."""
    return Counter(_may(question, other)).most_common(1)[0][0]


def nearest(question: Question, window: int, other: bool = False) -> str:
    """Returns the candidate that shares most words with those around the blank, the first of several."""
    around = _around(question.question, question.question.index(BLANK), window)
    may, best = {*_may(question, other)}, (-1, "")
    for place, word in enumerate(question.passage):
        if word in may:
            shared = len(around & _around(question.passage, place, window))
            best = max(best, (shared, word), key=lambda each: each[0])
    return best[1]


def _may(question: Question, other: bool) -> list[str]:
    every = question.candidates
    return other and [word for word in every if word not in question.question] or every


def _around(words: Sequence[str], place: int, window: int) -> set[str]:
    before, after = words[max(0, place - window) : place], words[place + 1 : place + 1 + window]
    return {word.lower() for word in (*before, *after)} - {BLANK}
