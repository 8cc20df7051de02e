"""A run whose engine returns a token without its support: it stops, or drops the episode and counts
it."""

import dataclasses
import json

import pytest

from onepolicy.cli import main
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.support.trace import KeptSet, SupportTrace
from support.metrics import rows

NARROWED = ("steps=2", "eval.every=0", "rollout.sampling.top_p=0.8", "replay.mode=r3")
DROP = "rollout.sampling.missing_support=drop"


def plant(monkeypatch, fault):
    """Change every completion that training asks supports of. fault(number, support) -> support."""
    original, seen = HFEngine.generate, []

    async def generate(self, prompt_ids, sampling, *, seed):
        done = await original(self, prompt_ids, sampling, seed=seed)
        if not sampling.support or sampling.max_tokens == 1:
            return done
        seen.append(seed)
        return dataclasses.replace(done, support=fault(len(seen), done.support))

    monkeypatch.setattr(HFEngine, "generate", generate)
    return seen


def first_missing(support):
    parts = support.split()
    return SupportTrace.join([KeptSet(parts[0].ids[:0]), *parts[1:]])


def every_third(number, support):
    if number % 3:
        return support
    return first_missing(support)


@pytest.fixture
def run(recipe, tmp_path):
    def start(*settings):
        out = tmp_path / "run"
        return main(["train", str(recipe), f"out={out}", *NARROWED, *settings]), out

    return start


def test_a_missing_set_stops_the_run(run, monkeypatch, capsys):
    plant(monkeypatch, every_third)
    status, out = run()
    assert status == 1
    assert "sampled tokens have no support" in capsys.readouterr().err
    assert not rows(out)


def test_dropped_episodes_are_counted_and_the_rest_is_trained_on(run, monkeypatch):
    """An attempt in three lacks a set. With one retry an episode in nine or so is given up."""
    seen = plant(monkeypatch, every_third)
    status, out = run(DROP)
    assert status == 0
    found = rows(out)
    summary = json.loads((out / "summary.json").read_text())
    counted = summary["missing_supports"]
    assert [row["step"] for row in found if "train/reward" in row] == [1, 2]
    assert counted["attempts"] == sum(row["rollout/missing_supports"] for row in found)
    assert counted["attempts"] == sum(row["rollout/episodes_failed"] for row in found)
    assert counted["attempts"] == len(seen) // 3
    # no tool fails here, so every episode that was given up lacked a support
    assert counted["dropped"] == sum(row.get("rollout/episodes_dropped", 0) for row in found)
    assert counted["dropped"] == sum(row["rollout/dropped_without_support"] for row in found)


def test_a_clean_run_counts_none_and_is_the_run_without_the_setting(run, monkeypatch):
    status, out = run(DROP)
    assert status == 0
    assert [row["rollout/missing_supports"] for row in rows(out)] == [0, 0]
    assert json.loads((out / "summary.json").read_text())["missing_supports"] == {
        "attempts": 0,
        "dropped": 0,
    }


def test_a_set_without_its_token_stops_the_run_all_the_same(run, monkeypatch, capsys):
    def without_token(number, support):
        parts = support.split()
        return SupportTrace.join([KeptSet((parts[0].ids + 1) % 20), *parts[1:]])

    plant(monkeypatch, without_token)
    status, _ = run(DROP)
    assert status == 1
    assert "not in their own support" in capsys.readouterr().err


def test_without_any_support_no_group_is_left(run, monkeypatch, capsys):
    plant(monkeypatch, lambda number, support: first_missing(support))
    status, _ = run(DROP)
    assert status == 1
    assert "no group has" in (error := capsys.readouterr().err)
    assert "have no support" in error
