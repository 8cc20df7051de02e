"""Every command in README and docs parses, its settings are settings, its files are files.

tests/integration/test_docs_run.py executes those that take seconds.
"""

import itertools
import re
import tomllib

import pytest

from onepolicy.cli import parse_arguments
from onepolicy.config import UsageError, load
from support.doc_commands import PAGES, blocks, commands
from support.paths import ROOT

ALL = commands()
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PHASES = tomllib.loads((ROOT / "tests" / "phases.toml").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MARKERS = {line.partition(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
MADE = {".gpu-pack/run.py": "benchmarks/gpu/run.py"}
"""Script that a target makes -> where its options are."""
OTHERS = {"verl.trainer.main_ppo", "sglang.launch_server", "pip", "venv"}
OTHERS |= {"vllm.entrypoints.openai.api_server"}
"""Modules of other packages."""
SERVER = ["rollout.engine.kind=vllm-server"]


def of(*programs):
    """Parametrise over the commands of these programs."""
    chosen = [command for command in ALL if command.words[0] in programs]
    assert chosen
    return pytest.mark.parametrize("command", chosen, ids=map(str, chosen))


def our_words(words):
    """Return what comes behind `-m onepolicy` or `onepolicy`."""
    start = words.index("onepolicy") + 1
    return list(words[start:])


def is_prose(words):
    """Return whether it only names a command, e.g. `onepolicy plan` or `onepolicy measure`."""
    return len(words) == 1 or (words[0] == "engine" and len(words) == 2)


def check_settings(words):
    """Parse a command of ours; resolve the settings of one that reads a recipe."""
    arguments = parse_arguments(words)
    settings = list(getattr(arguments, "overrides", ()))
    recipe = getattr(arguments, "recipe", None)
    if words[0] not in ("train", "compare", "plan", "eval") or not settings:
        return
    path = ROOT / str(recipe)
    settings = [each for each in settings if each.partition("=")[2] not in ("RUN", "MODEL", "N")]
    if path.suffix != ".toml" or not path.is_file():
        path = ROOT / "recipes" / "quickstart.toml"
    errors = [unknown_setting(path, [*kind, *settings]) for kind in ([], SERVER)]
    assert "" in errors, errors


def unknown_setting(path, settings):
    """Return the error of a setting that does not exist; values may be for another recipe."""
    try:
        load(path, settings)
    except UsageError as error:
        return str(error) if "unknown setting" in str(error) else ""
    return ""


@of("onepolicy", "torchrun")
def test_a_command_of_ours_parses(command):
    if "onepolicy" not in command.words:
        example = command.words[-1]
        assert (ROOT / example).is_file(), "torchrun without -m onepolicy runs an example"
        return
    words = our_words(command.words)
    if not is_prose(words):
        check_settings(words)


@of("python", "python3")
def test_a_script_is_there_and_has_the_options(command):
    words = [word for word in command.words[1:] if word != "-q"]
    if words[0] == "-m":
        module = words[1].partition(";")[0]
        if module in ("pytest", "onepolicy") or module in OTHERS:
            return
        places = [ROOT / top / module.replace(".", "/") for top in ("src", "tests", "benchmarks")]
        assert any(p.with_suffix(".py").is_file() or p.is_dir() for p in places)
        return
    if words[0] == "-c":
        return
    script = ROOT / MADE.get(words[0], words[0])
    assert script.is_file()
    sources = [script, *script.parent.glob("*.py")]
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    for option in (word.partition("=")[0] for word in words[1:] if word.startswith("--")):
        assert f'"{option}"' in text, option
    for option, value in itertools.pairwise(words):
        if option in ("--model", "--policy"):
            assert is_a_model(value, command.page), f"{option} {value}: nothing made or names it"


def is_a_model(value, page):
    """Return whether a model of a command is a placeholder, in the tree, or made on its page."""
    if value in ("tiny", "random") or re.fullmatch("[A-Z_]+", value.partition("/")[0]):
        return True
    if (ROOT / value).exists() or re.fullmatch(r"[\w.-]+/[\w.-]+", value):
        return True
    made = [each.words for each in ALL if each.page == page and "make-policy" in each.words]
    return any(pair == ("--out", value) for words in made for pair in itertools.pairwise(words))


@of("pytest")
def test_a_test_is_there(command):
    words = list(command.words[1:])
    for flag in ("-k", "--timeout", "--order"):
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    while "-m" in words:
        place = words.index("-m")
        assert set(re.findall(r"\w+", words[place + 1])) <= MARKERS | {"not", "or", "and"}
        del words[place : place + 2]
    for path in (word for word in words if not word.startswith("-")):
        file, _, name = path.partition("::")
        assert (ROOT / file).exists(), file
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


@of("make")
def test_a_target_is_there(command):
    targets = [word for word in command.words[1:] if "=" not in word and not word.startswith("-")]
    for target in targets:
        own = re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE)
        assert own or target.removeprefix("test-") in PHASES, target


@of("pip")
def test_an_extra_is_there(command):
    extras = set(PROJECT["project"]["optional-dependencies"])
    for named in re.findall(r"(?:onepolicy|clone|\.)\[([\w,]+)\]", " ".join(command.words)):
        assert set(named.split(",")) <= extras


def test_toml_is_toml():
    found = [block for page in PAGES for block in blocks(page.read_text(encoding="utf-8"), "toml")]
    assert len(found) > 3
    for block in found:
        tomllib.loads(block)
