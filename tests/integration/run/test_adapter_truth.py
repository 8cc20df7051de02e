"""The five published failures of LoRA syncs are named after the first update, as documented."""

import asyncio
import re

import pytest

from onepolicy.build.components import build_components
from support.adapter_faults import FAULTS, LATE, ON_TOP, first_seen, rows, seen_by, settings
from support.paths import ROOT


def documented(kind, sync, fault):
    start = f"| {kind} | {sync} | {fault} | "
    lines = (ROOT / "docs" / "lora_measured.md").read_text().splitlines()
    return [line for line in lines if line.startswith(start)]


def without_update(lines):
    """Return the rows without the update at which log-probabilities named a fault: 1 or 2.

    It depends on the policy how far above bfloat16's rounding the first update is.
    """
    return [re.sub("[12]: log-probabilities", "log-probabilities", line) for line in lines]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("sync", ["merged", "native"])
def test_the_table_of_planted_failures(policy, sync, fault):
    found = rows(policy, "hf", sync, [fault])
    assert without_update(found) == without_update(documented("hf", sync, fault)) != []


@pytest.mark.parametrize("fault", LATE)
def test_weights_that_are_wrong_from_the_second_update_on_are_named_there(policy, fault):
    components, _ = build_components(settings(policy))
    step, message = asyncio.run(first_seen(components, fault, since=2))
    assert (step, seen_by(message)) == (2, "weights in the engine")


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sync", ["merged", "native"])
def test_a_correct_engine_passes(policy, sync, dtype):
    components, _ = build_components(settings(policy, "hf", sync, dtype))
    assert asyncio.run(first_seen(components, None)) == (None, "")
    assert components.engine.adapter == "lora-faults"
