"""Random settings of generation: the texts that ``transformers`` writes, or a refusal that names one."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import crossattn as xa
from experiments.fuzz import Wrong
from experiments.parity import cases, reference
from experiments.parity.cases import BOS, EOS, PAD, VOCAB, Case

ABOUT = "random settings of generation, against generate of transformers"
NEEDS = ("torch", "transformers", "safetensors")
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "OMP_NUM_THREADS": "2",
}
_LENGTH, _ROWS = 8, 4


def _words(random: np.random.Generator, most: int = 3) -> list[int]:
    return random.integers(3, VOCAB, random.integers(1, most + 1)).tolist()


# The settings that are drawn, and how. Where a model lacks one, transformers says so or does nothing.
_DRAWS: dict[str, Callable[[np.random.Generator], Any]] = {
    "num_beams": lambda r: int(r.choice([0, 1, 2, 3, 4])),
    "length_penalty": lambda r: float(r.choice([-1.0, 0.0, 0.5, 1.0, 2.0])),
    "early_stopping": lambda r: [False, True, "never"][r.integers(3)],
    "no_repeat_ngram_size": lambda r: int(r.integers(0, 4)),
    "bad_words_ids": lambda r: [_words(r) for _ in range(r.integers(1, 4))],
    "min_length": lambda r: int(r.integers(0, 8)),
    "min_new_tokens": lambda r: int(r.integers(0, 7)),
    "forced_bos_token_id": lambda r: int(r.integers(3, VOCAB)),
    "forced_eos_token_id": lambda r: [EOS, [EOS], [EOS, 7]][r.integers(3)],
    "suppress_tokens": lambda r: _words(r, 5),
    "begin_suppress_tokens": lambda r: _words(r, 5),
    "eos_token_id": lambda r: [[EOS, int(r.integers(3, VOCAB))], EOS][r.integers(2)],
    "decoder_start_token_id": lambda r: int(r.choice([PAD, BOS, EOS, 9])),
    "repetition_penalty": lambda r: float(r.choice([1.0, 1.3])),
    "renormalize_logits": lambda r: bool(r.integers(2)),
    "exponential_decay_length_penalty": lambda r: (3, 1.5),
    "sequence_bias": lambda r: [[_words(r), 1.5]],
    "encoder_no_repeat_ngram_size": lambda r: 2,
    "encoder_repetition_penalty": lambda r: 1.4,
    "guidance_scale": lambda r: float(r.choice([1.0, 1.7])),
    "num_beam_groups": lambda r: int(r.choice([1, 2])),
    "penalty_alpha": lambda r: float(r.choice([0.0, 0.6])),
    "force_words_ids": lambda r: [_words(r)],
    "max_time": lambda r: 1e-9,
    "watermarking_config": lambda r: {"bias": 5.0, "greenlist_ratio": 0.25},
    "stop_strings": lambda r: ["a"],
    "dola_layers": lambda r: "low",
    "token_healing": lambda r: True,
    "constraints": lambda r: [{"token_ids": _words(r)}],
    "top_k": lambda r: int(r.choice([1, 5])),
    "temperature": lambda r: float(r.choice([0.5, 2.0])),
    "typical_p": lambda r: 0.5,
}
_COMMON = list(_DRAWS)[:13]


def start(folder: Path) -> Callable[[np.random.Generator], None]:
    """A small model of some family with some settings; each is made when it is first drawn."""
    kinds = [c for c in cases.CASES if c.search and c.kind in ("pair", "decoder") and not c.reads]
    # The turns of dynamic positions depend on how many tokens a call reads: all of a prompt there, all but
    # its last here.
    kinds = [c for c in kinds if not c.name.endswith(", dynamic")]
    made: dict[str, Any] = {}

    def case(random: np.random.Generator) -> None:
        kind = kinds[random.integers(len(kinds))]
        place = folder / kind.name
        if kind.name not in made:
            made[kind.name] = reference.build(kind, place)
        _compare(random, kind, made[kind.name], place)

    return case


def _compare(random: np.random.Generator, kind: Case, model: Any, folder: Path) -> None:
    """The same checkpoint with the same ``generation_config.json`` on both sides."""
    names = random.choice(_COMMON, random.integers(1, 4), replace=False).tolist()
    if random.random() < 0.3:
        names.append(list(_DRAWS)[random.integers(len(_COMMON), len(_DRAWS))])
    settings = {name: _DRAWS[name](random) for name in sorted(names)}
    inputs = _inputs(random, kind)
    said = f"{kind.name.split(',')[0]} with {json.dumps(settings)}"
    theirs = _theirs(kind, model, settings, inputs)
    try:
        ours = _ours(kind, folder, model.config, settings, inputs)
    except (ValueError, NotImplementedError) as refusal:
        # Refused by name; one that transformers refuses as well may be refused in any words.
        if theirs is not None and not any(name in str(refusal) for name in settings):
            raise Wrong(f"{said}: refused without naming a setting: {refusal}") from refusal
        return
    if theirs is None:
        return
    ends = settings.get("eos_token_id", EOS)
    written, wanted = (_texts(tokens, ends) for tokens in (ours, theirs))
    if wrong := sum(a != b for a, b in zip(written, wanted, strict=True)):
        first = next((a, b) for a, b in zip(written, wanted, strict=True) if a != b)
        raise Wrong(f"{said}: {wrong} of {_ROWS} texts differ, such as {first[0]} for {first[1]}")


def _inputs(random: np.random.Generator, kind: Case) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and where they are; sources end in padding, prompts begin with it."""
    size = int(random.integers(1, 7))
    tokens = random.integers(3, VOCAB, (_ROWS, size))
    lengths = random.integers(1, size + 1, (_ROWS, 1))
    lengths[random.integers(_ROWS)] = size  # else all rows have padding that only one side counts
    there = np.arange(size) < lengths
    if kind.kind == "decoder":
        there = there[:, ::-1]
    return np.where(there, tokens, PAD), there.astype(np.int64)


def _theirs(kind: Case, model: Any, settings: dict[str, Any], inputs: Any) -> np.ndarray | None:
    """Generated tokens, without what they began with; None where transformers itself refuses."""
    import torch
    from transformers import GenerationConfig

    tokens, there = (torch.from_numpy(x) for x in inputs)
    ids = dict(
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
    )  # fmt: skip
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = GenerationConfig(
                **{**ids, **settings}, max_new_tokens=_LENGTH, do_sample=False
            )
            written = model.generate(tokens, attention_mask=there, generation_config=config)
    except Exception:  # of any kind: what it does not do is no measure
        return None
    return written[:, tokens.shape[1] if kind.kind == "decoder" else 1 :].numpy()


def _ours(kind: Case, folder: Path, config: Any, settings: dict[str, Any], inputs: Any) -> Any:
    """The same with this library, whose settings come from the file."""
    ids = dict(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    if (first := getattr(config, "decoder_start_token_id", None)) is not None:
        ids["decoder_start_token_id"] = first
    text = json.dumps({**ids, **settings})
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    model, params, _ = xa.load(folder)
    options = model.generation(max_new_tokens=_LENGTH)
    tokens, there = inputs
    if kind.kind == "decoder":
        prompts = [row[place > 0].tolist() for row, place in zip(tokens, there, strict=True)]
        options["prefix"] = prompts

        def run(params):
            return xa.decode.generate(xa.functional.bind(model, params), batch=_ROWS, **options)
    else:

        def run(params):
            bound = xa.functional.bind(model, params)
            return xa.decode.generate(bound, *(x.astype(np.int32) for x in inputs), **options)

    return np.asarray(jax.jit(run)(params).tokens[:, 0])


def _texts(tokens: np.ndarray, ends: int | list[int]) -> list[list[int]]:
    """Each row up to its first end, that included, or to what only fills it up."""
    stops = {ends} if isinstance(ends, int) else set(ends)
    texts = []
    for row in np.asarray(tokens).tolist():
        at = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        texts.append(row[:at])
    return texts
