"""The same short run with R3 on the embedded engine and on vLLM, both in bfloat16 under a float32 trainer: reward rises
and replay lowers the mismatch on both. Minutes; `make test-slow`."""

import json
import statistics

import pytest

from onepolicy.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(7200)]
SETTINGS = ["steps=25", "log.counterfactual_every=1", "eval.every=0", "log.report=false", "log.tensorboard=false"]


@pytest.mark.parametrize(("kind", "more"), [("hf", []), ("vllm", ["rollout.engine.cache_gib=0.25"])])
def test_reward_rises_and_replay_lowers_k3(kind, more, tmp_path):
    assert main(["make-policy"]) == 0
    out = tmp_path / "run"
    settings = [f"out={out}", f"rollout.engine.kind={kind}", "rollout.engine.dtype=bfloat16", *SETTINGS, *more]
    assert main(["train", "recipes/quickstart.toml", *settings]) == 0
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["train/reward"] for row in steps]
    replayed, native = ([row[f"{prefix}mismatch/k3"] for row in steps] for prefix in ("", "counterfactual/"))
    lower = sum(a < b for a, b in zip(replayed, native, strict=True))
    first, last = statistics.mean(rewards[:5]), statistics.mean(rewards[-5:])
    print(f"{kind}: reward {first:.2f} to {last:.2f}; k3 {statistics.mean(replayed):.1e} replayed, ", end="")
    print(f"{statistics.mean(native):.1e} not; lower in {lower} of {len(steps)} steps")
    assert len(steps) == 25
    assert last > first + 0.05
    assert statistics.mean(replayed) < statistics.mean(native)
    assert lower > len(steps) / 2
