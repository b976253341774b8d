"""BLEU and chrF of the texts that several runs wrote about the same examples, with paired intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments import intervals, launch
from experiments.intervals import Interval, of_texts

Row = tuple[str, str, Interval, str]
"""Run, metric, interval, and what is said of it."""


@dataclass(frozen=True)
class Texts:
    """Texts of several runs about the same examples.

    Attributes:
      systems: the texts of each run; of several runs that were trained as one, those of each.
      references: the right text of each example.
      sources: what the texts were written about; None where that is no text.
      groups: of the examples, which are drawn together; [] draws each alone.
    """

    systems: Mapping[str, Sequence[Sequence[str]]]
    references: Sequence[str]
    sources: Sequence[str] | None
    groups: Sequence[Any]

    def only(self, rows: Sequence[int]) -> "Texts":
        """Returns these texts of some examples."""

        def some(values: Sequence[Any]) -> list[Any]:
            return [values[row] for row in rows]

        return Texts(
            {name: [some(texts) for texts in each] for name, each in self.systems.items()},
            some(self.references),
            self.sources and some(self.sources),
            self.groups and some(self.groups),
        )


def texts_of(results: Mapping[str, Mapping[str, Any]]) -> Texts | None:
    """Returns the texts in the results of runs; None where one has none.

    Raises:
      Refused: two runs were evaluated on other examples.
    """
    written = {name: own.get("samples") or [] for name, own in results.items()}
    if not all(written.values()):
        return None
    first, references = next(iter(written)), {}
    for name, texts in written.items():
        references[name] = [each["reference"] for each in texts]
        if references[name] != references[first]:
            raise launch.Refused(
                f"{first} and {name} wrote texts of other examples; evaluate both on the same split."
            )
    groups = [each["group"] for each in written[first] if "group" in each]
    groups = groups or (results[first].get("examples") or {}).get("group") or []
    return Texts(
        {name: _written(samples) for name, samples in written.items()},
        references[first],
        [each["source"] for each in written[first]] if "source" in written[first][0] else None,
        # Of some tasks there are no groups of texts about some of the examples, by --limit.
        groups if len(groups) == len(references[first]) else [],
    )


def _written(samples: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns the texts in the samples of a run, or of each of its members."""
    names = [name for name in samples[0] if name.rpartition("/")[2] in ("translation", "text")]
    return [[sample[name] for sample in samples] for name in names]


def paired(texts: Texts, tokenize: str, names: Sequence[str] = ("BLEU", "chrF2")) -> list[Row]:
    """Returns BLEU and chrF of each run, or one of them; of groups also what each has more than the first.

    Of several members a score is the mean. Examples of a group are drawn together; without groups, and where
    each run is one, sacreBLEU's own paired bootstrap draws texts.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    known = {"BLEU": BLEU(tokenize=tokenize), "chrF2": CHRF()}
    metrics = {name: known[name] for name in names}
    systems = list(texts.systems.values())
    if not texts.groups and all(len(each) == 1 for each in systems):
        return _by_sacrebleu(texts, metrics)
    rows, groups = [], texts.groups or range(len(texts.references))
    for metric, of in metrics.items():
        scores, differences = of_texts(of, systems, texts.references, groups)
        rows += [(n, metric, x, "score") for n, x in zip(texts.systems, scores, strict=True)]
        later = list(zip(texts.systems, differences, strict=True))[1:]
        rows += [(name, metric, x, said(x)) for name, x in later]
    return rows


def _by_sacrebleu(texts: Texts, metrics: Mapping[str, Any]) -> list[Row]:
    from sacrebleu.significance import PairedTest

    systems: list[Any] = [(name, list(own)) for name, (own,) in texts.systems.items()]
    references: Any = [list(texts.references)]
    _, found = PairedTest(systems, metrics, references, test_type="bs", n_samples=1000)()
    rows = []
    for metric in metrics:
        for name, each in zip(texts.systems, found[metric], strict=True):
            result: Any = each
            score = Interval(result.score, result.mean - result.ci, result.mean + result.ci)
            p = "baseline" if result.p_value is None else f"p = {result.p_value:.3f}"
            rows.append((name, metric, score, p))
    return rows


def said(difference: Interval) -> str:
    """Says whether a difference is one."""
    return "differs" if difference.excludes_zero else "within its interval"


@dataclass(frozen=True)
class Bin:
    """Examples of like length.

    Attributes:
      least, most: words of their sources.
      count: the number of examples.
      scores: BLEU of each run.
      said: of each run but the first, how it differs from that.
    """

    least: int
    most: int
    count: int
    scores: Mapping[str, Interval]
    said: Mapping[str, str]

    @property
    def words(self) -> str:
        """The least and the greatest length."""
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"


def by_length(texts: Texts, bins: int, tokenize: str) -> list[Bin]:
    """Returns BLEU in bins of equal counts by the words of the source, shorter ones first.

    Of as many words the text of fewer characters is shorter.

    Raises:
      Refused: the sources are no texts, or there are more bins than texts.
    Source: Bahdanau, Cho and Bengio 2015, figure 2.
    """
    if texts.sources is None:
        raise launch.Refused(f"the texts of {next(iter(texts.systems))} have no source in words.")
    count, lengths = len(texts.references), [len(text.split()) for text in texts.sources]
    if bins > count:
        raise launch.Refused(f"--by_length is {bins} of {count} texts; expected at most that.")
    order = sorted(range(count), key=lambda row: (lengths[row], len((texts.sources or [])[row])))
    found = []
    for number in range(bins):
        rows = order[number * count // bins : (number + 1) * count // bins]
        scored = paired(texts.only(rows), tokenize, ["BLEU"])
        scores = {name: score for name, _, score, _ in scored[: len(texts.systems)]}
        first = next(iter(scores))
        differs = {name: how for name, _, _, how in scored if name != first}
        found.append(Bin(lengths[rows[0]], lengths[rows[-1]], len(rows), scores, differs))
    return found


def draw(bins: Sequence[Bin]) -> Any:
    """Draws BLEU by the length of the source, a line a run, with bars of its intervals."""
    lines = {name: [own.scores[name] for own in bins] for name in bins[0].scores}
    figure = intervals.draw([own.words for own in bins], lines, "length of the source", "BLEU")
    figure.axes[0].set_ylim(0, None)
    return figure
