"""Sets the language of mBART's and mBART-50's tokenizers."""

import json
import re
from typing import Any

_CODE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}")  # en_XX


def with_language(tokenizer: Any, language: str) -> Any:
    """Returns the same tokenizer for texts of another language: a source, or labels in training.

    The model gets the language to write by
    ``model.generation(max_new_tokens=60, forced_bos_token_id=tokenizer.token_to_id("fr_XX"))`` for mBART-50,
    by ``decoder_start_token_id`` for mBART.

    Args:
      tokenizer: a ``tokenizers.Tokenizer`` that marks the language of its texts.
      language: its code, "fr_XX".

    Raises:
      ValueError: the tokenizer marks no language, or has no such one.
    """
    from tokenizers import Tokenizer

    text = json.loads(tokenizer.to_str())
    template = text["post_processor"] or {}
    marks = [name for name in template.get("special_tokens", {}) if _CODE.fullmatch(name)]
    if len(marks) != 1:
        raise ValueError("this tokenizer marks no language of its texts; expected one of mBART's.")
    if (number := tokenizer.token_to_id(language)) is None or not _CODE.fullmatch(language):
        known = sorted(name for name in tokenizer.get_vocab() if _CODE.fullmatch(name))
        raise ValueError(f"there is no language {language!r}; expected one of {', '.join(known)}.")
    for part in template["single"] + template["pair"]:
        if part.get("SpecialToken", {}).get("id") == marks[0]:
            part["SpecialToken"]["id"] = language
    del template["special_tokens"][marks[0]]
    template["special_tokens"][language] = {"id": language, "ids": [number], "tokens": [language]}
    return Tokenizer.from_str(json.dumps(text))
