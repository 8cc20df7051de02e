"""Make the conformance kit: dumps of real runs and of planted faults, with their verdicts.

    make vllm runs/policies/agent_products
    PYTHONPATH=tests python benchmarks/conformance.py --out conformance

A dump that is there is not made again.

Real runs are one step of the tiny policy, in which engine and trainer disagree as they do. Planted
faults are made in synthetic dumps (tests/support/audit_faults.py), so that their cause is known.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.audit.conformance import EXPECTED, judged
from onepolicy.record.probes import read_run
from onepolicy.record.schema import write_parquet
from support.audit_dumps import moved_routes, with_routes
from support.audit_faults import FAULTS, MOE, SMALL, world
from support.support_faults import PLANTED as IN_SUPPORTS
from support.support_faults import rows_of as supported_rows
from support.support_faults import supported_world

ROOT = Path(__file__).parents[1]
SHORT = ("steps=1", "eval.every=0", "log.counterfactual_every=1", "log.report=false")
SHORT += ("rollout.prompts_per_step=4", "log.tensorboard=false", "train.threads=1")
VLLM = ("rollout.engine.kind=vllm", "rollout.engine.kv_cache_gib=0.25")
VLLM += ("rollout.engine.block_size=32",)
ONE_OF_128 = ("routing_gap.toml", "model.path=benchmarks/evidence/policies/one-of-128")
TWO_OF_8 = ("model.path=benchmarks/evidence/policies/two-of-8", "task.ops=4")
RUNS = {
    "embedded_bfloat16": ("quickstart.toml",),
    "embedded_int8": ("quickstart.toml", "rollout.quant=int8", "correction.preset=tis"),
    "vllm_bfloat16": ("quickstart.toml", *VLLM),
    "embedded_top_p": ("quickstart.toml", *TWO_OF_8, "rollout.sampling.top_p=0.8"),
    "on_policy": ("on_policy.toml",),
    "turns": ("agent_products.toml",),
    "other_experts": (*ONE_OF_128, "replay.mode=off"),
    "other_experts_replayed": ONE_OF_128,
}
PLANTED = {
    "temperature": "T 0.7, processed",
    "top_k": "top-k 20",
    "base_10": "base 10, rollout",
    "one_token_late": "shift by 1, all",
    "second_turn_late": "shift, second turn, all",
    "end_token_0": "end token 0",
    "stale_weights": "stale half, no version",
    "prompts_in_mask": "prompts in mask, rollout 0",
    "retokenised": "merged token, 50%",
    "swapped_rows": "swapped rows, 10%",
    "system_prompt_missing": "system prompt missing",
    "row_means": "row means, trainer, half",
    "copied_rows": "copied rows, 30%",
    "prompts_scored_in_mask": "prompts in mask, both sides",
    "probabilities": "probabilities",
}
PLANTED_IN_SUPPORTS = {
    "supports_one_late": "a token late",
    "supports_raw": "the engine's values are raw",
    "supports_other_top_p": "the trainer cuts at another top-p",
    "supports_missing": "missing",
}
REFUSED = {"probabilities": "probabilities instead of their logarithms"}
"""Words with which the audit refuses a dump."""
Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("conformance"))
    out = parser.parse_args().out
    out.mkdir(exist_ok=True)
    expected = {}
    for name, made_by, make_rows in dumps():
        path = out / f"{name}.parquet"
        if not path.exists():
            write_parquet(path, make_rows())
        found = judged(path, REFUSED.get(name, "")).model_copy(update={"made_by": made_by})
        expected[path.name] = found.model_dump()
        if not found.refused:
            del expected[path.name]["refused"]
        print(f"{path.name:30} {path.stat().st_size:8,} bytes  {found.judgement()}", flush=True)
    (out / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n")


def dumps() -> Iterator[tuple[str, str, Callable[[], Rows]]]:
    """Yield name, origin and a maker of the rows of each dump."""
    for name, (recipe, *settings) in RUNS.items():
        words = [f"recipes/{recipe}", *SHORT, *settings]
        yield name, f"onepolicy train {' '.join(words)}", partial(rows_of_training, words)
    for gap in (SMALL, MOE):
        yield f"clean_{gap}", f"synthetic, gap {gap}", partial(rows_of_world, gap)
    for name, fault in PLANTED.items():
        yield name, f"planted: {fault}", partial(rows_of_world, SMALL, fault)
    yield "routes_one_late", "planted: the engine's routes are one row late", rows_of_late_routes
    for name, fault in PLANTED_IN_SUPPORTS.items():
        yield name, f"planted: supports, {fault}", partial(rows_with_supports, fault)


def rows_of_training(words: list[str]) -> Rows:
    """Train one step. Return the rows of its probe."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "onepolicy", "train", *words, f"out={folder}/run"]
        subprocess.run(command, check=True, cwd=ROOT)
        return rows_of_run(Path(folder) / "run")


def rows_of_run(run: Path) -> Rows:
    """Return the rows of a run's probes."""
    rows: Rows = []
    for block in read_run(run, {}):
        ends = block.lengths.cumsum()
        for row, (start, end) in enumerate(zip(ends - block.lengths, ends, strict=True)):
            rows.append({})
            for name, values in block.columns.items():
                if len(values) == len(block.lengths):
                    rows[-1][name] = values[row].item()
                elif name == "support_ids":
                    bounds = block.columns["support_counts"][:end].cumsum()[[start - 1, end - 1]]
                    first = int(bounds[0]) if start else 0
                    rows[-1][name] = values[first : int(bounds[1])].tolist()
                else:
                    rows[-1][name] = values[start:end].reshape(-1).tolist()
    return rows


def rows_of_world(gap: str, fault: str | None = None) -> Rows:
    """Return the rows of a synthetic dump, with a planted fault."""
    made = world(0, gap)
    if fault is not None:
        FAULTS[fault].plant(made)
    ends = np.asarray(made.lengths.cumsum(0))
    rows: Rows = []
    for row, end in enumerate(ends):
        start = end - int(made.lengths[row])
        rows.append({})
        for name, values in made.columns.items():
            if len(values) == len(ends):
                rows[-1][name] = values[row].item()
            else:
                rows[-1][name] = values[start:end].tolist()
    return rows


def rows_with_supports(fault: str) -> Rows:
    """Return rows with supports, with a planted fault."""
    arguments, move, _, _ = IN_SUPPORTS[fault]
    made, sets = supported_world(0, **arguments)
    return supported_rows(made, move(made, sets))[:32]


def rows_of_late_routes() -> Rows:
    """Return rows with routes of both sides, the engine's moved by a row."""
    routed = with_routes(rows_of_world(SMALL)[:24], layers=2, k=2)
    return moved_routes(routed, "row")


if __name__ == "__main__":
    main()
