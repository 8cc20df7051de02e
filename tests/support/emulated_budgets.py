"""How often the host waits for the emulated device: per decode step, request and micro-batch.

python -c "import support.emulated_device, support.emulated_budgets as b; b.main(['qwen3_moe'])"
"""

import asyncio
import json
from collections import Counter

import torch

from onepolicy.invariant import fingerprint
from onepolicy.types import Sampling

from support.emulated_device import READS, move_model  # isort: skip - it changes torch

from support.engine_runs import run
from support.step_cases import mode_of
from support.whole_step import Models, build, config_of, play

PROMPT = list(range(2, 14))
NEVER = 10**6  # a stop token that no row samples, so that all requests have one length


def parts_of(family: str, *overrides: str, layers: int = 3):
    config = config_of([mode_of(family)], "log.counterfactual_every=0", *overrides)
    models = Models(family, move_model, {"num_hidden_layers": layers})
    return build(models, config, stop=(NEVER,))


def reads_of(engine, count: int, tokens: int, *, again: bool = False) -> int:
    """Return the reads of `count` requests that are sampled together, `tokens` tokens each.

    again: the requests were sampled before, so their prompts are in the cache.
    """
    asyncio.run(engine.reset_cache())
    sampling = Sampling(1.0, tokens, stop=(NEVER,))
    requests = [([2 + i, *PROMPT], sampling, i) for i in range(count)]
    if again:
        run(engine, requests)
    READS.pop_all()
    run(engine, requests)
    return sum(READS.pop_all().values())


def engine_reads(family: str) -> dict[str, float]:
    """Return the reads of the engine, as differences of whole runs."""
    engine = parts_of(family, "rollout.engine.enable_prefix_caching=false").engine
    two = reads_of(engine, 2, 6)
    found = {
        "decode step": reads_of(engine, 2, 7) - two,
        "finished request": (reads_of(engine, 4, 6) - two) / 2,
    }
    cached = parts_of(family).engine
    look_ups = reads_of(cached, 2, 6, again=True) - reads_of(cached, 2, 6)
    return found | {"prefix look-up": look_ups / 2}


def learner_reads(family: str, layers: int, tokens: int) -> tuple[Counter[str], int]:
    """Return the learner's reads of a step by line, and its number of micro-batches.

    Each is scored and trained on by forwards of its own, as in a step of several.
    """
    settings = [f"train.tokens_per_micro_batch={tokens}", "train.reuse_scoring_forward=false"]
    parts = parts_of(family, *settings, layers=layers)
    result = play(parts, 0, between=READS.pop_all)
    reads = {line: n for line, n in READS.pop_all().items() if not line.startswith("rollout")}
    return Counter(reads), len(parts.learner.scorer.micro_batches(result.batch))


def main(families: list[str]) -> None:
    """Print a line of JSON for each family."""
    torch.set_num_threads(1)
    fingerprint._gpu = lambda device: {"device": str(device)}
    for family in families:
        whole, one = learner_reads(family, 5, 1000)
        split, several = learner_reads(family, 5, 64)
        deep, _ = learner_reads(family, 7, 1000)
        assert one == 1 < several
        found = {
            **engine_reads(family),
            "one micro-batch and the update": sum(whole.values()),
            "further micro-batch": (sum(split.values()) - sum(whole.values())) / (several - 1),
            "layer": (sum(deep.values()) - sum(whole.values())) / 2,
        }
        print(json.dumps({"family": family, "found": found, "lines": dict(split)}), flush=True)
