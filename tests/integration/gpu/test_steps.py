"""Whole RL steps on a device, the engine's results twice, and its waits."""

import pytest
import torch

from onepolicy.replay.layers import is_moe
from onepolicy.types import Sampling
from support.engine_runs import prompts, run
from support.gpu import CUDA, counted_waits
from support.models import CONFIGS
from support.step_cases import FAST, mode_of
from support.whole_step import Models, build_engine, check, config_of, measure

ON_CPU = ("qwen3_moe r3 tis", "gpt_oss soft opsm chunks", "qwen3_dense off tis")
STEPS = [pytest.param("cpu", case) for case in ON_CPU]
STEPS += [pytest.param("cuda", case, marks=CUDA) for case in FAST]
NEVER = 10**6  # a stop token that no row samples, so that all requests have one length


@pytest.mark.few(1)
@pytest.mark.parametrize(("where", "case"), STEPS)
def test_a_step(where, case):
    """The CPU runs all of them on the emulated device."""
    check(measure(case, lambda model: model.to(where)), tolerance=1e-4)


def test_routes_of_512_experts(device):
    """Their ids are uint16, for which torch has few kernels."""
    changes = {"num_experts": 512, "num_experts_per_tok": 4}
    found = measure("qwen3_moe r3 tis", lambda model: model.to(device), changes)
    check(found, tolerance=1e-4)


def engine_of(family, device, *overrides):
    return build_engine(
        Models(family, lambda model: model.to(device)), config_of([mode_of(family)], *overrides)
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("family", CONFIGS)
def test_the_engine_samples_the_same_bits_twice(family, device):
    engine = engine_of(family, device)
    requests = [(prompt, Sampling(1.0, 8), i) for i, prompt in enumerate(prompts(5))]
    first = run(engine, requests)
    engine.batch.clear()
    for a, b in zip(first, run(engine, requests), strict=True):
        assert torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.logp, b.logp)
        if is_moe(engine.model.config):
            assert torch.equal(a.routing.ids, b.routing.ids)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_dense", "deepseek_v3"])
def test_a_decode_step_waits_once(family, device):
    """In bfloat16: torch has no grouped_mm for experts in float32, and loops over them."""
    engine = engine_of(family, device, "rollout.engine.dtype=bfloat16")
    waits = []
    for tokens in (4, 6, 9):  # the first warms up
        engine.batch.clear()
        sampling = Sampling(1.0, tokens, stop=(NEVER,))
        with counted_waits(device) as found:
            run(engine, [(prompt, sampling, i) for i, prompt in enumerate(prompts(3, 5, 6))])
        waits.append(len(found))
    assert waits[2] - waits[1] == {"cpu": 0, "cuda": 3}[device.type]
