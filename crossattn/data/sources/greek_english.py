"""The Greek New Testament and the Berean Standard Bible, words aligned by hand, as a TFDS dataset.

From the wheel `bible-alignments` (alignments CC BY 4.0, English text public domain), read as data
and never installed. Verses keep their order; verse `i` is a test verse when i % 20 == 0, validation
when i % 20 == 1.
"""

import csv
import json
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from crossattn.data import archives, fetch, records
from crossattn.data.sources import Example, MappedSource, is_backward, reversed_example

FORM = "greek_english/el-en or greek_english/en-el"
_WHEEL = ("bible-alignments", "0.4.2")
_FILES = [
    "data/sources/SBLGNT.tsv",
    "data/eng/targets/BSB/nt_BSB.tsv",
    "data/eng/alignments/BSB/SBLGNT-BSB-manual.json",
]


def open_split(direction: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Returns the verses of a split, with gold word links; a family is a chapter."""
    backward = is_backward("greek_english", direction, "el-en", "en-el")
    rows = records.prepared(GreekEnglish, "el-en", split, data_dir)
    verses = MappedSource(rows, _verse)
    return MappedSource(verses, reversed_example) if backward else verses


def _verse(row: Any) -> Example:
    pair = records.pair_of(row, source="el", target="en")
    return pair | {"family": pair["id"][: len("40001")]}  # book and chapter


class GreekEnglish(records.PackageBuilder):
    """Features `id`, `el`, `en`, their word spans `el_spans`, `en_spans` [n, 2], `links` [k, 2]."""

    SHA256 = "84f6b15e706657777824aac811567cb5cb2b38ad2b94497209f5f3c3f67b0984"
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="el-en", description="Greek and English")]

    def _info(self) -> tfds.core.DatasetInfo:
        pairs = tfds.features.Tensor(shape=(None, 2), dtype=np.int32)
        text = tfds.features.Text()
        features = {"id": text, "el": text, "en": text}
        features |= {"el_spans": pairs, "en_spans": pairs, "links": pairs}
        return self.described(
            __doc__,
            features,
            "https://github.com/Clear-Bible/Alignments",
            "CC BY 4.0",
            supervised_keys=("el", "en"),
        )

    def _split_generators(self, dl_manager):
        path = fetch.wheel(*_WHEEL, self.SHA256, self.files_dir)
        verses = read_verses(*(raw.decode("utf-8") for raw in archives.read_zip(path, _FILES)))
        splits = {0: "test", 1: "validation"}
        return self.by_split((splits.get(i % 20, "train"), verse) for i, verse in enumerate(verses))


def read_verses(greek_tsv: str, english_tsv: str, links_json: str) -> list[dict]:
    """Returns the verses that both texts have, in order, with word spans and 0-based word links.

    Punctuation counts as a word of the English and has no link. Links between words of different
    verses (0.2 %) are left out.
    """
    greek, english = defaultdict(list), defaultdict(list)
    for row in _rows(greek_tsv):
        greek[row["id"][1:9]].append(row)
    for row in _rows(english_tsv):
        english[row["source_verse"]].append(row)
    place = {
        row["id"]: (verse, index)
        for verses in (greek, english)
        for verse, rows in verses.items()
        for index, row in enumerate(rows)
    }
    links: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for record in json.loads(links_json)["records"]:
        for source in record["source"]:
            for target in record["target"]:
                (verse, i), (target_verse, j) = place[source], place[target]
                if verse == target_verse:
                    links[verse].add((i, j))
    examples = []
    for verse in sorted(greek.keys() & english.keys()):
        source, source_spans = detokenise(greek[verse])
        target, target_spans = detokenise(english[verse])
        example = {"id": verse, "el": source, "en": target}
        example |= {"el_spans": source_spans, "en_spans": target_spans}
        example["links"] = np.array(sorted(links[verse]), np.int32).reshape(-1, 2)
        examples.append(example)
    return examples


def detokenise(rows: list[dict[str, str]]) -> tuple[str, np.ndarray]:
    """Returns the running text of token rows, NFC, and the span [n, 2] of each; heeds `skip_space_after`."""
    text, spans = "", []
    for index, row in enumerate(rows):
        word = unicodedata.normalize("NFC", row["text"])
        spans.append((len(text), len(text) + len(word)))
        last = index == len(rows) - 1
        text += word if last or row.get("skip_space_after") else word + " "
    return text, np.array(spans, np.int32).reshape(-1, 2)


def _rows(tsv: str) -> csv.DictReader:
    return csv.DictReader(tsv.split("\n"), delimiter="\t", quoting=csv.QUOTE_NONE)
