"""Captions of a run against two baselines, and retrieval of pictures by captions.

    python -m experiments.bench.captions runs/captions --split=test --step=best

BLEU, chrF and CIDEr in each language of the run's captions, of the captions of the nearest training pictures
(L2 distance of prepared pixels), and of the most frequent training caption, with intervals of 95 % by a
bootstrap over families. Then, for each caption, the rank of its picture among all pictures of the split by
the likelihood of the caption, ties counted against it, and the expected rank by chance; and by a linear
rival, ridge regression of the captions' letters on the pictures' main axes. Of several seeds that were
trained as one, each is scored, and then the ranks by the mean of their log-likelihoods: an ensemble.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.train.evaluate import cider_scores
from crossattn.train.sharding import everywhere, mesh_of, rows_on, spread_batch
from crossattn.train.storage import folder
from experiments import launch
from experiments.intervals import Interval, difference, of_texts, ratio
from experiments.options import Options
from experiments.runs import members_of, parameters, task_of
from experiments.tasks.captioning import CaptioningTask

_RECALLS = (1, 5, 10)
_AXES, _PENALTIES = (256, 800), (1e3, 4e3, 1.6e4)  # of the linear rival


def main() -> None:
    """Scores and prints."""
    parser = Options(__doc__)
    parser.add_argument("run", help="work directory of a run of captioning")
    parser.add_argument("--split", default="test", metavar="NAME", help="validation or test; test")
    parser.add_argument("--step", default="last", metavar="STEP", help="a step, 'last' or 'best'")
    parser.add_argument(
        "--num_beams", type=int, metavar="N", help="beams, 1 for greedy; the config's"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="most pictures of a language")
    options = parser.parse_args()
    parser.needs("pycocoevalcap", install="crossattn[captions]")
    parser.needs("sklearn", install="crossattn[baselines]")
    workdir = folder(options.run)
    task = task_of(workdir)
    if not isinstance(task, CaptioningTask):
        parser.error(f"the run in {workdir} is a {task.config.task}; expected a captioning.")
    members = list(members_of(task.config)) or [None]
    each = {member: parameters(task, workdir, options.step, member) for member in members}
    for language, examples in by_language(task, options.split, options.limit).items():
        examples = task.readable(examples)
        others = task.copied(examples)
        found = [
            compare(task, params, language, examples, others, options.num_beams, member)
            for member, params in each.items()
        ]
        if len(found) > 1 and not task.config.train.get("sweep"):
            print(f"{language or 'captions'}, the mean of {len(found)} seeds' log-likelihoods")
            print_found(ranks(np.mean(found, 0)), examples)
        train, seen = (
            task.readable(by_language(task, x)[language]) for x in ("train", "validation")
        )
        print(f"{language or 'captions'}, ridge regression of captions on pictures")
        print_found(ranks(regressed(task, train, seen, examples)), examples)


def by_language(task: Any, split: str, limit: int | None = None) -> dict[str, list[dict]]:
    """Groups examples of a split by their language, which is "" for runs without languages."""
    found = defaultdict(list)
    for example in task.examples(split):
        found[example["target"][0] if task.languages else ""].append(example)
    return {language: own[:limit] for language, own in found.items()}


def compare(
    task: Any,
    params: Any,
    language: str,
    examples: Sequence[dict],
    others: Mapping[str, Sequence[str]],
    num_beams: int | None,
    member: str | None = None,
) -> np.ndarray:
    """Prints the table of one language, beside ``others`` captions, and returns its ``log_likelihoods``."""
    begun = time.perf_counter()
    rows = {"the run": task.texts(params, examples, num_beams)[1]}
    rows |= {name.replace("_", " "): list(texts) for name, texts in others.items()}
    groups = [example["group"] for example in examples]
    right = [task.text_of(example) for example in examples]
    name = ", ".join(filter(None, (language or "captions", member)))
    print(f"{name}: {len(examples)} pictures in {len(set(groups))} families")
    for metric, (scores, differences) in of_captions(list(rows.values()), right, groups).items():
        for name, score, more in zip(rows, scores, differences, strict=True):
            than = "" if name == "the run" else f"   less the run: {more}"
            print(f"  {metric:<5}  {name:<15}  {score}{than}")
    likelihoods = of_pairs(task, params, examples)
    print_found(ranks(likelihoods), examples)
    print(f"  {time.perf_counter() - begun:.0f} s", flush=True)
    return likelihoods


def print_found(ranks: np.ndarray, examples: Sequence[dict]) -> None:
    """Prints how many pictures are among the first by their captions, from ranks [n]."""
    groups = [example["group"] for example in examples]
    for most in _RECALLS:
        found, chance = found_among(most, ranks, groups), chance_among(most, len(ranks))
        print(f"  picture among the first {most} by its caption: {found}, by chance {chance:.3f}")
    median, chance = np.median(ranks), (len(ranks) + 1) / 2
    print(f"  median rank {median:g}, by chance {chance:g}", flush=True)


def of_captions(
    systems: Sequence[Sequence[str]], references: Sequence[str], groups: Sequence[str]
) -> dict[str, tuple[list[Interval], list[Interval]]]:
    """Returns BLEU, chrF and CIDEr of each system's captions, and what each has more than the first."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    found = {
        name: of_texts(metric, [[texts] for texts in systems], references, groups)
        for name, metric in (("bleu", BLEU()), ("chrf", CHRF()))
    }
    each, ones = [cider_scores(texts, references) for texts in systems], np.ones(len(references))
    scores = [ratio(own, ones, groups) for own in each]
    return found | {"cider": (scores, [difference(each[0], own, ones, groups) for own in each])}


def ranks_of(task: Any, params: Any, examples: Sequence[dict]) -> np.ndarray:
    """Returns ranks [n], from 1, of each picture among all by the likelihood of its caption."""
    return ranks(of_pairs(task, params, examples))


def ranks(likelihoods: np.ndarray) -> np.ndarray:
    """Returns ranks [n] from likelihoods [captions pictures] of which the diagonal is of pairs."""
    return (likelihoods >= np.diagonal(likelihoods)[:, None]).sum(1)


def of_pairs(task: Any, params: Any, examples: Sequence[dict]) -> np.ndarray:
    """Returns ``log_likelihoods`` of the captions of examples given each of their pictures."""
    pictures, captions = ([e[name] for e in examples] for name in ("source", "target"))
    return log_likelihoods(task, params, pictures, captions)


def regressed(
    task: Any, train: Sequence[dict], validation: Sequence[dict], examples: Sequence[dict]
) -> np.ndarray:
    """Returns scores [captions pictures] by what ridge regression says of a caption from a picture.

    It says the tf-idf of letters in twos to fours, from pixels on their main axes; the score is the cosine to
    the caption's own. The number of axes and the penalty are chosen by the share of the validation pictures
    among the first ten.
    """
    from sklearn.decomposition import PCA
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge

    letters = TfidfVectorizer(sublinear_tf=True, analyzer="char_wb", ngram_range=(2, 4), min_df=2)
    splits = train, validation, examples
    pixels = [
        np.stack([task.features["source"].prepare(e["source"]).ravel() for e in own])
        for own in splits
    ]
    letters.fit([task.text_of(example) for example in train])
    told = [letters.transform([task.text_of(example) for example in own]) for own in splits]
    known = told[0].toarray()
    known -= known.mean(0)  # what all captions have tells none
    most = min(max(_AXES), *pixels[0].shape)
    axes = PCA(most, random_state=0).fit(pixels[0])
    along, best = [axes.transform(own) for own in pixels], (-1.0, np.zeros(0))
    for count, penalty in itertools.product(sorted({min(x, most) for x in _AXES}), _PENALTIES):
        model = Ridge(penalty, fit_intercept=False).fit(along[0][:, :count], known)
        seen, asked = (_cosines(told[i], model.predict(along[i][:, :count])) for i in (1, 2))
        among = float(np.mean(ranks(seen) <= _RECALLS[-1]))
        best = max(best, (among, asked), key=lambda pair: pair[0])
    return best[1]


def _cosines(told: Any, said: np.ndarray) -> np.ndarray:
    """Returns the cosines [captions pictures] of captions [n V], of length 1, and what is said [m V]."""
    return told @ (said / (np.linalg.norm(said, axis=1, keepdims=True) + 1e-9)).T


def found_among(most: int, ranks: np.ndarray, groups: Sequence[str]) -> Interval:
    """Returns the share of ranks [n] that are among the first ``most``, with its interval over groups."""
    return ratio(ranks <= most, np.ones(len(ranks)), groups)


def chance_among(most: int, count: int) -> float:
    """Returns that share by chance, of so many pictures."""
    return min(most / count, 1)


def log_likelihoods(
    task: Any, params: Any, pictures: Sequence[Any], captions: Sequence[Any], rows: int = 16
) -> np.ndarray:
    """Returns the log-likelihood of each caption given each picture, [captions pictures].

    The model reads each picture once, and scores captions of a batch as if they were its beams.

    Args:
      task, params: of the run.
      pictures, captions: values of "source" and "target" of renamed examples.
      rows: pictures, and captions, of a batch.
    """
    mesh, feature = mesh_of(params), task.features["target"]
    rows = rows_on(mesh, rows)
    framed = [feature.prepare(caption) for caption in captions]
    blocks = -(-len(framed) // rows)
    tokens = np.zeros((blocks * rows, max(map(len, framed))), np.int32)
    counted = np.zeros(tokens.shape, bool)
    for row, ids in enumerate(framed):
        tokens[row, : len(ids)] = ids
        counted[row, 1 + (len(task.languages) > 0) : len(ids)] = True
    tokens, counted = (x.reshape(blocks, rows, -1) for x in (tokens, counted))
    score = jax.jit(partial(_scored, task), out_shardings=everywhere(mesh))
    found = np.zeros((blocks * rows, len(pictures)), np.float32)
    for first in range(0, len(pictures), rows):
        own = [task.features["source"].prepare(x) for x in pictures[first : first + rows]]
        own += [own[0]] * (rows - len(own))
        source = spread_batch({"source": np.stack(own)}, mesh)["source"]
        block = np.asarray(score(params, source, tokens, counted))
        found[:, first : first + rows] = block[:, : len(pictures) - first]
    return found[: len(captions)]


def _scored(task: Any, params: Any, source: Any, tokens: Any, counted: Any) -> Any:
    """Returns log-likelihoods [captions pictures] of captions [blocks J T] given pictures [B H W C]."""
    model, (_, beams, length) = task.bind(params), tokens.shape
    source = task.seen({"source": source})["source"]
    states = model.prefill(len(source), beams, length - 1, source=source)

    def of_block(block: Any) -> Any:
        ids, counts = block
        given = jnp.broadcast_to(ids[:, :-1], (len(source), beams, length - 1))
        logits, _ = model.decode_step(given, states)
        told = jnp.take_along_axis(logits, ids[None, :, 1:, None], -1)[..., 0]
        log_p = told - jax.nn.logsumexp(logits, axis=-1)
        return jnp.where(counts[None, :, 1:], log_p, 0).sum(-1).T

    return jax.lax.map(of_block, (tokens, counted)).reshape(-1, len(source))


if __name__ == "__main__":
    launch.script(main)
