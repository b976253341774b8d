"""Reads the tokenizer beside a checkpoint, in any of its formats, as a ``tokenizers.Tokenizer``."""

import fnmatch
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.tokenizers import sentencepiece
from crossattn.weights.tokenizers.sentencepiece import setting

_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.spm")
# Other files of tokenizers and preprocessors.
_BESIDE = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "normalizer.json",
    "target_vocab.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "processor_config.json", "chat_template.json", "*.jinja",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"

_RUN = 48  # repetitions of one letter in the text of a trial
_LONGEST = 2**20  # the most tokens of a padded text


def files_beside(folder: Path) -> list[Path]:
    """Returns the files of a folder's tokenizer and preprocessor."""
    files = _matching(folder, _VOCABULARIES + _BESIDE)
    more = folder / _TEMPLATES
    return files + (_matching(more, ("*.jinja",)) if more.is_dir() else [])


def read_target_tokenizer(folder: Path, model_type: str = "") -> Any:
    """Reads the tokenizer of the targets of a Marian, which has pieces of its own; else returns None.

    Raises:
      CheckpointError: a file is damaged.
    """
    paths = [folder / name for name in ("target.spm", "vocab.json")]
    whole = folder / "tokenizer.json"
    if model_type != "marian" or whole.is_file() or not all(path.is_file() for path in paths):
        return None
    return _tried(paths[0], sentencepiece.marian(*paths))


def read_tokenizer(folder: Path, model_type: str = "") -> Any:
    """Reads a folder's tokenizer; None if there is none, with a warning if its files are of an unknown kind.

    ``tokenizer.json``, or else the vocabulary of the kind of model: ``source.spm`` and ``vocab.json``
    (Marian), ``spiece.model`` (T5, Pegasus), ``sentencepiece.bpe.model`` (mBART), ``vocab.json`` and
    ``merges.txt`` (GPT-2, BART, Whisper), ``vocab.txt`` (BERT, pairs of BERTs).

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
    """Returns the files of a folder whose names match, sorted."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)
    )


def _tried(path: Path, backend: Any) -> Any:
    """Returns the tokenizer, once it has cut a text; refuses padding that would fill the memory."""
    asked = backend.padding or {}
    for name in ("length", "pad_to_multiple_of"):
        if (asked.get(name) or 0) > _LONGEST:
            raise CheckpointError(
                f"{path} pads texts to {asked[name]} tokens; expected at most {_LONGEST}; mend its padding."
            )
    backend.encode("A word, 2 é 中 \U0001f600")
    # A pattern that backtracks panics on long runs of the letters that it names.
    states = [part.__getstate__() for part in (backend.normalizer, backend.pre_tokenizer) if part]
    named = {*"a1 .", *b"".join(states).decode(errors="ignore")}
    backend.encode(" ".join(f"{letter * _RUN}!" for letter in sorted(named)))
    return backend


def _whole(path: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _byte_level(vocabulary: Path, merges: Path) -> Any:
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    made = ByteLevelBPETokenizer.from_file(str(vocabulary), str(merges))
    backend = Tokenizer.from_str(made.to_str())
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
    """Adds the languages, tasks and times of ``added_tokens.json``, which come after the text."""
    backend = _byte_level(vocabulary, merges)
    path = vocabulary.parent / "added_tokens.json"
    added = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    backend.add_special_tokens(sorted(added, key=added.__getitem__))
    if any(backend.token_to_id(text) != id for text, id in added.items()):
        raise CheckpointError(f"{path} does not go on where {vocabulary.name} ends.")
    return backend


def _bert(path: Path) -> Any:
    from tokenizers import BertWordPieceTokenizer, Tokenizer

    made = BertWordPieceTokenizer.from_file(
        str(path),
        lowercase=setting(path, "do_lower_case", True),
        handle_chinese_chars=setting(path, "tokenize_chinese_chars", True),
        strip_accents=setting(path, "strip_accents", None),
    )
    return Tokenizer.from_str(made.to_str())


def _mark_special(backend: Any, names: Sequence[str]) -> None:
    """Makes those of the names that the vocabulary has special tokens."""
    backend.add_special_tokens([text for text in names if backend.token_to_id(text) is not None])


# Kind of model -> the function that makes its tokenizer, and its files.
_KINDS: dict[str, tuple[Any, ...]] = {
    "marian": (sentencepiece.marian, "source.spm", "vocab.json"),
    **dict.fromkeys(("t5", "mt5"), (sentencepiece.t5, "spiece.model")),
    "pegasus": (sentencepiece.pegasus, "spiece.model"),
    "mbart": (sentencepiece.mbart, "sentencepiece.bpe.model"),
    "gpt2": (_byte_level, "vocab.json", "merges.txt"),
    **dict.fromkeys(("bart", "mvp"), (_bart, "vocab.json", "merges.txt")),
    "whisper": (_whisper, "vocab.json", "merges.txt"),
    **dict.fromkeys(("bert", "encoder-decoder"), (_bert, "vocab.txt")),
}
