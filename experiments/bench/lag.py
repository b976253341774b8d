"""Quality over lag of texts that are written while their source arrives: AlignAtt, wait-k, and all at once.

    python -m experiments.bench.lag runs/fr --plot=lag.png
    python -m experiments.bench.lag tiny.en --set=asterisk --limit=40

The run of a translation, or a Whisper. A translation's source arrives token by token, sources of at most
``--longest`` tokens; quality is BLEU. Sound arrives in parts of ``--step`` seconds, in recordings of at most
a window; quality is the word error. The model is not trained for parts. The lag is LAAL, in tokens or
seconds of the source, without the time of computing; "of all" is its share of the source's length. Intervals
of 95 % are a bootstrap over examples; p is sacreBLEU's, that a BLEU is that of the text written all at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from crossattn.data.mel import HOP, RATE
from crossattn.data.speech import open_speech
from crossattn.decode import AlignAtt, GenerationConfig, Simultaneous, SoFar, WaitK, write_along
from crossattn.decode.speech import windows
from crossattn.decode.speech.transcript import TIME
from crossattn.models.whisper import STRIDE
from crossattn.train.evaluate import lagging, normalised, word_error_rate
from crossattn.train.storage import folder
from experiments import launch
from experiments.intervals import Interval, bars, ratio
from experiments.options import Options
from experiments.runs import parameters, task_of
from experiments.tasks.translation import TranslationTask
from experiments.text_scores import Texts, paired
from experiments.transcribe import frames_of, open_whisper

_WIDTH, _ROWS = 16, 64  # lengths of sources are rounded to this; sources of a batch
_TEXT: dict[str, Any] = dict(newest=(1, 2, 4), k=(1, 3, 6), unit=1)
# English has about a token in 14 vectors of 0.02 s.
_SOUND: dict[str, Any] = dict(newest=(5, 20, 50), k=(2, 6, 12), unit=14)
_LONGEST = 96  # tokens of a transcript
_ALL = WaitK(10**6)  # which never begins before the end


@dataclass(frozen=True)
class Point:
    """What a policy gave.

    Attributes:
      policy, metric: names; the metric is BLEU or word error.
      quality, lag: with their intervals.
      share: the lag in percent of the source.
      also: what else is said of the quality.
    """

    policy: str
    metric: str
    quality: Interval
    lag: Interval
    share: float
    also: str = ""

    def __str__(self) -> str:
        return (
            f"  {self.policy:<18} {self.metric} {self.quality}{self.also}  "
            f"LAAL {self.lag}, {self.share:3.0f} % of all"
        )


def main() -> None:
    """Measures and prints."""
    parser = Options(__doc__)
    parser.add_argument("model", help="a translation's work directory; tiny.en, base, or a Whisper")
    parser.add_argument("--split", metavar="NAME", default="test", help="of a translation; test")
    parser.add_argument("--limit", metavar="N", type=int, default=256, help="most examples; 256")
    parser.add_argument(
        "--longest", metavar="N", type=int, default=32, help="most tokens of a source; 32"
    )
    parser.add_argument(
        "--layer", metavar="N", type=int, default=-1, help="whose heads AlignAtt reads; -1"
    )
    parser.add_argument(
        "--set",
        metavar="NAME",
        default="librivox",
        choices=("librivox", "asterisk"),
        help="librivox or asterisk",
    )
    parser.add_argument(
        "--step", metavar="X", type=float, default=0.5, help="seconds of a part of sound; 0.5"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw it into a .png, .svg or .pdf file")
    options = parser.parse_args()
    launch.keep_compiled()
    if (folder(options.model) / "checkpoints").is_dir():
        points, unit = translate(parser, options), "tokens"
    else:
        points, unit = transcribe(options), "seconds"
    for point in points:
        print(point)
    if options.plot:
        draw(points, unit, options.plot)


def translate(parser: Options, options: Any) -> list[Point]:
    """Returns BLEU over lag, of a run's sources by length."""
    run = folder(options.model)
    task = task_of(run)
    config = task.config
    if not isinstance(task, TranslationTask):
        parser.error(f"the run in {run} is a {config.task}; expected a translation.")
    params, tokenizer, along = parameters(task, run), task.corpus.tokenizer, program(task)
    read = lambda e: tokenizer.frame.read(tokenizer.encode(e["source"]), config.data.source_len)  # noqa: E731
    pairs = [(read(example), example["target"]) for example in task.examples(options.split)]
    pairs = [pair for pair in pairs if len(pair[0]) <= options.longest][: options.limit]
    pairs.sort(key=lambda pair: len(pair[0]))
    if not pairs:
        parser.error(f"no source has at most {options.longest} tokens; give a larger --longest.")
    targets, sizes = [target for _, target in pairs], [len(ids) - 1 for ids, _ in pairs]
    wanted = [len(task.corpus.output_tokenizer.encode(target)) for target in targets]
    layer, heads = options.layer % config.model.decoder_layers, range(config.model.num_heads)
    print(
        f"{len(pairs)} sources of {np.mean(sizes):.1f} tokens, without their ends; LAAL in tokens"
    )
    texts, lags = {}, {}
    for policy in policies([(layer, head) for head in heads], **_TEXT):
        found, name = written(along, task, params, policy, [ids for ids, _ in pairs]), title(policy)
        texts[name] = task.corpus.output_tokenizer.decode_batch([ids for ids, _ in found])
        lags[name] = [
            lagging(np.minimum(places, size), size, n) if len(places) else size
            for (_, places), size, n in zip(found, sizes, wanted, strict=True)
        ]
    last = title(_ALL)
    compared = Texts({name: [texts[name]] for name in (last, *texts)}, targets, None, [])
    scores = paired(compared, config.evaluate.bleu_tokenize or "13a")
    bleu = {name: (x, f"{said:>10}") for name, metric, x, said in scores if metric == "BLEU"}
    return [point(name, "BLEU", *bleu[name], own, sizes) for name, own in lags.items()]


def program(task: Any) -> Any:
    """Returns the compiled ``write_along`` of parameters, policy, sources and their segments."""
    frame = task.corpus.output_tokenizer.frame

    def run(params: Any, policy: Any, source: Any, segments: Any) -> SoFar:
        rows, width = source.shape
        ids = dict(bos_id=frame.start, eos_id=frame.after[-1])
        config = GenerationConfig(rows, width * 5 // 4 + 8, **ids)
        return write_along(Simultaneous(policy, config), task.bind(params), source, segments)

    return jax.jit(run)


def written(
    run: Any, task: Any, params: Any, policy: Any, sources: Sequence[Sequence[int]]
) -> list[tuple[list[int], np.ndarray]]:
    """Returns the tokens of each text without its end, and the source tokens that had arrived at each."""
    frame, found = task.corpus.output_tokenizer.frame, []
    for start in range(0, len(sources), _ROWS):
        own = sources[start : start + _ROWS]
        width = -(-max(map(len, own)) // _WIDTH) * _WIDTH
        source, segments = np.zeros((2, _ROWS, width), np.int32)
        segments[:, 0] = 1
        for number, ids in enumerate(own):
            source[number, : len(ids)], segments[number, : len(ids)] = ids, 1
        so_far = jax.device_get(run(params, policy, source, segments))
        for tokens, places, n in zip(so_far.written, so_far.places, so_far.lengths, strict=True):
            n -= n > 0 and tokens[n - 1] in frame.after
            found.append((tokens[:n].tolist(), places[:n]))
    return found[: len(sources)]


def transcribe(options: Any) -> list[Point]:
    """Returns word errors over lag, of recordings of at most a window."""
    launch.need("jiwer", "whisper_normalizer", "soundfile", "soxr", install="crossattn[speech]")
    whisper = open_whisper(options.model, words=True)
    window = whisper.build.config.max_frames
    examples = [
        example
        for example in open_speech(options.set, min_words=4)
        if len(example["audio"]) <= window * HOP and "(" not in example["text"]
    ]
    examples = examples[:: max(len(examples) // options.limit, 1)][: options.limit]
    references = [example["text"] for example in examples]
    seconds = [len(example["audio"]) / RATE for example in examples]
    chosen = [*policies(whisper.heads, **_SOUND)]
    heard = [live(whisper, chosen, example["audio"], options.step) for example in examples]
    print(
        f"{len(examples)} recordings of {np.mean(seconds):.1f} s, in parts of {options.step:g} s; LAAL in s"
    )
    points, words = [], [len(normalised(text).split()) for text in references]
    for policy, own in zip(chosen, zip(*heard, strict=True), strict=True):
        lags = [
            lagging(np.minimum(times, size), size, n) if len(times) else size
            for (_, times), n, size in zip(own, words, seconds, strict=True)
        ]
        rates = [
            word_error_rate([text], [hypothesis])
            for text, (hypothesis, _) in zip(references, own, strict=True)
        ]
        errors = ratio(np.multiply(rates, words), words)
        points.append(point(title(policy), "word error %", errors, "", lags, seconds))
    return points


def live(
    whisper: Any, chosen: Sequence[Any], audio: np.ndarray, step: float
) -> list[tuple[str, list[float]]]:
    """Returns the text of each policy, and the seconds that had been heard when each word was whole."""
    tokens, config = whisper.tokens, whisper.build.config
    prefix = tokens.prefix("en", times=False)
    begun = SoFar.begin(GenerationConfig(1, _LONGEST, prefix=prefix, pad_id=tokens.end))
    texts, size = [begun for _ in chosen], round(step * RATE)
    for end in range(size, len(audio) + size, size):
        frames = frames_of(audio[:end], whisper)
        padded = np.pad(frames, ((0, config.max_frames - len(frames)), (0, 0)))
        encoded = windows.hear(whisper.build, whisper.params, padded[None])
        arrived = np.array([-(-len(frames) // STRIDE)]), np.array([end >= len(audio)])
        texts = [
            windows.write_on(
                whisper.build, whisper.params, encoded, text, *arrived, tokens=tokens, policy=policy
            )
            for policy, text in zip(chosen, texts, strict=True)
        ]
    found = []
    for text in jax.device_get(texts):
        ids = [id for id in text.written[0, : text.lengths[0]].tolist() if id != tokens.end]
        ends = np.cumsum([len(group) for _, group in tokens.words(ids, "en")], dtype=int)
        found.append((tokens.decode(ids), np.round(text.places[0][ends - 1] * TIME, 2).tolist()))
    return found


def policies(
    heads: Sequence[tuple[int, int]], newest: Sequence[int], k: Sequence[int], unit: int
) -> list[Any]:
    """Returns the policies to compare; the last reads the whole source first."""
    return [*(AlignAtt(f, tuple(heads)) for f in newest), *(WaitK(n, unit) for n in k), _ALL]


def title(policy: Any) -> str:
    """Returns the name of a policy."""
    if isinstance(policy, AlignAtt):
        return f"AlignAtt, f = {policy.newest}"
    return "all at once" if policy is _ALL else f"wait-{policy.k}"


def point(
    name: str,
    metric: str,
    quality: Interval,
    also: str,
    lags: Sequence[float],
    sizes: Sequence[float],
) -> Point:
    """Returns what a policy gave, from the lag of each example and the sizes of the sources."""
    share = 100 * float(np.sum(lags) / np.sum(sizes))
    return Point(name, metric, quality, ratio(lags, np.ones(len(lags))), share, also)


def draw(points: Sequence[Point], unit: str, path: str) -> None:
    """Draws quality over lag: a line for each kind of policy, and the level of a text written at the end."""
    from crossattn import viz
    from crossattn.viz.figure import GRID, Picture

    figure = Picture()
    figure.set_size_inches(6, 4)
    axes, last = figure.subplots(), points[-1]
    for kind, place in (("AlignAtt", (-30, 6)), ("wait", (4, -11))):
        own = [p for p in points if p.policy.startswith(kind)]
        lags, (values, beyond) = [p.lag.value for p in own], bars([p.quality for p in own])
        axes.errorbar(lags, values, beyond, marker="o", markersize=4, capsize=3, label=kind)
        for p, lag, value in zip(own, lags, values, strict=True):
            name = p.policy.removeprefix("AlignAtt, ")
            axes.annotate(name, (lag, value), place, textcoords="offset points")
    axes.axhline(last.quality.value, color="grey", linestyle="--", linewidth=1, label=last.policy)
    axes.set(xlabel=f"LAAL, {unit}", ylabel=last.metric, ylim=(0, None), xlim=(0, None))
    axes.grid(color=GRID)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    viz.save(figure, Path(path))


if __name__ == "__main__":
    launch.script(main)
