"""Phoneme errors of English words: runs of letters to phonemes, g2p-en, and the nearest training word.

    python -m experiments.bench.pronunciations runs/attention runs/none g2p-en

Each word of a split of cmudict is scored once, by the fewest substitutions, insertions and deletions to one
of its pronunciations, per hundred phonemes of the first of them; and by the share of words with any error.
Figures without stress leave out its digits. A word has a relative if a training word is this one with or
without an ending, such as "cats" and "cat". Nearest is the pronunciation of the training word with the most
similar n-grams of letters. Of a run with several seeds each is scored. Attention reads on where a token's
most read letter is not before that of the token before. Intervals are of 95 %, words of the same letters
("cats", "cat's") drawn together.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import crossattn as xa
from crossattn.data.sources import open_source
from crossattn.data.sources.cmudict import letters_of
from crossattn.train.storage import Folder, folder
from experiments import fetch_weights, launch
from experiments.intervals import difference, ratio
from experiments.options import Options
from experiments.runs import members_of, parameters, task_of

Phonemes = Sequence[str]
PUBLISHED = "g2p-en"
_ENDINGS = ("'s", "s", "es", "d", "ed", "ing", "er", "ers", "y", "ly")
_ROWS = 64  # words that g2p-en reads together


def main() -> None:
    """Scores and prints."""
    parser = Options(__doc__)
    parser.add_argument("systems", nargs="+", help="work directories, g2p-en, nearest")
    parser.add_argument("--split", default="test", metavar="NAME", help="validation or test; test")
    options = parser.parse_args()
    parser.needs("jiwer", install="crossattn[speech]")
    runs = {name: folder(name) for name in options.systems if name not in OTHERS}
    tasks = {name: task_of(workdir) for name, workdir in runs.items()}
    known, train = pronunciations(options.split), pronunciations("train")
    words = list(known)
    related = np.array([has_relative(word, train) for word in words])
    parts = {"all": related >= 0, "no relative": ~related, "a relative": related}
    groups = [letters_of(word) for word in words]
    print(
        f"{len(words)} words of {options.split}, {related.mean():.1%} with a relative in training"
    )
    found = {}
    for name in options.systems:
        if name in OTHERS:
            found[name] = OTHERS[name](words, train)
            continue
        for member in members_of(tasks[name].config) or [None]:
            title = name if member is None else f"{name} {member}"
            found[title], attention = of_run(tasks[name], runs[name], words, member)
            if attention:
                print(f"{title} reads on at {reads_on(attention):.1%} of the tokens")
    for stress in (True, False):
        counted = {name: errors(own, known, words, stress) for name, own in found.items()}
        weights = np.array([len(known[word][0]) for word in words])
        first = next(iter(counted.values()))
        for name, own in counted.items():
            print(f"{name}, {'with' if stress else 'without'} stress")
            for part, rows in parts.items():
                own_groups = [group for group, row in zip(groups, rows, strict=True) if row]
                ones = np.ones(int(rows.sum()))
                rate = ratio(100 * own[rows], weights[rows], own_groups)
                wrong = ratio(100 * (own[rows] > 0), ones, own_groups)
                more = difference(100 * first[rows], 100 * own[rows], weights[rows], own_groups)
                than = "" if own is first else f"; less the first: {more}"
                print(f"  {part}: phonemes {rate} %, words {wrong} %{than}", flush=True)


def pronunciations(split: str) -> dict[str, list[Phonemes]]:
    """Returns the pronunciations of each word of a split, in the dictionary's order."""
    found: dict[str, list[Phonemes]] = {}
    for pair in open_source("cmudict", split):
        found.setdefault(pair["source"], []).append(pair["target"].split())
    return found


def has_relative(word: str, train: Mapping[str, Any]) -> bool:
    """Whether a training word is this one with or without an ending."""
    shorter = (word.removesuffix(end) for end in _ENDINGS if word.endswith(end))
    return any(form in train for form in (*shorter, *(word + end for end in _ENDINGS)))


def errors(
    said: Sequence[Phonemes],
    known: Mapping[str, Sequence[Phonemes]],
    words: Sequence[str],
    stress: bool = True,
) -> np.ndarray:
    """Returns the errors of each word [n] to the nearest of its pronunciations."""
    return np.array([
        min(distance(plain(own, stress), plain(right, stress)) for right in known[word])
        for own, word in zip(said, words, strict=True)
    ])  # fmt: skip


def plain(phonemes: Phonemes, stress: bool) -> Phonemes:
    """Returns phonemes with or without the digits of stress."""
    return phonemes if stress else [re.sub(r"\d", "", phoneme) for phoneme in phonemes]


def distance(said: Phonemes, right: Phonemes) -> int:
    """Returns the fewest substitutions, deletions and insertions."""
    import jiwer

    found = jiwer.process_words(" ".join(right), " ".join(said))
    return found.substitutions + found.deletions + found.insertions


def of_run(
    task: Any, workdir: Folder, words: Sequence[str], member: str | None = None
) -> tuple[list[Phonemes], list[Any]]:
    """Returns what a run writes of words, by its config's search, and its attention if it has any.

    ``member`` names one of several runs that were trained as one.
    """
    config = task.config
    translator = task.translator(parameters(task, workdir, "last", member))
    blank = " " if config.data.get("options", {}).get("letters") else ""
    sources = [blank.join(word) for word in words]
    texts, has = translator.texts(sources), getattr(task.model_config, "attention", "") is not None
    pairs = [pair for pair in zip(sources, texts, strict=True) if pair[1]]
    return [text.split() for text in texts], translator.attention(pairs) if has and pairs else []


def reads_on(attention: Sequence[Any]) -> float:
    """Returns the share of tokens after the first that read no letter before that of the token before.

    Args:
      attention: of the words, ``Attention`` with weights [L N T S]; their mean counts.
    """
    rows = [np.diff(own.weights.mean((0, 1))[:-1].argmax(-1)) for own in attention]
    return float(np.mean(np.concatenate(rows) >= 0))


def published(words: Sequence[str], train: Any = None) -> list[Phonemes]:
    """Returns what g2p-en writes, at most 20 phonemes a word as in its own program."""
    model, params, tokenizer = xa.load(fetch_weights.packaged(PUBLISHED))
    phonemes = model.settings["phonemes"]
    special = {model.ids["pad_id"], model.ids["eos_id"]}
    generate = xa.decode.generate
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(list(words))]
    longest = max(map(len, encoded))
    source = np.zeros((-(-len(words) // _ROWS) * _ROWS, longest), np.int32)
    present = np.zeros_like(source)
    present[:, 0] = 1
    for row, ids in enumerate(encoded):
        source[row, : len(ids)], present[row, : len(ids)] = ids, 1

    @jax.jit
    def write(params: Any, source: Any, present: Any) -> Any:
        bound = xa.functional.bind(model, params)
        return generate(bound, source, present, max_new_tokens=20, **model.ids).tokens[:, 0]

    rows = range(0, len(source), _ROWS)
    tokens = np.concatenate(
        [write(params, source[i : i + _ROWS], present[i : i + _ROWS]) for i in rows]
    )
    return [
        [phonemes[token] for token in row if token not in special]
        for row in tokens[: len(words)].tolist()
    ]


def nearest(words: Sequence[str], train: Mapping[str, Sequence[Phonemes]]) -> list[Phonemes]:
    """Returns the first pronunciation of the training word of the largest cosine of letters' n-grams."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    known = list(train)
    vectors = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 5), sublinear_tf=True)
    table = vectors.fit_transform(known).T.tocsc()
    found: list[Phonemes] = []
    for begin in range(0, len(words), _ROWS):
        alike: Any = vectors.transform(words[begin : begin + _ROWS]) @ table
        found += [train[known[best]][0] for best in np.asarray(alike.argmax(axis=1)).ravel()]
    return found


OTHERS: dict[str, Callable[..., list[Phonemes]]] = {PUBLISHED: published, "nearest": nearest}
"""Systems that are no runs, by their names: functions of the words and the training pronunciations."""


if __name__ == "__main__":
    launch.script(main)
