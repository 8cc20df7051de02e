"""Rules between settings: what is typed, and what is printed about it (rule_messages.txt).

After a change of a text, `PYTHONPATH=src:tests python tests/unit/config/test_rules.py` writes what
is printed anew. Read the difference before you commit it.
"""

import shlex
from pathlib import Path

from onepolicy.config import Frozen, RunConfig, UsageError
from onepolicy.config.idle import IDLE, describe_idle, idle_settings
from onepolicy.config.load import resolve_as
from onepolicy.config.policy import PolicyConfig
from onepolicy.config.rules import Rule
from onepolicy.config.serve import ServeConfig

MESSAGES = Path(__file__).with_name("rule_messages.txt")
MINIMAL = {"out": "runs/x", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
COMMANDS = {"train": RunConfig, "make-policy": PolicyConfig, "serve": ServeConfig}


def printed(typed: str) -> str:
    """Return what is printed about a command with these settings."""
    command, *overrides = shlex.split(typed)
    tree = {}
    if command == "train":
        tree = MINIMAL
    try:
        config = resolve_as(COMMANDS[command], tree, overrides)
    except UsageError as error:
        return str(error)
    found = idle_settings(config)
    if not found:
        return "accepted"
    return describe_idle(found)


def written() -> dict[str, str]:
    """Return what the file says is printed, by what is typed."""
    _, *entries = MESSAGES.read_text(encoding="utf-8").split("\n$ ")
    typed, texts = zip(*(entry.split("\n", 1) for entry in entries), strict=True)
    assert len(set(typed)) == len(typed)
    return {line: text.strip("\n") for line, text in zip(typed, texts, strict=True)}


def test_every_text_is_as_written(subtests):
    for typed, text in written().items():
        with subtests.test(typed):
            assert printed(typed) == text


def every_rule(section: type[Frozen] = Frozen) -> dict[int, Rule]:
    """Return the rules of all sections, by identity."""
    found = {id(rule): rule for rule in section.rules}
    for inner in section.__subclasses__():
        found |= every_rule(inner)
    return found


def test_every_rule_has_settings_that_break_it(monkeypatch):
    """The way to a rule's text is recorded, as its entries in the file are tried."""
    tried = set()
    for name in ("check", "reason"):
        text_of = getattr(Rule, name)

        def recorded(rule, of, text_of=text_of):
            tried.add(id(rule))
            return text_of(rule, of)

        monkeypatch.setattr(Rule, name, recorded)
    for typed in written():
        printed(typed)
    rules = every_rule() | {id(rule): rule for rule in IDLE}
    assert len(rules) > 100
    missing = [(rules[each].setting, rules[each].why) for each in rules.keys() - tried]
    assert missing == []


def main() -> None:
    head, *_ = MESSAGES.read_text(encoding="utf-8").split("\n$ ")
    entries = [f"\n$ {typed}\n{printed(typed)}\n" for typed in written()]
    MESSAGES.write_text(f"{head}{''.join(entries)}", encoding="utf-8")


if __name__ == "__main__":
    main()
