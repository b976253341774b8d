"""The page on decoding runs as printed, block after block."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "decoding.md"


def test_the_page_on_decoding_runs_as_printed():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    space: dict = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), space)
    assert space["found"].tokens.shape == (2, 4, 8)
    again = space["xa"].decode.generate(space["recurrent"], batch=2, max_new_tokens=8, num_beams=4)
    assert again.tokens.shape == (2, 4, 8)
