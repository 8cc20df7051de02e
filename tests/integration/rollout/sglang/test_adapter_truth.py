"""The five published failures of LoRA syncs are named as documented, planted in an engine whose
server keeps SGLang 0.5.23's contract. tests/e2e/rollout/sglang/test_lora.py runs SGLang itself."""

import asyncio

import pytest
import torch

from onepolicy.build.components import build_components
from onepolicy.run.adapter_check import AdapterCheck
from onepolicy.run.step import push_and_check
from support import adapter_faults
from support.adapter_faults import FAULTS, entries_there, first_seen, planted, settings, update
from support.fake_sglang_adapters import TAKES_ADAPTERS
from support.fake_sglang_model import ModelSGLang


@pytest.fixture(scope="module")
def fake(policy):
    torch.set_num_threads(1)
    with ModelSGLang(str(policy), info=dict(TAKES_ADAPTERS)) as server:
        yield server


@pytest.fixture(autouse=True)
def small_checks(monkeypatch):
    """Compare a quarter of the prompts, and take one update for no failure."""
    monkeypatch.setattr(AdapterCheck, "prompts", 8)
    monkeypatch.setattr(adapter_faults, "LAST", 1)


@pytest.mark.full
@pytest.mark.parametrize("sync", ["merged", "native"])
def test_a_correct_engine_passes(fake, policy, sync):
    components, _ = build_components(settings(policy, "sglang", sync, "float32", url=fake.url))
    assert asyncio.run(first_seen(components, None)) == (None, "")
    update(components.learner)
    found = asyncio.run(push_and_check(components))
    assert found["adapter/delivered"] == pytest.approx(1, abs=0.01)
    assert found["adapter/gap"] < 1e-3 * found["adapter/effect"]
    assert list(fake.adapters) == ["lora-faults@2"] * (sync == "native")


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("sync", ["merged", "native"])
def test_the_table_of_planted_failures(fake, policy, sync, fault):
    found = planted(policy, "sglang", sync, fault, dtype="float32", url=fake.url)
    assert found in entries_there()


@pytest.mark.full
def test_a_base_in_nf4_reaches_the_server(fake, policy):
    pytest.importorskip("bitsandbytes")
    chosen = settings(policy, "sglang", "merged", "float32", base="nf4", url=fake.url)
    components, _ = build_components(chosen)
    assert asyncio.run(first_seen(components, None)) == (None, "")
