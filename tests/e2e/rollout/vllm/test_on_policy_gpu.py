"""vLLM's own batch-invariant mode on a GPU, by hand:

    export ONEPOLICY_MODEL=FOLDER VLLM_BATCH_INVARIANT=1
    pytest -m gpu tests/e2e/rollout/vllm/test_on_policy_gpu.py

FOLDER: a MoE model with its tokenizer, small enough for trainer and engine on one device.
"""

import asyncio
import dataclasses
import os

import pytest

from onepolicy.build.measure import build_measure_components, measure_config
from onepolicy.measure.engine_noise import sample, sample_again
from onepolicy.objective.advantages import compute_outcomes
from onepolicy.train.pack import pack
from onepolicy.train.rescore import mismatch_of

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(3600)]


def test_vllm_repeats_itself_to_the_bit(capsys):
    """Requests together and one at a time have the same log-probabilities. The trainer runs other
    kernels, so a small gap to it is left."""
    assert os.environ.get("VLLM_BATCH_INVARIANT") == "1", (
        "set VLLM_BATCH_INVARIANT=1 before vLLM is imported"
    )
    model = {"path": os.environ["ONEPOLICY_MODEL"], "dtype": "bfloat16"}
    rollout = {
        "engine": {"kind": "vllm", "dtype": "bfloat16"},
        "prompts_per_step": 16,
        "group_size": 2,
    }
    tree = {"model": model, "rollout": rollout, "train": {"device": "cuda"}}
    parts, _ = build_measure_components(measure_config(tree, [], None))

    async def compare():
        plain = dataclasses.replace(parts.sampling, top_logprobs=0)
        groups = await sample(dataclasses.replace(parts, sampling=plain))
        batch = pack(compute_outcomes(groups, parts.config.objective, max_tokens=96))
        return parts.scorer.score(batch, replay=False), await sample_again(
            parts, groups, batch, alone=True
        )

    scored, alone = asyncio.run(compare())
    assert alone.share == 1.0
    assert alone.metrics["repeat/max_dlogp"] == 0.0
    found = mismatch_of(scored)
    with capsys.disabled():
        print(
            f"\ntrainer against vLLM: {found.differing} of {found.tokens} differ, k3 {found.k3:.3g}"
        )
    assert found.k3 < 1e-2
