"""Every command of README and guides ran, or a test does what it does, or a reason is given.

benchmarks/docs_commands/commands.toml has the three lists, log.json what came out. Run what is new:
PYTHONPATH=tests python benchmarks/docs_commands/run.py --failed
"""

import json
import re

from docs_commands.rules import LOG, RULES, as_run

from support.doc_commands import commands_of_guides
from support.paths import ROOT

RUN, TESTED, NOT_RUN = (RULES[name] for name in ("run", "tested", "not_run"))
PRINTED = {" ".join(words) for words in commands_of_guides()}
TESTS = {line for line in PRINTED if line.startswith("pytest ")}
OUTCOMES = {outcome["command"]: outcome for outcome in json.loads(LOG.read_text())}


def test_every_command_is_in_exactly_one_of_the_lists():
    listed = [*RUN, *TESTED, *NOT_RUN]
    assert len(listed) == len(set(listed))
    assert not PRINTED - TESTS - set(listed), "new commands: a line each in commands.toml"
    assert not set(listed) - PRINTED, "no page prints these: take them out of commands.toml"
    assert not TESTS & set(listed), "a command of pytest is a test itself"


def test_the_log_has_every_command_that_runs():
    assert list(OUTCOMES) == list(RUN)


def test_each_ran_as_the_rules_say_and_ended_well(subtests):
    for line, rule in RUN.items():
        outcome = OUTCOMES[line]
        with subtests.test(line):
            assert outcome["ran"] == as_run(line, rule)
            assert outcome["status"] == rule.get("status", 0), outcome["last"]
            assert outcome["last"] or not line.startswith("onepolicy")
            assert outcome["seconds"] > 0


def test_the_named_tests_exist(subtests):
    for line, named in TESTED.items():
        file, _, name = named.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        with subtests.test(line):
            assert re.search(rf"^def {name or 'test_'}", text, re.MULTILINE)
            assert not name or f"def {name}(" in text


def test_what_does_not_run_says_why():
    assert all(len(reason.split()) >= 2 for reason in NOT_RUN.values())
    assert len(RUN) > len(TESTED) + len(NOT_RUN)
