"""Time per turn against the turn number, in a scripted episode on the embedded engine, with and
without prefix reuse.

    python benchmarks/turns.py                # 200 turns, float32
    python benchmarks/turns.py --turns 100 --dtype bfloat16

Every turn is timed with prefix reuse, and so is its part in the attention function; the rest should
not grow. At every fifth turn the same turn is also timed after its whole past was prefilled in one
piece (a context as long, without turns), and on an engine without prefix reuse. Medians per tenth
of the turns, over all rounds, interleaved in one run. One thread is timed in CPU seconds, so that
waiting for a core does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from engine import build_model
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from onepolicy.config import HFEngineConfig
from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.models.decode_attention import NAME, kv_cache_attention
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.types import Completion, Sampling

PROMPT, EVERY, PARTS = 12, 5, 10
Seconds = dict[str, list[list[float]]]  # what was timed -> of each tenth of the turns


class Clock:
    """CPU seconds of a thread, and those of them spent in the attention function."""

    def __init__(self, threads: int) -> None:
        self.now: Callable[[], float] = time.process_time if threads == 1 else time.perf_counter
        self.attention = 0.0
        AttentionInterface.register(NAME, self._timed)

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        start = self.now()
        out = kv_cache_attention(*args, **kwargs)
        self.attention += self.now() - start
        return out

    async def __call__(
        self, engine: HFEngine, path: Trajectory, new: int, seed: int
    ) -> tuple[Completion, float, float]:
        """Return a turn, its seconds, and those of its attention."""
        asked = Sampling(1.0, new, routes_from=path.first_missing_route)
        self.attention, start = 0.0, self.now()
        done = await engine.generate(path.tokens, asked, seed=seed)
        return done, self.now() - start, self.attention


def build_engine(model: PreTrainedModel, dtype: str, max_len: int, *, reuse: bool) -> HFEngine:
    config = HFEngineConfig(dtype=dtype, max_num_seqs=1, enable_prefix_caching=reuse)
    return HFEngine(copy.deepcopy(model), config, return_routes=True, max_len=max_len)


async def play(
    engines: dict[str, HFEngine], clock: Clock, args: argparse.Namespace, seed: int, out: Seconds
) -> None:
    """Play one episode and time its turns into `out`."""
    draw = random.Random(seed)
    path = Trajectory([draw.randrange(3, 32) for _ in range(PROMPT)])
    await engines["turns"].reset_cache()
    for turn in range(args.turns):
        part = turn * PARTS // args.turns
        request = (path, args.sampled, 1000 * seed + turn)
        done, whole, attention = await clock(engines["turns"], *request)
        out["turns"][part].append(whole)
        out["attention"][part].append(attention)
        out["rest"][part].append(whole - attention)
        out["context"][part].append(len(path.tokens))
        if turn % EVERY == EVERY - 1:
            past = path.tokens[: -args.observed - 1]
            await engines["one piece"].reset_cache()
            await engines["one piece"].generate(past, Sampling(1.0, 1), seed=0)
            for name in ("one piece", "no reuse"):
                out[name][part].append((await clock(engines[name], *request))[1])
        path.append_completion(done)
        path.append_observation([draw.randrange(3, 32) for _ in range(args.observed)])


def report(out: Seconds, args: argparse.Namespace) -> None:
    rows = {name: [statistics.median(values) for values in parts] for name, parts in out.items()}
    table = Table(
        title=f"ms per turn of {args.sampled} sampled and {args.observed} observed tokens, "
        f"{args.dtype}, medians"
    )
    heads = (
        "turns",
        "context",
        "with reuse",
        "its attention",
        "its rest",
        "after one piece",
        "ratio",
        "no reuse",
    )
    for name in heads:
        table.add_column(name, justify="right")
    for i in range(PARTS):
        first, last = i * args.turns // PARTS + 1, (i + 1) * args.turns // PARTS
        turns, alone = rows["turns"][i], rows["one piece"][i]
        names = ("turns", "attention", "rest", "one piece", "no reuse")
        ms = {name: f"{1000 * rows[name][i]:.1f}" for name in names}
        row = [f"{first}-{last}", f"{rows['context'][i]:.0f}", ms["turns"], ms["attention"]]
        row += [ms["rest"], ms["one piece"], f"{turns / alone:.2f}", ms["no reuse"]]
        table.add_row(*row)
    Console(width=120).print(table)
    for name in ("turns", "attention", "rest", "no reuse"):
        first, last = rows[name][0], rows[name][-1]
        print(f"{name}: {1000 * first:.1f} to {1000 * last:.1f} ms, {last / first:.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--sampled", type=int, default=8, help="tokens of a turn")
    parser.add_argument("--observed", type=int, default=12, help="tokens between two turns")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--rounds", type=int, default=3, help="episodes, after one short one to warm up"
    )
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.turns < PARTS * EVERY:
        parser.error(f"--turns: at least {PARTS * EVERY}, or a tenth of them has no fifth turn")
    torch.set_num_threads(args.threads)
    max_len = PROMPT + args.turns * (args.sampled + args.observed)
    model = build_model(max_len)
    model.set_experts_implementation("grouped_mm")
    clock = Clock(args.threads)
    engines = {
        name: build_engine(model, args.dtype, max_len, reuse=name != "no reuse")
        for name in ("turns", "one piece", "no reuse")
    }
    warm = argparse.Namespace(**vars(args) | {"turns": 2 * EVERY})
    asyncio.run(play(engines, clock, warm, 0, defaultdict(lambda: [[] for _ in range(PARTS)])))
    out: Seconds = defaultdict(lambda: [[] for _ in range(PARTS)])
    for seed in range(1, args.rounds + 1):
        asyncio.run(play(engines, clock, args, seed, out))
    report(out, args)


if __name__ == "__main__":
    main()
