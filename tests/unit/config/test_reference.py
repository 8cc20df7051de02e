"""docs/reference/settings.md is written from the settings' models, which describe every field."""

import re

from reference_pages import settings_page, values_text

from onepolicy.config.base import Frozen
from onepolicy.config.policy import PolicyConfig
from onepolicy.config.run import RunConfig
from onepolicy.config.serve import ServeConfig
from onepolicy.config.spelling import classes_of, paths_of
from support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "settings.md"
LONGEST = 240  # characters of a description: at most three lines of the source


def classes_in(kind: type[Frozen]) -> set[type[Frozen]]:
    """Return the classes of a kind of settings and of all its sections."""
    found, waiting = set(), [kind]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            for field in each.model_fields.values():
                waiting += classes_of(field.annotation)
    return found


KINDS = (RunConfig, PolicyConfig, ServeConfig)
FIELDS = {
    f"{kind.__name__}.{name}": field
    for kind in set().union(*map(classes_in, KINDS))
    for name, field in kind.model_fields.items()
}


def test_the_page_is_current():
    command = "python benchmarks/reference_pages.py"
    assert PAGE.read_text(encoding="utf-8") == settings_page(), f"write it anew: {command}"


def test_every_field_has_a_description():
    """A sentence or two in one paragraph, which ends with a full stop."""
    assert len(FIELDS) > 100
    texts = {name: field.description or "" for name, field in FIELDS.items()}
    assert [name for name, text in texts.items() if not text.endswith(".")] == []
    assert [name for name, text in texts.items() if "\n\n" in text] == []
    assert {name: len(text) for name, text in texts.items() if len(text) > LONGEST} == {}


def test_a_field_that_may_be_unset_says_what_that_means():
    for name, field in FIELDS.items():
        if field.default is None and not field.is_required() and not classes_of(field.annotation):
            assert re.search(r"\bUnset\b", field.description), name


def test_the_page_has_every_setting():
    page = PAGE.read_text(encoding="utf-8")
    for kind in KINDS:
        for path in paths_of(kind):
            name = path.rpartition(".")[2]
            shown = (f"- `{name}` (", f"\n### {path}\n", f"\n`{name}` is one of these")
            assert any(each in page for each in shown), path


def test_defaults_and_bounds_in_brackets():
    for text, default, schema in (
        ("required, integer", "required", {"type": "integer", "exclusiveMinimum": 0}),
        ("`8`", "`8`", {"type": "integer", "minimum": 1, "maximum": 2**16}),
        ("`0`, ≤16", "`0`", {"type": "integer", "minimum": 0, "maximum": 16}),
        ("`0.5`, >0.1", "`0.5`", {"type": "number", "exclusiveMinimum": 0.1, "maximum": 1e12}),
        ("`0.0`, <1", "`0.0`", {"type": "number", "minimum": 0, "exclusiveMaximum": 1}),
        ("unset, number", "unset", {"anyOf": [{"type": "number"}, {"type": "null"}]}),
        ("unset", "unset", {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ('`"b"`, `"a"`', '`"b"`', {"enum": ["a", "b"]}),
        ('required, `"a"`, `"b"`', "required", {"enum": ["a", "b"]}),
        ("unset, list of texts", "unset", {"type": "array", "items": {"type": "string"}}),
        ("unset, 2 numbers", "unset", {"type": "array", "prefixItems": [{}, {}]}),
        ("unset, table", "unset", {"type": "object"}),
        ("`true`", "`true`", {"type": "boolean"}),
    ):
        assert values_text(schema, default) == text
