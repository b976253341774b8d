"""The tokenizer that lies beside a checkpoint, in whatever files: always a ``tokenizers.Tokenizer``."""

import fnmatch
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.tokenizers import sentencepiece
from crossattn.weights.tokenizers.sentencepiece import setting

# A vocabulary, of which a tokenizer is made; and what else says how text and sound go in.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.spm")
_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "target_vocab.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    "*.jinja",
)
_TEMPLATES = "additional_chat_templates"

_RUN = 48  # of one letter, on which a tokenizer is tried
_LONGEST = 2**20  # tokens that a tokenizer may pad a text to


def files_beside(folder: Path) -> list[Path]:
    """The files of a folder that say how text and sound go in."""
    files = _matching(folder, _VOCABULARIES + _BESIDE)
    more = folder / _TEMPLATES
    return files + (_matching(more, ("*.jinja",)) if more.is_dir() else [])


def read_target_tokenizer(folder: Path, model_type: str = "") -> Any:
    """The tokenizer of the targets where it cuts text by pieces of its own, a Marian's; else None.

    Raises:
      CheckpointError: a file is damaged.
    """
    paths = [folder / name for name in ("target.spm", "vocab.json")]
    whole = folder / "tokenizer.json"
    if model_type != "marian" or whole.is_file() or not all(path.is_file() for path in paths):
        return None
    return _tried(paths[0], sentencepiece.marian(*paths))


def read_tokenizer(folder: Path, model_type: str = "") -> Any:
    """The folder's tokenizer; None where it has none, with a warning where it has one that is not known here.

    ``tokenizer.json`` wherever there is one. Else the vocabulary that the kind of model comes with:
    ``source.spm`` and ``vocab.json`` (Marian), ``spiece.model`` (T5, Pegasus), ``sentencepiece.bpe.model``
    (mBART), ``vocab.json`` and ``merges.txt`` (GPT-2, BART, Whisper), ``vocab.txt`` (BERT, pairs of BERTs).

    Raises:
      CheckpointError: a file is damaged.
      ImportError: the package that reads it is missing: ``tokenizers``, or ``sentencepiece``.
    """
    whole = (_whole, "tokenizer.json")
    own = _KINDS.get(model_type)
    for make, *names in (whole, own) if own else (whole,):
        paths = [folder / name for name in names]
        if not all(path.is_file() for path in paths):
            continue
        try:
            import tokenizers  # noqa: F401
        except ImportError:
            raise ImportError(
                f"reading {paths[0]} needs tokenizers: pip install 'crossattn[weights]'"
            ) from None
        try:
            return _tried(paths[0], make(*paths))
        except (CheckpointError, ImportError):
            raise
        except BaseException as error:
            # The backend raises bare Exception on a malformed file; its panics are not even that.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CheckpointError(f"{paths[0]} is no tokenizer: {error}") from None
    if vocabularies := [path.name for path in _matching(folder, _VOCABULARIES)]:
        expected = "tokenizer.json" + (f" or {' and '.join(own[1:])}" if own else "")
        warnings.warn(
            f"{folder} has {', '.join(vocabularies)}, of which no tokenizer for a {model_type or 'model'} is "
            f"made here; expected {expected}. With transformers, AutoTokenizer.from_pretrained(folder) and "
            "save_pretrained(folder) write tokenizer.json.",
            stacklevel=3,
        )
    return None


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files of the folder whose names match, in the order of their names."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)
    )


def _tried(path: Path, backend: Any) -> Any:
    """The tokenizer, which has cut a text, and pads none to a length that fills the memory."""
    asked = backend.padding or {}
    for name in ("length", "pad_to_multiple_of"):
        if (asked.get(name) or 0) > _LONGEST:
            raise CheckpointError(
                f"{path} pads texts to {asked[name]} tokens; expected at most {_LONGEST}; mend its padding."
            )
    backend.encode("A word, 2 é 中 \U0001f600")
    # A pattern that tries every way to split a run ends in a panic on a long one of what it names.
    states = [part.__getstate__() for part in (backend.normalizer, backend.pre_tokenizer) if part]
    named = {*"a1 .", *b"".join(states).decode(errors="ignore")}
    backend.encode(" ".join(f"{letter * _RUN}!" for letter in sorted(named)))
    return backend


def _whole(path: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _byte_level(vocabulary: Path, merges: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    backend = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    _mark_special(backend, ["<|endoftext|>"])
    return backend


def _bart(vocabulary: Path, merges: Path) -> Any:
    from tokenizers import AddedToken, processors

    backend = _byte_level(vocabulary, merges)
    _mark_special(backend, ["<s>", "<pad>", "</s>", "<unk>"])
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])  # it takes the blank before it
    ends = [(text, backend.token_to_id(text)) for text in ("</s>", "<s>")]
    backend.post_processor = processors.RobertaProcessing(
        *ends, trim_offsets=True, add_prefix_space=False
    )
    return backend


def _whisper(vocabulary: Path, merges: Path) -> Any:
    """Behind the text stand languages, tasks and times, which ``added_tokens.json`` numbers."""
    backend = _byte_level(vocabulary, merges)
    path = vocabulary.parent / "added_tokens.json"
    added = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    backend.add_special_tokens(sorted(added, key=added.__getitem__))
    if any(backend.token_to_id(text) != id for text, id in added.items()):
        raise CheckpointError(f"{path} does not go on where {vocabulary.name} ends.")
    return backend


def _bert(path: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    backend = Tokenizer(models.WordPiece.from_file(str(path), unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=setting(path, "do_lower_case", True),
        handle_chinese_chars=setting(path, "tokenize_chinese_chars", True),
        strip_accents=setting(path, "strip_accents", None),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    _mark_special(backend, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    ends: Any = [(text, backend.token_to_id(text)) for text in ("[SEP]", "[CLS]")]
    backend.post_processor = processors.BertProcessing(*ends)
    return backend


def _mark_special(backend: Any, names: Sequence[str]) -> None:
    """Those of the names that the vocabulary has stand for themselves wherever they are written."""
    backend.add_special_tokens([text for text in names if backend.token_to_id(text) is not None])


_KINDS: dict[str, tuple[Any, ...]] = {
    "marian": (sentencepiece.marian, "source.spm", "vocab.json"),
    "t5": (sentencepiece.t5, "spiece.model"),
    "mt5": (sentencepiece.t5, "spiece.model"),
    "pegasus": (sentencepiece.pegasus, "spiece.model"),
    "mbart": (sentencepiece.mbart, "sentencepiece.bpe.model"),
    "gpt2": (_byte_level, "vocab.json", "merges.txt"),
    "bart": (_bart, "vocab.json", "merges.txt"),
    "mvp": (_bart, "vocab.json", "merges.txt"),
    "whisper": (_whisper, "vocab.json", "merges.txt"),
    "bert": (_bert, "vocab.txt"),
    "encoder-decoder": (_bert, "vocab.txt"),
}
"""Kind of model -> what makes its tokenizer, and of which files."""
