"""Loads a checkpoint as a model with parameters, and saves it as the same bytes again."""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flax import nnx

from crossattn import functional
from crossattn.types import AnyArray, Array, Int, Key, Params
from crossattn.weights import deltas
from crossattn.weights.formats import safetensors
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.formats.tensors import Layout, Place, Tensors, read
from crossattn.weights.generation import arguments, special_ids, stored
from crossattn.weights.hub import find_folder
from crossattn.weights.labels import last_first, shift_right
from crossattn.weights.quantize import quantize, quantizer
from crossattn.weights.rules import Names, Rules, canonical
from crossattn.weights.settings import Settings, buildable, check_numbers, read_settings
from crossattn.weights.tokenizers.tokenizer import files_beside, read_tokenizer

# File in families/ -> the model_type entries of config.json that it knows.
_FAMILIES = {
    "annalog": ["annalog"],
    "bart": ["bart", "blenderbot", "marian", "mbart", "mvp", "pegasus", "plbart"],
    "bert": ["bert"],
    "clip": ["clip", "clip_vision_model"],
    "crossvit": ["crossvit"],
    "g2p_en": ["g2p-en"],
    "gpt2": ["gpt2"],
    "llama": ["llama", "mistral", "qwen2"],
    "llava": ["llava"],
    "pairs": ["encoder-decoder", "vision-encoder-decoder"],
    "perceiver": ["perceiver"],
    "speecht5": ["speecht5"],
    "t5": ["mt5", "t5"],
    "trocr": ["trocr"],
    "vit": ["deit", "vit"],
    "whisper": ["whisper"],
}
_FILE_OF = {kind: file for file, kinds in _FAMILIES.items() for kind in kinds}
# Decoders alone, whose texts begin with bos_token_id.
_ALONE = ("bert", "gpt2", "llama", "llava", "mistral", "qwen2", "trocr")


@dataclass(frozen=True)
class Pretrained:
    """A model as its checkpoint describes it, a *build* of ``crossattn.functional``.

    ``xa.apply(model, params, ...)``, ``functional.bind(model, params)``, ``xa.init(model, key)``.

    Attributes:
      module: the class.
      config: its configuration.
      text: ``config.json``.
      rules: map parameters to tensors.
      generation_text: ``generation_config.json``, None without one.
      layout: of the checkpoint's files; None for a model that was not loaded.
    """

    module: Callable[..., nnx.Module]
    config: Any
    text: str
    rules: Rules = field(compare=False, repr=False)
    generation_text: str | None = field(default=None, compare=False, repr=False)
    layout: Layout | None = field(default=None, compare=False, repr=False)

    def __call__(self, rngs: nnx.Rngs) -> Any:
        return self.module(self.config, rngs=rngs)

    def target_in(self, labels: Int[AnyArray, "B T"]) -> Int[Array, "B T"]:
        """Returns the decoder's input that predicts these labels: the same tokens, one position later.

        Args:
          labels: tokens, end-of-sentence included; -100 where nothing is to be predicted.

        Raises:
          CheckpointError: ``config.json`` lacks the ids of the first token or of padding.
        """
        config = Settings(json.loads(self.text))
        kind, nested = config["model_type"], config.get("decoder") or {}

        def own(name: str) -> int:
            found = [part[name] for part in (config, nested) if part.get(name) is not None]
            if not found:
                raise CheckpointError(
                    f"config.json lacks {name}; shift the labels by "
                    "weights.shift_right(labels, start_id, pad_id)."
                )
            return found[0]

        if kind in ("mbart", "plbart"):
            return last_first(labels, own("pad_token_id"))
        start = own("bos_token_id" if kind == "annalog" else "decoder_start_token_id")
        return shift_right(labels, start, own("pad_token_id"))

    @property
    def settings(self) -> Settings:
        """``config.json``, updated by ``generation_config.json``."""
        own = json.loads(self.generation_text or "{}")
        return Settings(json.loads(self.text) | {key: x for key, x in own.items() if x is not None})

    @property
    def ids(self) -> dict[str, Any]:
        """The ids for ``crossattn.decode``: ``bos_id``, ``eos_id`` (several or none: a tuple), ``pad_id``.

        As in transformers, ``generation_config.json`` has them if it is there: then ``config.json`` supplies
        no missing id, the default of padding is the first end, and without an end texts run on.
        """
        return special_ids(self._stored, self._starts)

    def generation(
        self, *, max_new_tokens: int, key: Key[Array, "*#B"] | None = None, **changes: Any
    ) -> dict[str, Any]:
        """Returns arguments by which ``decode.generate`` writes what transformers does.

        They are ``ids`` and the settings of ``generation_config.json``, or without it of ``config.json``:
        beams or draws, lengths, forced and banned tokens. As there, ``min_length`` counts a prompt and the
        padding to its left, ``min_new_tokens`` neither. A Whisper also needs a ``prefix`` of language and
        task; ``decode.speech.transcribe`` is for recordings.

        Args:
          max_new_tokens: the largest number of generated tokens.
          key: of draws, where ``do_sample`` asks for them; see ``decode.sample``.
          **changes: replace the checkpoint's settings: ``num_beams=1`` for greedy decoding,
            ``forced_bos_token_id`` for the language of mBART-50, ``eos_token_id`` for a missing end.

        Raises:
          CheckpointError: the checkpoint asks for unsupported or contradictory settings, or says nowhere
            what a text begins with.
          ValueError: a change is of no known setting, or there is a key and nothing is drawn.
        """
        config = json.loads(self.text)
        decoder = config.get("decoder") or config.get("text_config") or config
        vocab_size = decoder.get("decoder_vocab_size") or Settings(decoder)["vocab_size"]
        return arguments(self._stored, self._starts, vocab_size, max_new_tokens, key, changes)

    @property
    def _stored(self) -> dict[str, Any]:
        own = None if self.generation_text is None else json.loads(self.generation_text)
        return stored(json.loads(self.text), own)

    @property
    def _starts(self) -> tuple[str, ...]:
        """The names of the setting of the first token."""
        alone = self.settings["model_type"] in _ALONE
        return ("bos_token_id",) if alone else ("decoder_start_token_id", "bos_token_id")


def load(
    source: str | Path,
    *,
    base: str | Path | None = None,
    dtype: Any = None,
    place: Place | None = None,
    int8: bool = False,
) -> tuple[Pretrained, Params, Any]:
    """Loads a pretrained model: (model, params, tokenizer).

    The config names no ``pad_id``: as in ``transformers``, the model reads padding unless segments hide it,
    ``(source != model.ids["pad_id"]).astype(int)``. Gradients are those of ``transformers`` too: the vector
    of its ``padding_idx`` learns as an output, not where it is looked up.

    Args:
      source: a folder with ``config.json`` and safetensors as ``transformers`` writes them, or a name
        on the Hugging Face hub (needs ``huggingface_hub`` and a network); or the file of a delta.
      base: the model that a delta belongs to, a folder or a name.
      dtype: computation dtype, None for float32. Parameters keep the dtype of their file.
      place: (logical axes, shape) -> sharding of each tensor as it is read; None is the default device.
      int8: quantises matrices as they are read, see ``quantize``; such a model cannot be saved.

    Returns:
      A build, see ``Pretrained``; its nested dict of parameters; a ``tokenizers.Tokenizer``, or None when
      the folder has none. A warning names tokenizer files of an unknown kind.

    Raises:
      CheckpointError: the model is of an unknown kind, the files do not fit it, or a delta not its base.
      ImportError: a package of ``crossattn[weights]`` is missing.
    """
    if base is not None:
        model, params, tokenizer = load(base, dtype=dtype, place=place)
        params = deltas.read(source).applied(params)
        functional.check(model, params)
        return model, quantize(model, params) if int8 else params, tokenizer
    folder = find_folder(source)
    files, names = _opened(folder)
    model = describe_folder(folder, {names[n]: x for n, x in files.dtypes.items()}, dtype)
    names, rules = model.rules.standing_in(names), model.rules
    options = {"finish": quantizer(model)} if int8 else {}
    params, layout = read(model, rules, files, names, place, **options)
    beside = {str(p.relative_to(folder)): p.read_bytes() for p in files_beside(folder)}
    model = replace(model, layout=replace(layout, beside={**layout.beside, **beside}))
    return model, params, read_tokenizer(folder, _kind(Settings(json.loads(model.text))))


def tensor_types(folder: Path) -> dict[str, str]:
    """Returns the tensors of a checkpoint's folder: name in its family -> type.

    Raises:
      CheckpointError: there are none, or a file is damaged.
    """
    files, names = _opened(folder)
    return {names[name]: dtype for name, dtype in files.dtypes.items()}


def describe_folder(folder: Path, tensors: Mapping[str, str], dtype: Any = None) -> Pretrained:
    """Returns the model of a folder's ``config.json`` and ``generation_config.json``, without its weights.

    Args:
      folder: of the two files.
      tensors: see ``tensor_types``.
      dtype: as in ``load``.

    Raises:
      CheckpointError: the model is of an unknown kind.
    """
    text, settings = read_settings(folder / "config.json")
    module, config, rules = _configured(settings, Names(tensors), dtype)
    generation = folder / "generation_config.json"
    own = read_settings(generation)[0] if generation.is_file() else None
    return Pretrained(module, config, text, rules, own)


def describe(settings: Mapping[str, Any], dtype: Any = None) -> Pretrained:
    """Returns the model that a ``config.json`` describes, for ``xa.init``."""
    text = json.dumps(dict(settings), indent=2, sort_keys=True) + "\n"
    module, config, rules = _configured(Settings(settings), Names(), dtype)
    return Pretrained(module, config, text, rules)


def _configured(settings: Settings, names: Names, dtype: Any) -> tuple[Any, Any, Rules]:
    check_numbers(settings, None if names.dtypes is None else len(names.dtypes))
    with buildable(_kind(settings)):
        return _family(settings).configure(settings, names, dtype)


def save(
    folder: str | Path, model: Pretrained, params: Params, *, delta_of: Params | None = None
) -> Path:
    """Writes ``config.json`` and safetensors that ``transformers`` reads; returns the folder.

    With the parameters ``delta_of`` that a fine-tuning began from, writes what it changed alone, as the
    file ``folder``, NAME.safetensors, which ``load(file, base=...)`` reads; see ``weights.deltas``.

    A loaded checkpoint is written as it was: the same files, names, dtypes, metadata and order, to the bit
    where the parameters are the same, with its tokenizer, preprocessor and chat templates but no other files.
    Weights of another checkpoint in the folder are removed.
    Float64 is computed in float32, unless ``jax_enable_x64`` is set: values that have changed are
    written as float64 with float32's digits.
    """
    if delta_of is not None:
        functional.check(model, params)
        return deltas.write(folder, params, delta_of)
    folder, tensors = Path(folder), Tensors.of(model, params)
    folder.mkdir(parents=True, exist_ok=True)
    fresh = {name: name for name in [*tensors, *model.rules.beside]}
    layout = model.layout or Layout({safetensors.WEIGHTS: fresh})
    for file, names in layout.files.items():
        chosen = {
            name: layout.restored(name, tensors.saved(known, layout))
            for name, known in names.items()
        }
        safetensors.write(folder / file, chosen, layout.headers.get(file, safetensors.FRESH))
    contents = {**layout.beside, "config.json": model.text.encode()}
    if model.generation_text is not None:
        contents["generation_config.json"] = model.generation_text.encode()
    for file, content in contents.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(content)
    # Of another checkpoint that was saved here, weights would be read in place of these, or beside them.
    whole = (safetensors.WEIGHTS, safetensors.INDEX, "generation_config.json")
    parts = (path.name for path in folder.glob("model-?????-of-?????.safetensors"))
    for old in {*whole, *parts} - {*layout.files, *contents}:
        (folder / old).unlink(missing_ok=True)
    return folder


def _opened(folder: Path) -> tuple[safetensors.TensorFiles, dict[str, str]]:
    """Returns the files of a folder, and their names of tensors -> those in the family's rules."""
    settings = read_settings(folder / "config.json")[1]
    files, family = safetensors.open_folder(folder), _family(settings)
    prefix, old_names = getattr(family, "PREFIX", ""), getattr(family, "OLD_NAMES", {})
    return files, canonical(set(files.shapes), prefix, old_names)


def _kind(settings: Settings) -> Any:
    """Returns the model type of ``transformers``, or the first word of timm's "crossvit_9_240"."""
    architecture = settings.get("architecture")
    if "model_type" not in settings and isinstance(architecture, str):
        return architecture.partition("_")[0]
    return settings["model_type"]


def _family(settings: Settings) -> Any:
    kind = _kind(settings)
    if not isinstance(kind, str) or kind not in _FILE_OF:
        known = ", ".join(_FILE_OF)
        raise CheckpointError(f"config.json has model_type {kind!r}; expected one of {known}.")
    return importlib.import_module(f"crossattn.weights.families.{_FILE_OF[kind]}")
