"""What each hand-made CPU kernel saves: the quickstart's step and the engine with and without it.

    python benchmarks/cpu_kernels.py list                    # kernels, their lines, their switches
    python benchmarks/cpu_kernels.py measure                 # 20 pairs of every kernel and workload
    python benchmarks/cpu_kernels.py measure --kernels rotary plain_layers+rotary --pairs 40
    python benchmarks/cpu_kernels.py report

Two runs stand side by side in one process, one of them without the kernel, and take turns: with,
without, without, with. They learn at a rate of 1e-9, so both sample with the same weights from
first to last. A pair is one line of --out (JSON), and an interrupted measurement goes on after its
last line. Seconds are CPU seconds of one thread. The ratio is without / with: above 1 the kernel
saves time. Its interval holds the median with 95% (order statistics, no distribution assumed; from
6 pairs on).

Workloads: `step` is the quickstart's (96 samples of about 75 tokens), `engine` samples 96 x 75
tokens with a policy of that size, `vocabulary` 16 x 16 tokens of 151,936.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engine import build_model, engine_runner
from rich.console import Console
from rich.table import Table
from step_ours import Options, Ours

import onepolicy
from onepolicy.config import HFEngineConfig
from onepolicy.models.load import DTYPES
from onepolicy.rollout.hf.engine import HFEngine

SOURCE = Path(onepolicy.__file__).parent
VOCABULARY = 151_936
SAMPLES, PROMPT, NEW = 96, 26, 75
Run = Callable[[], object]


def nothing(*_: Any, **__: Any) -> None:
    """Stand in for a function that switches a kernel on."""


def never(*_: Any, **__: Any) -> bool:
    return False


def transformers_experts(model: Any, device: torch.device) -> None:
    model.set_experts_implementation("grouped_mm")


@dataclass(frozen=True)
class Kernel:
    """A hand-made kernel, and how it is left out."""

    files: tuple[str, ...]  # that would go with it, below onepolicy/
    workloads: tuple[str, ...]  # in which it is used
    instead: dict[str, Any]  # name below onepolicy -> stand-in
    switch: str  # where it is switched on

    @property
    def lines(self) -> int:
        return sum(len((SOURCE / file).read_text().splitlines()) for file in self.files)


KERNELS = {
    "plain_layers": Kernel(
        ("rollout/hf/plain_layers.py", "rollout/hf/plain_layer.py"),
        ("step", "engine"),
        {"rollout.hf.plain_layers.use_plain_layers": nothing},
        "rollout/hf/prepare.py _decode_by_functions",
    ),
    "rotary": Kernel(
        ("models/rotary.py",),
        ("step",),
        {"models.rotary.use_few_passes": nothing},
        "models/prepare.py, train/dry_run.py",
    ),
    "rms_norm": Kernel(
        ("models/rms_norm.py", "models/few_passes.py"),  # the fused part, for a GPU, stays
        ("step",),
        {"models.rms_norm.use_few_passes": nothing},
        "models/prepare.py, train/dry_run.py",
    ),
    "linear": Kernel(
        ("models/linear.py",),
        ("step", "engine"),
        {"models.linear.prefers_onednn": never},
        "models/prepare.py, rollout/hf/engine.py; models/experts.py multiplies with it",
    ),
    "experts": Kernel(
        ("models/experts.py",),
        ("step",),
        {"models.experts.NAME": "grouped_mm"},
        "models/prepare.py; invariant/experts.py computes with its projections",
    ),
    "decode_experts": Kernel(
        ("models/decode_experts.py",),
        ("step", "engine"),
        {
            "models.decode_experts.use_decode_experts": transformers_experts,
            "rollout.hf.plain_layer._plain_experts": nothing,
        },
        "rollout/hf/engine.py; plain_layers and invariant/experts.py compute with it",
    ),
    "experts_by_rows": Kernel(
        (),  # a part of decode_experts
        ("step", "engine"),
        {"models.decode_experts.MAX_BY_ROWS_COST": -1},
        "models/decode_experts.py weighted_experts",
    ),
    "slow_bfloat16": Kernel(
        (),
        ("step", "engine"),
        {"models.decode_experts.has_slow_bfloat16": never},
        "models/decode_experts.py weighted_experts",
    ),
    "table_attention": Kernel(
        ("models/embedding_bag_matmul.py",),  # and 130 lines of decode_attention
        ("step", "engine"),
        {"models.decode_attention.reads_as_table": never},
        "models/decode_attention.py kv_cache_attention; invariant/attention.py reads so too",
    ),
    "shared_prompts": Kernel(
        ("train/shared_prompts.py",),
        ("step",),
        {"train.shared_prompts.can_share": never},
        "train/scorer.py; train.share_prompts=false turns it off too",
    ),
    "large_vocabulary": Kernel(
        (),  # 25 lines of rollout/hf/sampler.py
        ("vocabulary",),
        {"rollout.hf.sampler.LARGE_VOCABULARY": math.inf},
        "rollout/hf/sampler.py _invert_cdf, from 8192 tokens",
    ),
}


@contextmanager
def without(names: str) -> Iterator[None]:
    """Leave out the kernels `a+b` inside the context, as runs are built and as they compute."""
    with ExitStack() as stack:
        for name in filter(None, names.split("+")):
            for target, stand_in in KERNELS[name].instead.items():
                stack.enter_context(mock.patch(f"onepolicy.{target}", stand_in))
        yield


def build_step(model: str, dtype: str, folder: str) -> Run:
    settings = ["optim.lr=1e-9", "optim.warmup_steps=0"]
    options = Options(model, f"{PROMPT}+{NEW}", 10**6, 1, dtype, settings, SAMPLES // 8)
    run = Ours(options, folder)
    return run.step


def build_engine(dtype: str, vocabulary: int, samples: int, new: int) -> Run:
    """Return a function that samples from a new engine. vocabulary: tokens of its head."""
    model = build_model()
    if vocabulary != model.config.vocab_size:
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
    config = HFEngineConfig(dtype=dtype, max_num_seqs=samples)
    engine = HFEngine(model.to(DTYPES[dtype]), config, return_routes=True, max_len=PROMPT + new)
    torch.manual_seed(0)
    return engine_runner(engine, torch.randint(3, 32, (samples, PROMPT)), new)


def build(workload: str, args: argparse.Namespace, folder: str) -> Run:
    if workload == "step":
        return build_step(args.model, args.dtype, folder)
    if workload == "engine":
        return build_engine(args.dtype, 32, SAMPLES, NEW)
    return build_engine(args.dtype, VOCABULARY, 16, 16)


def seconds(run: Run, names: str) -> float:
    gc.collect()
    with without(names):
        begun = time.process_time()
        run()
        return time.process_time() - begun


def pairs(
    workload: str, names: str, args: argparse.Namespace, *, first: int
) -> Iterator[list[float]]:
    """Yield CPU seconds [with, without] of the pairs from `first` on."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for removed in ("", names):
            with without(removed):
                runs[removed] = build(workload, args, folder)
            seconds(runs[removed], removed)  # not counted: first calls compile and allocate
        for number in range(first, args.pairs):
            order = ["", names] if number % 2 == 0 else [names, ""]
            found = {removed: seconds(runs[removed], removed) for removed in order}
            yield [found[""], found[names]]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the pairs of a file. A last line that was cut off is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def append(path: Path, row: dict[str, Any]) -> None:
    text = json.dumps(row) + "\n"
    if path.exists() and not path.read_text().endswith("\n"):
        text = f"\n{text}"  # after a line that was cut off
    with path.open("a") as file:
        file.write(text)


def measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for workload, names in itertools.product(args.workloads, args.kernels):
        kernels = [KERNELS[name] for name in names.split("+")]
        if not any(workload in kernel.workloads for kernel in kernels):
            continue
        about = {"workload": workload, "kernel": names, "dtype": args.dtype}
        done = sum(row.items() >= about.items() for row in read(args.out))
        if done >= args.pairs:
            continue
        for given, left_out in pairs(workload, names, args, first=done):
            append(args.out, about | {"with": given, "without": left_out})
            print(f"{workload} {names}: {given:.3f} s with, {left_out:.3f} s without", flush=True)


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return the narrowest pair of order statistics between which the median is with 95%."""
    ordered, n = sorted(values), len(values)
    outside, k = 0.5**n, 0  # of more than n - k - 1 values on one side of the median
    while k + 1 < n / 2 and 2 * (outside + math.comb(n, k + 1) * 0.5**n) <= 0.05:
        k += 1
        outside += math.comb(n, k) * 0.5**n
    return ordered[k], ordered[n - 1 - k]


def report(args: argparse.Namespace) -> None:
    """Print one row a kernel and workload."""
    table = Table(title="CPU seconds without / with each kernel")
    for name in ("workload", "dtype", "without", "lines", "pairs", "with [s]", "ratio", "interval"):
        table.add_column(name, justify="right")
    key = ("workload", "dtype", "kernel")
    rows = sorted(read(args.out), key=lambda row: [row[name] for name in key])
    for (workload, dtype, names), group in itertools.groupby(
        rows, lambda row: tuple(row[name] for name in key)
    ):
        found = list(group)
        ratios = [row["without"] / row["with"] for row in found]
        low, high = median_interval(ratios)
        given = statistics.median(row["with"] for row in found)
        lines = sum(KERNELS[name].lines for name in names.split("+"))
        table.add_row(
            workload,
            dtype,
            names,
            str(lines),
            str(len(found)),
            f"{given:.2f}",
            f"{statistics.median(ratios):.3f}",
            f"{low:.3f} to {high:.3f}",
        )
    Console().print(table)


def list_kernels(_: argparse.Namespace) -> None:
    for name, kernel in KERNELS.items():
        print(f"{name} ({kernel.lines} lines; {', '.join(kernel.workloads)}): {kernel.switch}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {"list": list_kernels, "measure": measure, "report": report}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--model", default="tiny", help="policy folder (default: make-policy's)")
    parser.add_argument("--kernels", nargs="+", default=[*KERNELS, "+".join(KERNELS)])
    workloads = ["step", "engine", "vocabulary"]
    parser.add_argument("--workloads", nargs="+", default=workloads, choices=workloads)
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES), help="of rollouts")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("cpu_kernels.jsonl"))
    args = parser.parse_args()
    commands[args.command](args)


if __name__ == "__main__":
    main()
