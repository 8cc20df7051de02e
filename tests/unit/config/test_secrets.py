"""Secrets in somebody else's settings are hidden, each by a rule of its own."""

import pytest

from onepolicy.config.secrets import without_secrets

CASES = [
    ({"api_key": "s", "size": "s"}, {"api_key": "hidden", "size": "s"}),
    ({"name": "Cookie", "value": "s"}, {"name": "Cookie", "value": "hidden"}),
    # the names of a request's fields and of their attributes
    (
        {"name": "Cookie", "value": "s", "path": "/"},
        {"name": "Cookie", "value": "hidden", "path": "/"},
    ),
    ({"name": "size", "value": "s"}, {"name": "size", "value": "s"}),
    ({"name": "Cookie", "text": "s"}, {"name": "Cookie", "text": "s"}),
    (["X-Token", "s"], ["X-Token", "hidden"]),
    (["X-Token", "s", "t"], ["X-Token", "s", "t"]),  # no pair
    (["run", "--token", "s", "t"], ["run", "--token", "hidden", "t"]),
    (["--token=s", "t"], ["--token=hidden", "t"]),
    ({"keys": ["s", {"a": "t"}, 3]}, {"keys": ["hidden", {"a": "hidden"}, 3]}),
]


@pytest.mark.parametrize("section", ["env", "params", "command"])
def test_a_secret_is_hidden_in_the_settings_of_others_alone(section, subtests):
    for given, expected in CASES:
        with subtests.test(given=given):
            assert without_secrets({"task": {section: given}}) == {"task": {section: expected}}
            assert without_secrets({"task": {"answer": given}}) == {"task": {"answer": given}}
