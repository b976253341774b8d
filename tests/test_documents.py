"""The README and the pages of ``docs/``: their Python runs, their commands and links exist."""

import importlib
import importlib.util
import logging
import re
import shlex
import sys
import tomllib

import pytest

from crossattn.__main__ import USAGE
from crossattn.data.sources import phrases
from experiments import keys, launch
from experiments.options import Options
from experiments.settings import check
from tests.conftest import ROOT, kept
from tests.experiments.conftest import start
from tests.experiments.test_configs import CONFIGS, get_config

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OWN = (
    ROOT / "docs" / "own.md"
)  # its commands are of its own files: tests/extending/test_own.py runs them
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_PYTHON = re.compile(r"(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)```", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def named(path):
    return str(path.relative_to(ROOT))


def python_of(path):
    """The blocks of Python that a page prints, but for those that it says are not run."""
    return [code for skipped, code in _PYTHON.findall(path.read_text()) if not skipped]


def commands_of(path):
    """(launcher, its words) of each ``python -m experiments.NAME`` that a page has."""
    text = path.read_text().replace("\\\n", " ")
    for name, rest in re.findall(r"python -m experiments\.([\w.]*\w)([^\n`|;&]*)", text):
        if "..." not in rest:
            words = rest.partition(" #")[0].replace("configs/NAME.py", "configs/libreoffice.py")
            yield name, shlex.split(words.rstrip('" '))


def first_steps():
    """Commands that train, each program once, with the ``tiny`` variant of its config.

    But for those that want eight devices, several processes, or files of the user, and for the ``tiny``
    variants themselves, which ``test_configs`` trains.
    """
    wanting = (
        "--config.mesh",
        "--distributed",
        "--config.init.from=runs",
        "--config.init.from=path",
    )
    found = {}
    for page in PAGES:
        for name, words in commands_of(page) if page not in (README, OWN) else ():
            if name != "train" or any(word.startswith(wanting) for word in words):
                continue
            (config,) = (word for word in words if word.startswith("--config="))
            colon = "," if ":" in config else ":"
            tiny = config if config.endswith("tiny") else f"{config}{colon}tiny"
            others = [w for w in words if w != config and not w.startswith(_SAME_PROGRAM)]
            if not others and tiny.endswith(".py:tiny") and tiny != config:
                continue
            given = (tiny, *others)
            found.setdefault(given, pytest.param(given, id=" ".join(given)))
    return found.values()


# What says when, how often and how fast, which checks of settings hold.
_SAME_PROGRAM = (
    "--workdir=",
    "--config.train.steps=",
    "--config.train.eval_every=",
    "--config.checkpoint.every=",
    "--config.optim.learning_rate=",
    "--config.optim.weight_decay=",
)


class Parsed(Exception):
    """A benchmark has read its command line."""


@pytest.mark.quick(1)
@pytest.mark.parametrize("page", [p for p in PAGES if python_of(p)], ids=named)
@pytest.mark.filterwarnings("ignore:.*slow.*")
def test_the_python_of_a_page_runs_as_printed_in_order(page):
    module = {"__name__": "page"}
    for number, code in enumerate(python_of(page), 1):
        exec(compile(code, f"{named(page)}, block {number}", "exec"), module)


@pytest.mark.slow
def test_the_commands_for_launching_run_as_printed_in_order(tmp_path, compiled_code, capsys):
    """The runs are in another folder than the printed one."""
    section = README.read_text().partition("## Launching\n")[2].partition("```bash\n")[2]
    lines = [line.partition(" #")[0] for line in section.partition("```")[0].splitlines()]
    for line in lines:
        module, *arguments = shlex.split(line.replace("runs/", f"{tmp_path}/"))[2:]
        if module == "experiments":
            assert importlib.import_module("experiments.__main__").main() == 0
            continue
        with kept(compiled_code):
            assert start(module.partition(".")[2], *arguments) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip().splitlines()[-1]  # the translation


@pytest.mark.parametrize("page", [p for p in PAGES if any(commands_of(p)) and p != OWN], ids=named)
def test_a_launcher_takes_the_flags_and_the_config_of_a_command(page, monkeypatch, capsys):
    """The launcher stops before its work."""
    parse, configs = Options.parse_args, []

    def parsed(options, *given):
        parse(options, *given)
        raise Parsed

    def work(module):
        def main(_):
            if launch.CONFIG.value is not None:
                check(launch.CONFIG.value)
                configs.append(launch.CONFIG.value)

        main.__module__ = module.__name__
        return main

    monkeypatch.setattr(Options, "parse_args", parsed)
    monkeypatch.setattr(launch.processes, "join", lambda *_: None)
    for name, words in commands_of(page):
        module = importlib.import_module(f"experiments.{name}")
        if hasattr(module, "__path__") and not hasattr(module, "main"):
            module = importlib.import_module(f"experiments.{name}.__main__")
        if hasattr(module, "FLAGS"):
            monkeypatch.setattr(module, "main", work(module))
            assert start(name, *words) == 0, (name, words, capsys.readouterr().err)
            assert bool(configs) == any(word.startswith("--config=") for word in words)
            configs.clear()
        else:
            monkeypatch.setattr(sys, "argv", [name, *words])
            with pytest.raises(Parsed):
                module.main()


@pytest.mark.parametrize("page", [p for p in PAGES if p != OWN], ids=named)
def test_an_override_that_a_page_names_is_what_its_key_takes(page):
    known = {}
    for name in CONFIGS:
        config = get_config(name)
        for source in (config.data.name, "copy", "files:mine.tsv"):
            config.data.name = source
            known |= keys.of(config)
    for name, text in re.findall(r"--config\.([\w.]*\w)=([^\s`\"]+)", page.read_text()):
        assert text == "..." or known[name].takes(known[name].read(text.strip("'"))), name


@pytest.mark.slow
@pytest.mark.parametrize("given", first_steps())
def test_a_command_that_trains_takes_its_first_step(
    given, tmp_path, compiled_code, capsys, monkeypatch
):
    monkeypatch.setattr(phrases, "NUM_PAIRS", 540)  # mostly short ones
    given = (*given, "--config.train.steps=1", f"--workdir={tmp_path / 'run'}")
    with kept(compiled_code):
        assert start("train", *given) == 0, capsys.readouterr().err


def test_targets_of_make_and_commands_of_the_library_that_a_page_names_are_there(capsys):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        named_targets = re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)
        assert set(named_targets) <= targets, named(page)
        for command in re.findall(r"python -m crossattn (\w+)", text):
            assert re.search(rf"^{command} ", USAGE, re.MULTILINE), command


def test_pictures_and_sounds_are_small():
    files = [p for p in (ROOT / "docs").rglob("*") if p.suffix in (".png", ".ogg", ".html")]
    sizes = {named(path): path.stat().st_size for path in files}
    assert len(sizes) > 30 and {name for name, size in sizes.items() if size > 200_000} == set()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_link_leads_to_a_file_and_to_a_heading_of_it(page):
    for link in _LINK.findall(page.read_text()):
        if link.startswith(("http", "mailto:")) or link.startswith("api/"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, link


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_an_extra_that_a_page_installs_is_one_of_the_project(page):
    for extras in re.findall(r"(?:crossattn|\.)\[([\w,-]+)\]", page.read_text()):
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys(), extras


def test_the_readme_is_read_in_two_minutes():
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert max(len(line) for line in lines if not line.startswith("|")) <= 130


def test_the_repository_has_one_address():
    address = PROJECT["urls"]["Repository"]
    owner = address.partition("github.com/")[2]
    places = [*PAGES, *(ROOT / "notebooks").glob("*.ipynb")]
    for path in places:
        for found in re.findall(r"github(?:\.com)?/(crossattn/[\w-]+)", path.read_text()):
            assert found == owner, path


@pytest.fixture
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


def test_a_link_to_a_sound_becomes_its_player(hooks):
    page = '<p><a href="../sounds/a.ogg">the model</a>, <a href="../speech/">a page</a></p>'
    shown = hooks.on_page_content(page, None, None, None)
    assert shown.count("<audio controls") == 1 and 'src="../sounds/a.ogg"' in shown
    assert "the model" in shown and '<a href="../speech/">a page</a>' in shown


def test_every_public_name_has_a_docstring(hooks, caplog):
    with caplog.at_level(logging.WARNING):
        hooks.reference()
    assert [record.getMessage() for record in caplog.records] == []
