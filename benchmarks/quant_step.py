"""Share of a training step that a format of the rollout saves: a random MoE of 196M parameters,
sampled and trained.

    python benchmarks/quant_step.py --formats off int8 --steps 2

Steps are the loop's own. Formats take their steps in turn, so that other work on the machine meets
all of them. Every format keeps a learner of its own (about 4 GB).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path

import torch
from sync import big_model

from onepolicy.build.components import Components, build_components
from onepolicy.config import resolve
from onepolicy.config.policy import PolicyConfig
from onepolicy.envs.warmup.examples import task_alphabet
from onepolicy.run.hooks import build_hooks
from onepolicy.run.step import StepRunner
from onepolicy.tiny.model import make_tokenizer

TIMES = ("rollout", "score", "update", "sync", "step")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=["off", "int8"])
    parser.add_argument("--steps", type=int, default=2, help="after one that warms up")
    parser.add_argument("--length", type=int, default=64, help="tokens of a response")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "model")
        runs = {
            quant: build(Path(folder), quant, options.steps, options.length)
            for quant in options.formats
        }
        runners = {quant: StepRunner(parts, build_hooks(parts)) for quant, parts in runs.items()}
        rows = {quant: [] for quant in runs}
        for step in range(options.steps + 1):
            for quant, runner in runners.items():
                rows[quant].append(asyncio.run(runner.rl_step(step)).metrics)
    print(
        "| rollout.quant | "
        + " | ".join(f"{name}, s" for name in TIMES)
        + " | sampling's share | step / first |"
    )
    print("|" + " --- |" * (len(TIMES) + 3))
    first = [row["time/step"] for row in rows[options.formats[0]][1:]]
    for quant, (_, *measured) in rows.items():
        found = [statistics.median(row[f"time/{name}"] for row in measured) for name in TIMES]
        ratio = statistics.median(
            row["time/step"] / other for row, other in zip(measured, first, strict=True)
        )
        seconds = " | ".join(f"{each:.2f}" for each in found)
        print(f"| {quant} | {seconds} | {found[0] / found[-1]:.0%} | {ratio:.2f} |", flush=True)


def save(folder: Path) -> None:
    tokenizer = make_tokenizer(task_alphabet(PolicyConfig().task))
    model = big_model()  # of more tokens than the tokenizer knows: hardly any response ends early
    model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build(folder: Path, quant: str, steps: int, length: int) -> Components:
    tree = {
        "out": str(folder / "unused"),
        "steps": steps + 1,
        "model": {"path": str(folder / "model")},
        "task": {"kind": "chain", "ops": 1},
        "rollout": {
            "prompts_per_step": 2,
            "group_size": 8,
            "sampling": {"max_tokens": length},
            "quant": quant,
        },
        "replay": {"mode": "r3"},
        "correction": {"preset": "tis"},
        "eval": {"every": 0},
        "log": {"tensorboard": False, "report": False, "counterfactual_every": 0},
        "train": {"threads": 1},
    }
    parts, _ = build_components(resolve(tree, []))
    return parts


if __name__ == "__main__":
    main()
