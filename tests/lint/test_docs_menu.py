"""The menu of the site: each page is of one kind, and evidence stands apart from guides."""

import ast
import re

import pytest
import yaml

import onepolicy as op
from support.paths import ROOT
from support.sources import text_of

DOCS = ROOT / "docs"
OUTSIDE = ["architecture.md"]
"""For those who change the project: built, and in no menu."""
KINDS = ["Concepts", "Guides", "Reference", "Evidence"]
GUIDES = [
    "healthy",
    "measure",
    "symptoms",
    "trainers",
    "other_trainers",
    "gpus",
    "agents",
    "on_policy",
    "reliability",
]


def menu():
    """Return the pages of each kind, in order."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    first, *rest = yaml.safe_load(text[text.index("\nnav:\n") :])["nav"]
    assert first == "index.md"
    assert [next(iter(part)) for part in rest] == KINDS
    return {kind: list(pages(part[kind])) for kind, part in zip(KINDS, rest, strict=True)}


def pages(entry):
    """Return every file below an entry of the menu."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from pages(part)


def headings(page):
    text = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.findall(r"^#+ (.*)$", text, re.MULTILINE)


def test_every_page_is_of_exactly_one_kind():
    listed = ["index.md", *OUTSIDE, *(page for kind in menu().values() for page in kind)]
    files = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert sorted(listed) == files


def test_the_guides_that_people_ask_for_are_there():
    assert {f"{name}.md" for name in GUIDES} <= set(menu()["Guides"])


def test_concepts_have_drawings():
    drawn = re.findall(r"\]\((figures/\w+\.svg)\)", (DOCS / "concepts.md").read_text())
    assert drawn == ["figures/step.svg", "figures/routing.svg", "figures/slots.svg"]
    step = (DOCS / drawn[0]).read_text()
    places = [step.index(f">{word}") for word in ("prompt", "tokens, log p", "routes", "new weig")]
    assert places == sorted(places)


@pytest.mark.parametrize("page", menu()["Guides"])
def test_a_guide_is_no_evidence(page):
    evidence = re.compile(r"^(measured|cost|speed|soak|what was run|calibration)\b", re.I)
    assert not [heading for heading in headings(page) if evidence.match(heading)]


@pytest.mark.parametrize("page", menu()["Evidence"])
def test_evidence_has_tables_and_the_commands_that_made_them(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert re.search(r"^\|[ -]*-{3}", text, re.MULTILINE)
    assert re.search(r"`?\b(pytest|python|onepolicy|make|VLLM_\w+=\S+) [\w./-]+", text)


def names_of(module):
    """Return what a module of ours defines or imports, without importing it: that loads torch."""
    path = ROOT / "src" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(text_of(file)).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    return names | {getattr(node, "name", "") for node in body}


def test_the_reference_of_the_library_has_every_public_name():
    """Also what the page calls stable of the adapters: `attach`."""
    text = (DOCS / "library.md").read_text(encoding="utf-8")
    shown = {path.rpartition(".") for path in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    assert {name for _, _, name in shown} >= set(op.__all__) - {"__version__"}
    for module, _, name in shown:
        assert name in names_of(module), f"{module}.{name}"
    adapters = (ROOT / "src" / "onepolicy" / "integrations").glob("*/__init__.py")
    attaching = {
        f"onepolicy.integrations.{path.parent.name}"
        for path in adapters
        if re.search(r"^from .* import attach\b", path.read_text(), re.MULTILINE)
    }
    assert attaching == {module for module, _, name in shown if name == "attach"}
