"""docs/reference/settings.md is written from the settings' models, which describe every field."""

from __future__ import annotations

import re

import pytest

from onepolicy.config.base import Frozen
from onepolicy.config.policy import PolicyConfig
from onepolicy.config.reference import classes_of, settings_page, type_text
from onepolicy.config.run import RunConfig
from onepolicy.config.serve import ServeConfig
from onepolicy.config.spelling import paths_of
from support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "settings.md"
LONGEST = 260  # characters of a description: at most three lines of the source


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


CLASSES = sorted(
    set().union(*map(classes_in, (RunConfig, PolicyConfig, ServeConfig))), key=lambda c: c.__name__
)


def test_the_page_is_current():
    command = "python -m onepolicy.config.reference > docs/reference/settings.md"
    assert PAGE.read_text(encoding="utf-8") == settings_page(), f"write it anew: {command}"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_field_has_a_description(kind):
    """A sentence or two in one paragraph, which begins with a word and ends with a full stop."""
    assert kind.model_fields
    for name, field in kind.model_fields.items():
        text = field.description or ""
        assert text.endswith("."), f"{kind.__name__}.{name}: {text!r}"
        assert "\n\n" not in text, f"{kind.__name__}.{name}"
        assert len(text) <= LONGEST, f"{kind.__name__}.{name}: {len(text)} characters"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_field_that_may_be_unset_says_what_that_means(kind):
    for name, field in kind.model_fields.items():
        sections = classes_of(field.annotation)
        if field.default is None and not field.is_required() and not sections:
            assert re.search(r"\bUnset\b", field.description), f"{kind.__name__}.{name}"


def test_the_page_has_every_setting():
    page = PAGE.read_text(encoding="utf-8")
    for kind in (RunConfig, PolicyConfig, ServeConfig):
        for path in paths_of(kind):
            name = path.rpartition(".")[2]
            assert f"| `{name}` |" in page or f"| {name} |" in page, path


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 2**31 - 1}, "integer ≥ 1"),
        ({"type": "integer", "minimum": 0, "maximum": 16}, "integer 0 to 16"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e12}, "number > 0"),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, "number ≥ 0, < 1"),
        ({"type": "number"}, "number"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "text"),
        ({"enum": ["a", "b"]}, "`a`, `b`"),
        ({"type": "array", "items": {"type": "string"}}, "list of texts"),
        ({"type": "array", "prefixItems": [{}, {}]}, "list of 2 numbers"),
        ({"type": "boolean"}, "true or false"),
    ],
)
def test_types_in_words(schema, text):
    assert type_text(schema) == text
