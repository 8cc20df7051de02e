"""Every command in README and docs parses, its settings are settings, its files are files.

Those that take seconds are executed as they are printed.
"""

import ast
import contextlib
import importlib
import importlib.util
import itertools
import json
import math
import re
import tomllib

import pytest
from pyarrow import parquet

import onepolicy as op
from onepolicy.cli import main, parse_arguments
from onepolicy.config import UsageError, load
from support.doc_commands import PAGES, commands
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
CHEAP = [
    "onepolicy config recipes/quickstart.toml",
    "onepolicy config preset icepop",
    "onepolicy config objective gspo",
    pytest.param("onepolicy audit --conformance conformance", marks=pytest.mark.full),
]


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


@pytest.mark.parametrize("line", CHEAP)
def test_it_runs_as_it_is_printed(line, monkeypatch, capsys):
    assert tuple(line.split()) in {command.words for command in ALL}
    monkeypatch.chdir(ROOT)
    with contextlib.suppress(SystemExit):
        assert main(line.split()[1:]) == 0
    assert capsys.readouterr().out.strip()


def test_the_audits_of_the_readme_and_of_the_guide(tmp_path, monkeypatch, capsys):
    """On a dump with another framework's name of a column, as a newcomer has it."""
    table = parquet.read_table(ROOT / "conformance" / "temperature.parquet")
    names = [name.replace("logp_trainer", "old_log_probs") for name in table.column_names]
    parquet.write_table(table.rename_columns(names), tmp_path / "dump.parquet")
    monkeypatch.chdir(tmp_path)
    line = "onepolicy audit dump.parquet --columns logp_trainer=old_log_probs"
    assert tuple(line.split()) in {command.words for command in ALL if command.page == "README.md"}
    assert main([*line.split()[1:], "--out", "report"]) == 0
    first, reason = capsys.readouterr().out.splitlines()[:2]
    assert first == "BUG"
    assert "temperature" in reason
    assert (tmp_path / "report" / "audit.html").is_file()


def test_the_example_of_a_dump_is_read_as_its_page_says(tmp_path, capsys):
    page = (ROOT / "docs" / "dump_schema.md").read_text(encoding="utf-8")
    row = json.loads(re.search(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE).group(1))
    (tmp_path / "dump.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["audit", str(tmp_path / "dump.jsonl"), "--out", str(tmp_path / "out")]) == 0
    assert "only 2 tokens, too few" in " ".join(capsys.readouterr().out.split())
    found = json.loads((tmp_path / "out" / "audit.json").read_text())["overall"]
    pairs = zip(row["logp_trainer"][3:], row["logp_rollout"][3:], strict=True)
    gaps = [math.exp(old - rollout) - 1 - (old - rollout) for old, rollout in pairs]
    assert found["k3"] == pytest.approx(sum(gaps) / 2, rel=1e-3)
    assert found["routers"] == 1.0  # of entry 3 alone: the last token is never fed


def blocks(kind):
    """Return (page, source) of every block of a language in README and docs."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for source in re.findall(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            found.append(pytest.param(source, id=f"{page.name}: {source.splitlines()[0][:50]}"))
    assert len(found) > 3
    return found


@pytest.mark.parametrize("source", blocks("python"))
def test_python_compiles_and_its_names_of_ours_exist(source):
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onepolicy"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, name.name) for name in node.names), node.module
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("onepolicy"):
                    assert importlib.util.find_spec(name.name)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id != "op" or hasattr(op, node.attr), node.attr


@pytest.mark.parametrize("source", blocks("toml"))
def test_toml_is_toml(source):
    assert tomllib.loads(source)
