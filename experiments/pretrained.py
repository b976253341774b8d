"""The model of a published checkpoint in training: ``config.model.name = "pretrained"``.

A run keeps all of the checkpoint but its weights in ``assets/pretrained``: config, settings of generation,
tokenizer, names of tensors. So it is resumed, evaluated and exported (``experiments.export``) without the
folder of ``config.init.from``.
"""

import functools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from crossattn import weights
from crossattn.data.errors import DataError
from crossattn.data.published_tokenizer import PublishedTokenizer, frame_of
from crossattn.data.tokenizers import Frame, Tokenizer, most_id
from crossattn.data.whisper_tokens import WhisperTokens
from crossattn.models import Decoder, Whisper
from crossattn.train.storage import Folder, local_copy
from crossattn.weights.formats.safetensors import WEIGHTS
from crossattn.weights.formats.tensors import Layout, Tensors
from crossattn.weights.hub import find_folder
from crossattn.weights.pretrained import Pretrained
from crossattn.weights.settings import read_settings
from crossattn.weights.tokenizers.tokenizer import (
    files_beside,
    read_target_tokenizer,
    read_tokenizer,
)
from experiments import tiny_checkpoints
from experiments.errors import SettingsError
from experiments.keys import NAME_OF_PRETRAINED as NAME

_TENSORS = "tensors.json"  # names and types, which tell the class of a model
_CONFIGS = ("config.json", "generation_config.json")
_TINY, _PAIR = "tiny:", "pair:"


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint without its weights.

    Attributes:
      source: its name in messages.
      model: a *build* with the checkpoint's config.
      files: the files that a run keeps, by name.
      tokenizer: of the sources, or of all texts.
      target_tokenizer: of the targets, if it differs.
    """

    source: str
    model: Pretrained
    files: Mapping[str, bytes]
    tokenizer: PublishedTokenizer
    target_tokenizer: PublishedTokenizer | None

    @property
    def output_tokenizer(self) -> PublishedTokenizer:
        """The tokenizer of generated ids."""
        return self.target_tokenizer or self.tokenizer

    def longest(self) -> tuple[int | None, int | None]:
        """Returns the largest numbers of tokens, or frames, of source and target; None is unlimited."""
        return nnx.eval_shape(lambda: self.model(nnx.Rngs(0))).longest

    def search(self, max_new_tokens: int, **changes: Any) -> dict[str, Any]:
        """Returns the checkpoint's arguments of ``decode.generate``, with changes by its own names.

        Raises:
          SettingsError: it has unsupported settings.
        """
        frame, alone = self.output_tokenizer.frame, self.model.module is Decoder
        given = {"bos_token_id" if alone else "decoder_start_token_id": frame.start, **changes}
        given.setdefault("eos_token_id", frame.after[0])
        if self.target_tokenizer is not None and frame.before:
            given["forced_bos_token_id"] = frame.before[0]  # the language
        try:
            return self.model.generation(max_new_tokens=max_new_tokens, **given)
        except weights.CheckpointError as error:
            raise SettingsError(
                f"{self.source}: {error} Change its generation_config.json, or its config.json."
            ) from None

    def save(self, directory: Folder) -> None:
        """Writes ``files`` into a run's assets."""
        kept = directory / NAME
        kept.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            (kept / name).write_bytes(content)

    def export(self, folder: Path, params: Any) -> Path:
        """Writes a checkpoint that ``transformers`` reads, in float32."""
        settings = json.loads(self.model.text)
        typed = {name: "float32" for name in ("dtype", "torch_dtype") if name in settings}
        text = json.dumps(settings | typed, indent=2) + "\n"
        names = {name: name for name in Tensors.of(self.model, params)}
        beside = {k: x for k, x in self.files.items() if k not in (*_CONFIGS, _TENSORS)}
        model = replace(self.model, text=text, layout=Layout({WEIGHTS: names}, beside=beside))
        return weights.save(folder, model, jax.device_get(params))


class UnreadVocabulary(Tokenizer):
    """The tokenizer of a plan, which has a size and reads nothing."""

    def __init__(self, size: int):
        self._size = size

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._size


def open_checkpoint(config: Any, assets: Folder | None = None) -> Checkpoint:
    """Opens the checkpoint that a run began from, or that ``config.init.from`` names, without weights.

    Raises:
      SettingsError: none is named, or it has no tokenizer.
      CheckpointError: it is none that is known here.
      DataError: a run has lost what it kept.
    """
    kept = None if assets is None else assets / NAME
    if assets is not None and kept is not None and (kept / _TENSORS).exists():
        folder, source = local_copy(kept), str(assets.parent)
        tensors = json.loads((folder / _TENSORS).read_bytes())
    else:
        _refuse_lost(assets)
        source = config.get("init", {}).get("from")
        if not source:
            raise SettingsError(
                "config.model.name is 'pretrained', and nothing says which; name a checkpoint's folder by"
                " config.init.from."
            )
        folder = checkpoint_folder(source)
        if [path.name for path in folder.iterdir()] == ["config.json"]:
            return _described(source, folder, config.model)
        tensors = weights.tensor_types(folder)
    dtype = config.model.get("dtype")
    model = weights.describe_folder(folder, tensors, dtype)
    if remat := config.model.get("remat", False):
        model = replace(model, config=_laid(model.config, remat=remat))
    paths = [*files_beside(folder), *(folder / n for n in _CONFIGS if (folder / n).is_file())]
    files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    files[_TENSORS] = (json.dumps(tensors, indent=1) + "\n").encode()
    return Checkpoint(source, model, files, *_tokenizers(source, folder, model, config))


def _described(source: str, folder: Path, options: Any) -> Checkpoint:
    """Returns the checkpoint of a config alone, for a plan; scanned layers compile in seconds."""
    _, settings = read_settings(folder / "config.json")
    model = weights.describe(settings, options.get("dtype"))
    laid = _laid(model.config, scan=True, remat=options.get("remat", False))
    tokenizer: Any = UnreadVocabulary(_vocabulary(settings))
    return Checkpoint(source, replace(model, config=laid), {}, tokenizer, None)


def _laid(config: Any, **changes: Any) -> Any:
    """Returns a model's config with these values of its fields and of its parts' fields."""
    own = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in changes:
            own[field.name] = changes[field.name]
        elif is_dataclass(value):
            own[field.name] = _laid(value, **changes)
    return replace(config, **own)


def checkpoint_folder(source: str) -> Path:
    """Returns the folder of a path, a name on the hub, a packaged model, ``tiny:KIND`` or a pair of them.

    ``pair:A+B`` is the encoder-decoder that ``weights.warm_start`` makes of two BERTs, ``pair:A`` of one.

    Raises:
      SettingsError: there is no such tiny checkpoint.
      CheckpointError: there is no such folder, or it holds none that makes a pair.
    """
    if source.startswith(_PAIR):
        return Path(_pair(source.removeprefix(_PAIR)).name)
    if source.startswith(_TINY):
        return Path(_tiny(source.removeprefix(_TINY)).name)
    from experiments import fetch_weights  # defines the flags of a launcher

    if source in fetch_weights.MODELS and not Path(source).is_dir():
        return fetch_weights.packaged(source)
    return find_folder(Path(source) if Path(source).is_dir() else source)


@functools.cache
def _pair(halves: str) -> tempfile.TemporaryDirectory:
    """Writes the pair of two checkpoints to a folder that lasts as long as the process."""
    folders = [checkpoint_folder(half) for half in halves.split("+", 1)]
    model, params, _ = weights.warm_start(*folders, key=jax.random.key(0))
    scratch = tempfile.TemporaryDirectory(prefix="crossattn-")
    weights.save(scratch.name, model, params)
    return scratch


@functools.cache
def _tiny(kind: str) -> tempfile.TemporaryDirectory:
    """Writes a tiny checkpoint to a folder that lasts as long as the process."""
    if kind not in tiny_checkpoints.known():
        raise SettingsError(
            f"config.init.from is {_TINY + kind!r}; expected {_TINY} and one of"
            f" {', '.join(tiny_checkpoints.known())}."
        )
    scratch = tempfile.TemporaryDirectory(prefix="crossattn-")
    tiny_checkpoints.write(kind, Path(scratch.name))
    return scratch


def _refuse_lost(assets: Folder | None) -> None:
    if assets is None:
        return
    checkpoints = assets.parent / "checkpoints"
    if checkpoints.is_dir() and any(step.name.isdigit() for step in checkpoints.iterdir()):
        raise DataError(
            f"{assets / NAME} is missing, which says what {checkpoints} are of: a model of transformers"
            " begins from a checkpoint of theirs, or from a run that did; restore it, or start over with"
            " --resume=never or in another --workdir"
        )


def _tokenizers(
    source: str, folder: Path, model: Pretrained, config: Any
) -> tuple[PublishedTokenizer, PublishedTokenizer | None]:
    """Returns the tokenizers of sources and of targets; None where it is the same."""
    kind, options = json.loads(model.text)["model_type"], config.get("tokenizer", {})
    reader = read_tokenizer(folder, kind)
    if reader is None:
        raise SettingsError(
            f"{source} has no tokenizer; expected tokenizer.json beside config.json, as"
            " AutoTokenizer.from_pretrained(...).save_pretrained(folder) of transformers writes it."
        )
    _refuse_more_tokens(source, model, reader)
    writer = read_target_tokenizer(folder, kind) or reader
    language = options.get("target_language")
    if model.module is Whisper:
        tokens = WhisperTokens(
            reader, f"the tokenizer of {source}", model.settings.get("is_multilingual")
        )
        start, *before = tokens.prefix(language or "en", times=False)
        frame = Frame(start, tuple(before), (tokens.end,))
        return PublishedTokenizer(reader, frame), None
    try:
        if options.get("source_language"):
            reader = weights.with_language(reader, options["source_language"])
        if language:
            writer = weights.with_language(writer, language)
    except ValueError as error:
        raise SettingsError(f"config.tokenizer: {source}: {error}") from None
    pair = [PublishedTokenizer(reader, _frame(model, reader, False)),
            PublishedTokenizer(writer, _frame(model, writer, True))]  # fmt: skip
    return pair[0], None if pair[0] == pair[1] else pair[1]


def _frame(model: Pretrained, backend: Any, written: bool) -> Frame:
    """Returns the tokens around a text: the tokenizer's, and the model's start."""
    before, after = frame_of(backend)
    eos = () if after else np.ravel(model.ids["eos_id"])[:1]
    after = after or tuple(int(id) for id in eos)
    if not after:
        raise SettingsError("the checkpoint says nowhere with which token a text ends.")
    if model.module is Decoder:
        start = before[0] if before else model.ids["bos_id"]
    elif hasattr(model.module, "prefill"):
        start = int(model.target_in(np.array([[*before, *after]]))[0, 0])
    else:
        start = before[0] if before else after[0]
    if written and before[:1] == (start,):
        before = before[1:]
    return Frame(start, before, after)


def _refuse_more_tokens(source: str, model: Pretrained, backend: Any) -> None:
    size = _vocabulary(json.loads(model.text))
    if most_id(backend) >= size:
        raise SettingsError(
            f"the tokenizer of {source} has ids up to {most_id(backend)}, its model a vocabulary of {size};"
            " they belong to different checkpoints."
        )


def _vocabulary(settings: Mapping[str, Any]) -> int:
    halves = (settings, settings.get("encoder", {}), settings.get("decoder", {}))
    return next(half["vocab_size"] for half in halves if "vocab_size" in half)
