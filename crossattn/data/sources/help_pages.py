"""Pages of LibreOffice's help, laid out and drawn, with their regions: "help_pages", or "help_pages/made".

The HTML of the Debian package `libreoffice-help-en-us` (MPL-2.0), set by PyMuPDF's Story on pages of A5. A
region is the box, text and pixels of one tag, which is its class: a heading is a title, an item of a list a
step, a row of a table is table, a box "note", "tip" or "warning" a note, and the rest are paragraphs. The
name of a file fixes its style (typeface, size, headings, indents, markers of lists, frames of notes and
tables), so that neither a size nor a place alone tells the class; some styles set two classes alike. The last
block of a page that goes on may be broken and is no region, and neither is code. All pages of a file are in
one split.
"help_pages/made" makes pages up, with no download: the words of the title say which of two conventions a page
follows, and by it the look of each other block says its class, so that neither words nor looks tell it alone.
"""

import functools
import hashlib
import html
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from crossattn.data import archives, fetch, records
from crossattn.data.errors import DataError, absent, needs
from crossattn.data.sources import SPLITS, Example, MappedSource, Option
from crossattn.data.sources.libreoffice_help import BODY, clean, split_of

FORM = "help_pages or help_pages/made"
CLASSES = {"label": ("title", "paragraph", "step", "table", "note")}
OPTIONS = {"pages": Option(int, "The first so many pages of a split; 0 is all.", within="[0, inf)")}
SIZE = (420.0, 595.0)  # of a page, in points; a point is a pixel of its picture
_PACKAGE = "libreoffice-help-en-us"
_PREFIX = "usr/share/libreoffice/help/en-US/text/"
_PAGES_OF_A_FILE = 3  # at most, or a few long files would be a great part of all
_MARGIN = 36.0
_MADE = {"train": 160, "validation": 24, "test": 24}


def open_split(rest: str, split: str, *, data_dir: Any = None, pages: int = 0) -> Sequence[Example]:
    """Returns examples {"id", "text", "boxes", "pictures", "label"}, regions from the top of the page down.

    "text" and "label" are lists, a text and a class a region; "boxes" {"boxes": [n 4], "size"} is for
    `Boxes`, "pictures" {"page", "boxes", "size"} with the PNG of the whole page for `Crops`.
    """
    if rest not in ("", "made"):
        raise DataError(f"help_pages has no part {rest!r}; expected {FORM}")
    if pages < 0:
        raise DataError(f"pages is {pages}; expected 0, which is all, or more")
    rows = made_pages(split) if rest else records.prepared(HelpPages, "en", split, data_dir)
    found: Any = MappedSource(rows, _example)
    return MappedSource(range(min(pages, len(found))), found.__getitem__) if pages else found


def _example(row: dict[str, Any]) -> Example:
    boxes = {"boxes": np.asarray(row["boxes"]).reshape(-1, 4), "size": SIZE}
    return {
        "id": records.text_of(row["id"]),
        "text": records.text_of(row["texts"]).split("\n"),
        "boxes": boxes,
        "pictures": {"page": row["page"]} | boxes,
        "label": [CLASSES["label"][int(each)] for each in row["labels"]],
    }


class HelpPages(records.PackageBuilder):
    """Features `id`, `page` (bytes of a PNG), `texts` (a line a region), `boxes` [n 4], `labels` [n]."""

    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="en", description="English")]

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "id": tfds.features.Text(),
            "page": tfds.features.Scalar(dtype=np.str_),  # bytes; as an Image it would be decoded
            "texts": tfds.features.Text(),
            "boxes": tfds.features.Tensor(shape=(None, 4), dtype=np.float32),
            "labels": tfds.features.Tensor(shape=(None,), dtype=np.int32),
        }
        return self.described(__doc__, features, "https://help.libreoffice.org", "MPL-2.0")

    def _split_generators(self, dl_manager):
        (package,) = fetch.debian_packages([_PACKAGE], self.files_dir)
        library()  # refused before anything is read
        splits: dict[str, list[tuple[str, bytes]]] = {split: [] for split in SPLITS}
        for file, content in sorted(archives.read_deb(package, _PREFIX, ".html")):
            splits[split_of(file)].append((file, content))
        if not splits["train"]:
            reason = f"{package.name} has no pages"
            raise absent([f"{_PACKAGE}_*.deb"], package.parent, reason)
        return {
            split: self._generate_examples(
                page
                for file, content in files
                for page in pages_of(file, read_blocks(content.decode("utf-8")))
            )
            for split, files in splits.items()
        }


@dataclass
class Block:
    """A block of a page, which becomes a region.

    Attributes:
        kind: its class.
        tag: h1 to h6, p, div; ol or ul of a step, table of a row.
        text: without markup.
        markup: the text with its bold parts and cells.
    """

    kind: str
    tag: str
    text: str = ""
    markup: str = ""


def pages_of(
    name: str, blocks: Sequence[Block], style: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the pages of a file as rows of the dataset; those without a region are left out.

    Args:
        name: of the file, which chooses the style if none is given.
        blocks: of the file.
        style: CSS.
    """
    for number, (page, boxes) in enumerate(lay_out(blocks, style or style_of(name))):
        if boxes:
            found = [blocks[i] for i in boxes]
            yield {
                "id": f"{name}#{number}",
                "page": page,
                "texts": "\n".join(block.text for block in found),
                "boxes": np.array(list(boxes.values()), np.float32).reshape(-1, 4),
                "labels": np.array([CLASSES["label"].index(b.kind) for b in found], np.int32),
            }


def lay_out(
    blocks: Sequence[Block], style: str
) -> Iterator[tuple[bytes, dict[int, tuple[float, ...]]]]:
    """Yields pages of blocks, set in a style: the PNG in grey, and the boxes of whole blocks, by number.

    The same blocks and style give the same pages, byte for byte under one version of PyMuPDF.
    """
    pymupdf = library()
    story = pymupdf.Story(_markup(blocks), user_css=style)
    page = pymupdf.Rect(0, 0, *SIZE)
    where = page + (_MARGIN, _MARGIN, -_MARGIN, -_MARGIN)
    file = io.BytesIO()
    writer = pymupdf.DocumentWriter(file)
    found: list[dict[int, tuple[float, ...]]] = []
    more = 1
    while more and len(found) < _PAGES_OF_A_FILE:
        device = writer.begin_page(page)
        more, _ = story.place(where)
        found.append(_places(story))
        if more and found[-1]:  # the page may have broken its last block, which it does not tell
            del found[-1][max(found[-1])]
        story.draw(device)
        writer.end_page()
    writer.close()
    with pymupdf.open("pdf", file.getvalue()) as document:
        for sheet, places in zip(document, found, strict=True):
            inside = {number: box for number, box in places.items() if _is_on_page(box)}
            yield sheet.get_pixmap(colorspace=pymupdf.csGRAY).tobytes("png"), inside


def _places(story: Any) -> dict[int, tuple[float, ...]]:
    """Returns the boxes of the blocks that are on the page, by their numbers."""
    told: list[Any] = []
    # A bare lambda: PyMuPDF counts the arguments of its code, which decorators change.
    story.element_positions(lambda place: told.append((place.id, place.open_close, place.rect)))
    return {
        int(name[1:]): tuple(box)
        for name, open_close, box in told
        if open_close & 1 and name and name.startswith("r")
    }


def _is_on_page(box: tuple[float, ...]) -> bool:
    left, top, right, bottom = box
    return (
        0 <= left < right - 1 and right <= SIZE[0] and 0 <= top < bottom - 1 and bottom <= SIZE[1]
    )


def _markup(blocks: Sequence[Block]) -> str:
    """Returns the HTML of blocks, each with its number as id; successive steps are one list."""
    parts = []
    for (kind, tag), group in itertools.groupby(
        enumerate(blocks), lambda each: (each[1].kind, each[1].tag)
    ):
        inner = {"ol": "li", "ul": "li", "table": "tr"}.get(tag)
        inside = [
            f'<{inner or tag} id="r{i}" class="{kind}">{block.markup}</{inner or tag}>'
            for i, block in group
        ]
        parts += [f"<{tag}>", *inside, f"</{tag}>"] if inner else inside
    return "".join(parts)


_STYLES: tuple[tuple[str, ...], ...] = (
    ("body{font-family:serif}", "body{font-family:sans-serif}"),
    ("body{font-size:8px}", "body{font-size:9px}", "body{font-size:10px}"),
    ("p,li{text-align:left}", "p,li{text-align:justify}"),
    (
        "h1{font-size:16px} h2,h3,h4,h5{font-size:13px}",
        "h1{font-size:13px} h2{font-size:11px} h3,h4,h5{font-size:1em}",
        "h1,h2,h3,h4,h5{font-size:1em}",
        "h1,h2,h3,h4,h5{font-size:1em; font-weight:normal; font-style:italic}",
        "h1,h2{font-size:12px; text-align:center} h3,h4,h5{font-size:1em; font-weight:normal}",
    ),
    ("p{margin:6px 0}", "p{margin:3px 0; text-indent:12px}", "p{margin:6px 0 6px 14px}"),
    (
        "ol{list-style-type:decimal} ul{list-style-type:disc}",
        "ol,ul{list-style-type:disc}",
        "ol,ul{list-style-type:none; margin-left:0; padding-left:14px}",
        "ol,ul{list-style-type:none; margin-left:0; padding-left:0}",
    ),
    (
        ".note{background-color:#e4e4e4; padding:4px; margin:6px 0}",
        ".note{border-left:2px solid #666; padding-left:6px; margin:6px 0 6px 8px}",
        ".note{font-style:italic; margin:6px 0}",
        ".note{margin:6px 0 6px 14px}",
        ".note{margin:6px 0}",
    ),
    (
        "td{border:1px solid #999; padding:2px}",
        "td{padding:2px 10px 2px 0}",
        "tr{background-color:#eee} td{padding:2px}",
        "td{padding:2px} table{margin-left:14px}",
    ),
)


def style_of(name: str) -> str:
    """Returns the CSS of a file of this name: a choice of each of `_STYLES`."""
    digest = hashlib.md5(f"style of {name}".encode(), usedforsecurity=False).digest()
    rng = np.random.default_rng(list(digest))
    return " ".join(choices[rng.integers(len(choices))] for choices in _STYLES)


def read_blocks(page: str) -> list[Block]:
    """Returns the blocks of a page of the help that have a text."""
    parser = _Blocks()
    parser.feed(page[max(page.find(BODY), 0) :].partition("<footer")[0])
    parser.close()
    parser.end()
    return parser.found


_NOTES = {"note", "tip", "warning"}
_HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
_BOLD = {"emph", "keycode", "menuitem", "input"}


class _Blocks(HTMLParser):
    """A parser of the blocks of a page; of variants of a wording (Mac or PC keys) it keeps the usual one."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.found: list[Block] = []
        self._block: Block | None = None
        self._lists: list[str] = []
        self._divs: list[bool] = []  # whether each that is open is a note
        self._spans: list[str] = []  # what closes each that is open
        self._shown: list[bool] = []  # of each switch that is open, whether it has shown a variant
        self._hidden = 0  # variants and code that are open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kinds = set((dict(attrs).get("class") or "").split())
        inside = self._block.kind if self._block else None
        if tag == "div":
            self._divs.append(bool(kinds & _NOTES))
        if tag == "span":
            self._span(kinds)
        elif tag == "pre":
            self._hidden += 1
        elif tag in ("ol", "ul"):
            self._lists.append(tag)
        elif inside in ("table", "note"):  # which holds whatever is in it
            self._add(" ", "</td><td>" if tag in ("td", "th") and inside == "table" else " ")
        elif tag == "div" and kinds & _NOTES:
            self._begin("note", "div")
        elif tag == "li" and self._lists:
            self._begin("step", self._lists[-1])
        elif tag == "tr":
            self._begin("table", "table")
        elif tag in _HEADINGS and inside != "step":
            self._begin("title", tag)
        elif tag == "p" and inside != "step":
            self._begin("paragraph", "p")
        elif tag in ("p", "br"):
            self._add(" ", " ")

    def handle_endtag(self, tag: str) -> None:
        inside = self._block.kind if self._block else None
        if tag == "span" and self._spans:
            closing = self._spans.pop()
            self._hidden -= closing == "hidden"
            if closing == "switch":
                self._shown.pop()
            self._add("", "</b>" if closing == "b" else "")
        elif tag == "pre":
            self._hidden = max(self._hidden - 1, 0)
        elif tag in ("ol", "ul") and self._lists:
            self._lists.pop()
        elif tag == "div" and self._divs and self._divs.pop() and inside == "note":
            self.end()
        elif (tag, inside) in (("li", "step"), ("tr", "table"), ("p", "paragraph")):
            self.end()
        elif tag in _HEADINGS and inside == "title":
            self.end()

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            said = clean(data)
            self._add(said, html.escape(said))

    def _span(self, kinds: set[str]) -> None:
        if self._spans and self._spans[-1] == "switch":
            shown = not self._shown[-1] and "MAC" not in kinds
            self._shown[-1] |= shown
            self._hidden += not shown
            self._spans.append("" if shown else "hidden")
        elif kinds & {"switchinline", "switch"}:
            self._shown.append(False)
            self._spans.append("switch")
        else:
            bold = bool(kinds & _BOLD) and self._block is not None
            self._spans.append("b" if bold else "")
            self._add("", "<b>" if bold else "")

    def _begin(self, kind: str, tag: str) -> None:
        self.end()
        self._block = Block(kind, tag)

    def _add(self, text: str, markup: str) -> None:
        if self._block is not None:
            self._block.text += text
            self._block.markup += markup

    def end(self) -> None:
        """Ends the block that is open."""
        block, self._block = self._block, None
        if block is None:
            return
        block.text = " ".join(block.text.split())
        if block.kind == "table":
            block.markup = f"{block.markup.partition('</td>')[2]}</td>"
        if block.text:
            self.found.append(block)


@functools.cache
def made_pages(split: str) -> list[dict[str, Any]]:
    """Returns pages of a title and seven blocks of words drawn at random, each set in one of four looks."""
    first = sum(_MADE[name] for name in itertools.takewhile(lambda name: name != split, _MADE))
    rows = []
    for number in range(first, first + _MADE[split]):
        rng = np.random.default_rng(number)
        begins, classes = _CONVENTIONS[number % len(_CONVENTIONS)]
        looks = rng.integers(len(_LOOKS), size=7)
        blocks = [_made_block("title", "h2", rng.choice(begins), rng)]
        blocks += [_made_block(classes[i], _LOOKS[i], rng.choice(_SAID), rng) for i in looks]
        rows += pages_of(f"{split}/{number}", blocks, f"{rng.choice(_STYLES[0])} {_MADE_STYLE}")
    return rows


# The words that begin a title, and the classes of blocks in each of `_LOOKS` beneath it.
_CONVENTIONS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Working with", "Using"), ("paragraph", "step", "table", "note")),
    (("About", "Notes on"), ("step", "paragraph", "note", "table")),
)
_LOOKS = ("p", "h3", "h4", "h5")
_MADE_STYLE = (
    "body{font-size:10px} h2{font-size:14px; text-align:center} h3{font-size:1em}"
    "h4{font-size:1em; font-weight:normal; background-color:#aaa}"
    "h5{font-size:1em; font-weight:normal; text-align:right}"
)
_SAID = ("You can see", "This opens", "Choose", "Press", "Width of", "Name of", "Be careful with")
_THINGS = ("the page", "a table", "the cursor", "a file", "the window", "a picture", "the text")


def _made_block(kind: str, tag: str, begin: str, rng: np.random.Generator) -> Block:
    text = " ".join([begin, *rng.choice(_THINGS, 1 if kind == "title" else 4)])
    return Block(kind, tag, text, text)


def library() -> Any:
    """Returns PyMuPDF; ModuleNotFoundError says how to install it."""
    with needs("pages are laid out with PyMuPDF", "pages"):
        import pymupdf
    return pymupdf
