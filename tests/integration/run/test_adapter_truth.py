"""The five published failures of LoRA syncs are named after the first update, as documented."""

import asyncio

import pytest

from onepolicy.build.components import build_components
from support.adapter_faults import FAULTS, first_seen, rows, settings
from support.paths import ROOT


def documented(kind, sync, fault):
    start = f"| {kind} | {sync} | {fault} | "
    lines = (ROOT / "docs" / "lora_measured.md").read_text().splitlines()
    return [line for line in lines if line.startswith(start)]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("sync", ["merged", "native"])
def test_the_table_of_planted_failures(policy, sync, fault):
    assert rows(policy, "hf", sync, [fault]) == documented("hf", sync, fault)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sync", ["merged", "native"])
def test_a_correct_engine_passes(policy, sync, dtype):
    components, _ = build_components(settings(policy, "hf", sync, dtype))
    assert asyncio.run(first_seen(components, None)) == (None, "")
    assert components.engine.adapter == "lora-faults"
