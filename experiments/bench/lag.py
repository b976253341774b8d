"""Quality over lag of texts that are written while their source arrives: AlignAtt, wait-k, and all at once.

    python -m experiments.bench.lag runs/fr
    python -m experiments.bench.lag tiny.en --set=asterisk --limit=40

The run of a translation, or a Whisper. A translation's source arrives token by token, sources of at most
``--longest`` tokens; quality is BLEU. Sound arrives in parts of ``--step`` seconds, in recordings of at most
a window; quality is the word error. The model is not trained for parts. The lag is LAAL, in tokens or
seconds of the source, without the time of computing; "of all" is its share of the source's length.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from crossattn.data.mel import HOP, RATE
from crossattn.data.speech import open_speech
from crossattn.decode import AlignAtt, GenerationConfig, Simultaneous, SoFar, WaitK, write_along
from crossattn.decode.speech import windows
from crossattn.decode.speech.transcript import TIME
from crossattn.models.whisper import STRIDE
from crossattn.train.evaluate import lagging, normalised, translation_scores, word_error_rate
from crossattn.train.storage import folder
from experiments import launch
from experiments.options import Options
from experiments.runs import parameters, task_of
from experiments.tasks.translation import TranslationTask
from experiments.transcribe import frames_of, open_whisper

_WIDTH, _ROWS = 16, 64  # lengths of sources are rounded to this; sources of a batch
_TEXT: dict[str, Any] = dict(newest=(1, 2, 4), k=(1, 3, 6), unit=1)
# English has about a token in 14 vectors of 0.02 s.
_SOUND: dict[str, Any] = dict(newest=(5, 20, 50), k=(2, 6, 12), unit=14)
_LONGEST = 96  # tokens of a transcript
_ALL = WaitK(10**6)  # which never begins before the end


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
    options = parser.parse_args()
    launch.keep_compiled()
    if (folder(options.model) / "checkpoints").is_dir():
        translate(parser, options)
    else:
        transcribe(options)


def translate(parser: Options, options: Any) -> None:
    """Prints BLEU over lag, of a run's sources by length."""
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
    print(f"{len(pairs)} sources of {np.mean(sizes):.1f} tokens, without their ends")
    for policy in policies([(layer, head) for head in heads], **_TEXT):
        found = written(along, task, params, policy, [ids for ids, _ in pairs])
        texts = task.corpus.output_tokenizer.decode_batch([ids for ids, _ in found])
        scores = translation_scores(texts, targets, tokenize=config.evaluate.bleu_tokenize)
        lags = [
            lagging(np.minimum(places, size), size, n) if len(places) else size
            for (_, places), size, n in zip(found, sizes, wanted, strict=True)
        ]
        quality = f"BLEU {scores['bleu']:5.1f}  chrF {scores['chrf']:5.1f}"
        print(row(policy, quality, lags, sizes, "tokens"), flush=True)


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


def transcribe(options: Any) -> None:
    """Prints word errors over lag, of recordings of at most a window."""
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
    print(f"{len(examples)} recordings of {np.mean(seconds):.1f} s, in parts of {options.step:g} s")
    for policy, own in zip(chosen, zip(*heard, strict=True), strict=True):
        lags = [
            lagging(np.minimum(times, size), size, len(normalised(text).split()))
            if len(times)
            else size
            for (_, times), text, size in zip(own, references, seconds, strict=True)
        ]
        rate = word_error_rate(references, [text for text, _ in own])
        print(row(policy, f"word error {rate:5.1f} %", lags, seconds, "s"), flush=True)


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


def row(policy: Any, quality: str, lags: Any, sizes: Any, unit: str) -> str:
    """Returns a line of a table."""
    name = "all at once" if policy is _ALL else f"wait-{getattr(policy, 'k', '')}"
    name = f"AlignAtt, f = {policy.newest}" if isinstance(policy, AlignAtt) else name
    lag, share = np.mean(lags), 100 * np.mean(lags) / np.mean(sizes)
    return f"  {name:<18} {quality}  LAAL {lag:5.2f} {unit}, {share:3.0f} % of all"


if __name__ == "__main__":
    main()
