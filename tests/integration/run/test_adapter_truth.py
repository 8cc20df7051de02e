"""The five published failures of LoRA syncs are named before the first step, as documented."""

import asyncio
from itertools import product

import pytest

from onepolicy.build.components import build_components
from onepolicy.run.adapter_check import AdapterCheck
from support.adapter_faults import (
    BEGIN,
    END,
    FAULTS,
    LATE,
    ON_TOP,
    PAGE,
    POLICY,
    SYNCS,
    entries_there,
    first_seen,
    planted,
    seen_by,
    settings,
    table,
)


@pytest.mark.few(2)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("sync", SYNCS)
def test_the_table_of_planted_failures(sync, fault, monkeypatch):
    monkeypatch.setattr(AdapterCheck, "prompts", 8)
    found = planted(POLICY, "hf", sync, fault)
    assert found in entries_there()
    assert {step for step, _ in found["named"]} == {0}


def test_the_page_has_the_table_and_every_fault_is_named_before_the_first_step():
    written = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert written == "\n".join(table(entries_there()))
    for entry in entries_there():
        for step, words in entry["named"]:
            assert step == 0, entry
            assert words != "not seen", entry


@pytest.mark.full
@pytest.mark.parametrize(
    ("sync", "fault"),
    [
        pytest.param(sync, fault, marks=[pytest.mark.slow] * ((s + f) % 2))
        for (s, sync), (f, fault) in product(enumerate(SYNCS), enumerate(FAULTS))
    ],
)
def test_failures_that_begin_at_the_first_update_are_named_there(sync, fault):
    components, _ = build_components(settings(POLICY, "hf", sync))
    step, message = asyncio.run(first_seen(components, fault, since=1))
    assert step == 1
    assert seen_by(message) != message


@pytest.mark.full
@pytest.mark.parametrize("fault", LATE)
def test_weights_that_are_wrong_from_the_second_update_on_are_named_there(policy, fault):
    components, _ = build_components(settings(policy))
    step, message = asyncio.run(first_seen(components, fault, since=2))
    assert (step, seen_by(message)) == (2, "weights in the engine")


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("merged twice", "the adapter added twice"),
        (ON_TOP, "weights that hold that of the version"),
    ],
)
def test_log_probabilities_alone_tell_two_merges_apart(policy, fault, words):
    """In float32, where rounding hides nothing."""
    components, _ = build_components(settings(policy, dtype="float32"))
    step, message = asyncio.run(first_seen(components, fault, by_weights=False, since=2))
    assert step == 2
    assert words in message


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fault", "by_weights", "words"),
    [
        ("merged twice", True, "HFEngine is the frozen weights with the adapter added twice"),
        ("never delivered", False, "requests), or the adapter of version 0, which is the same"),
    ],
)
def test_the_error_says_what_the_engine_has_instead(policy, fault, by_weights, words, monkeypatch):
    monkeypatch.setattr(AdapterCheck, "prompts", 8)
    components, _ = build_components(settings(policy, dtype="float32"))
    step, message = asyncio.run(first_seen(components, fault, by_weights=by_weights))
    assert step == 1
    assert words in message


@pytest.mark.parametrize("sync", [pytest.param("merged", marks=pytest.mark.full), "native"])
def test_a_correct_engine_passes(policy, sync, monkeypatch):
    """So it does in every run of test_lora_run.py, whose weights are merged."""
    monkeypatch.setattr(AdapterCheck, "prompts", 8)
    components, _ = build_components(settings(policy, "hf", sync, "bfloat16"))
    assert asyncio.run(first_seen(components, None)) == (None, "")
    assert components.engine.adapter == "lora-faults"
