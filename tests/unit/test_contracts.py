"""`tests/support/contracts.py` names what a checkout has moved."""

import json

import pytest

from support import contracts

SOURCE = """
class Sample:
    tokens: list
    reward: float = 0.0

STAGE = "replay"

class Trainer:
    def step(self, args, /, data, *, rank=0, **more):
        keywords = {"args": args, "data": data}
        self.hook(args, data, rank=rank)
        self.hook(args, data, rank=rank)
        return keywords
"""
STEP = ["self", "args", "data", "*", "rank=0", "**more"]
HOOK = {"kind": "calls", "in": "Trainer", "of": "self.hook"}
FACTS = [
    {"name": "sample", "kind": "fields", "in": "Sample", "value": ["tokens", "reward"]},
    {"name": "stage", "kind": "constant", "of": "STAGE", "value": "replay"},
    {"name": "step", "kind": "parameters", "in": "Trainer.step", "value": STEP},
    {"name": "keys", "kind": "keys", "in": "step", "of": "keywords", "value": ["args", "data"]},
    {"name": "hook", **HOOK, "value": [["args", "data", "rank="]]},
]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    facts = [{"file": "pkg/trainer.py", **fact} for fact in FACTS]
    stored = tmp_path / "contracts.json"
    stored.write_text(json.dumps({"one": {"version": "1", "facts": facts}}))
    monkeypatch.setattr(contracts, "STORED", stored)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "trainer.py").write_text(SOURCE)
    return tmp_path


def test_the_version_that_was_read_has_not_moved(checkout):
    assert contracts.compare("one", checkout) == []


def test_what_moved_is_named(checkout, subtests):
    for old, new, name in (
        ("reward: float", "score: float", "sample"),
        ('STAGE = "replay"', 'STAGE = "forward"', "stage"),
        ("rank=0", "rank=1", "step"),
        ('"data": data', '"batch": data', "keys"),
        ("self.hook(args, data, rank=rank)", "self.hook(args)", "hook"),
        ("class Sample", "class Row", "sample"),
    ):
        with subtests.test(new):
            (checkout / "pkg" / "trainer.py").write_text(SOURCE.replace(old, new))
            (line,) = contracts.compare("one", checkout)
            assert line.startswith(f"{name} (pkg/trainer.py:")


def test_a_file_that_is_gone(checkout):
    (checkout / "pkg" / "trainer.py").unlink()
    assert len(contracts.compare("one", checkout)) == len(FACTS)


def test_writing_takes_the_checkout_over(checkout):
    (checkout / "pkg" / "trainer.py").write_text(SOURCE.replace("rank=0", "rank=1"))
    contracts.write("one", checkout)
    assert contracts.compare("one", checkout) == []
    assert "rank=1" in contracts.value_of("one", "step")


def test_the_stored_file_is_as_the_script_writes_it():
    text = contracts.STORED.read_text(encoding="utf-8")
    assert contracts.as_text(json.loads(text)) == text


def test_every_fact_has_a_value():
    for contract in contracts.load().values():
        assert contract["facts"]
        assert all(fact["value"] is not None for fact in contract["facts"])
