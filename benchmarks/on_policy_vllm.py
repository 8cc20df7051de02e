"""Distance of vLLM on this machine to the trainer, to the bit: log-probabilities that differ, and
k3.

    python benchmarks/on_policy_vllm.py float32
    VLLM_BATCH_INVARIANT=1 python benchmarks/on_policy_vllm.py bfloat16 --model FOLDER

Run it in the environment of `make vllm`. The same tokens are scored by the trainer with fast and
with on-policy numerics. Then vLLM samples them again one request at a time.
"""

from __future__ import annotations

import argparse
import asyncio

from onepolicy.build.measure import MeasureComponents, build_measure_components, measure_config
from onepolicy.invariant.enable import enable_invariant
from onepolicy.measure.engine_noise import sample, sample_again
from onepolicy.objective.advantages import compute_outcomes
from onepolicy.train.pack import pack
from onepolicy.train.rescore import mismatch_of
from onepolicy.types import TokenBatch


def parts_of(model: str, dtype: str) -> MeasureComponents:
    engine = {
        "kind": "vllm",
        "dtype": dtype,
        "kv_cache_gib": 0.25,
        "block_size": 32,
        "max_len": 128,
    }
    rollout = {
        "engine": engine,
        "prompts_per_step": 8,
        "group_size": 2,
        "sampling": {"max_tokens": 80},
    }
    tree = {"model": {"path": model, "dtype": dtype}, "train": {"threads": 1}, "rollout": rollout}
    return build_measure_components(measure_config(tree, [], None))[0]


def show(what: str, batch: TokenBatch) -> None:
    found = mismatch_of(batch)
    print(f"{what}: {found.differing} of {found.tokens} differ, k3 {found.k3:.2g}", flush=True)


async def compare(parts: MeasureComponents) -> None:
    scorer = parts.scorer
    groups = await sample(parts)
    batch = pack(
        compute_outcomes(
            groups, parts.config.objective, max_tokens=parts.config.rollout.sampling.max_tokens
        )
    )
    show("fast trainer", scorer.score(batch, replay=False))
    if scorer.routers is not None:
        show("fast trainer, routes replayed", scorer.score(batch))
    enable_invariant(scorer.model)
    show("on-policy trainer", scorer.score(batch, replay=False))
    again = await sample_again(parts, groups, batch, alone=True)
    moved = int((again.same & (again.logp != again.before)).sum())
    print(
        f"vLLM one request at a time: {again.share:.0%} of the tokens come out the same, "
        f"{moved} of them differ"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--model", default="tiny")
    arguments = parser.parse_args()
    asyncio.run(compare(parts_of(arguments.model, arguments.dtype)))
