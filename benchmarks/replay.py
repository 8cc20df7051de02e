"""The cost of replay and recording, in one run: forward + backward with replay against without, in
interleaved pairs.

    python benchmarks/replay.py                         # 8, 32, 128 experts and 210M parameters
    python benchmarks/replay.py --models 32 --compiled  # torch.compile (see docs/costs.md)
    python benchmarks/replay.py --models --recording    # share of the engine's rollout time
    python benchmarks/replay.py --check                 # a forward with and without the check

Replayed are the model's own routes, so both sides do the same arithmetic and the ratio is the cost
of replay: opening the context, checking the trace, answering the top-k (which saves sorting the
scores). A ratio is the median over pairs with a 95% bootstrap interval. One thread is timed in CPU
seconds too, which other processes disturb less. `kept` is the memory that autograd keeps for the
backward.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from engine import build_model, engine_runner
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from onepolicy.config import HFEngineConfig
from onepolicy.config.policy import PolicyConfig
from onepolicy.divergence.routing import routing_agreement
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay import Routers, bind_routers
from onepolicy.replay.sample_checks import PlannedCheck, SampleChecks
from onepolicy.replay.topk_hook import TopkReplayer
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.tiny.model import make_model
from onepolicy.train.forward import forward
from onepolicy.train.pack import pack
from onepolicy.types import Group, RoutingTrace, Sample, TokenBatch, TraceOrigin

CLOCKS = {"wall": time.perf_counter, "CPU": time.process_time}
Times = dict[str, list[float]]
CHECK_CALLS = (  # all that a checked replay runs and another does not
    (SampleChecks, "plan"),
    (PlannedCheck, "prepare"),
    (PlannedCheck, "__call__"),
    (TopkReplayer, "_compare"),
)


def build(name: str) -> PreTrainedModel:
    """Build the tiny policy with `name` experts of which 4 run, or "large": 8 layers of 64 experts,
    210M parameters."""
    if name != "large":
        return make_model(PolicyConfig(experts=int(name)), 32).eval()
    torch.manual_seed(0)
    size = {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    experts = {
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=1024, head_dim=64, **size, **experts)
    ).eval()


def samples(count: int, length: int) -> TokenBatch:
    slots = torch.ones(length, dtype=torch.bool)
    blank = torch.zeros(length, dtype=torch.int32)
    made = [
        Sample(
            torch.randint(3, 32, (length + 1,)).int(),
            slots,
            -slots.float(),
            blank,
            blank,
            1.0,
            0.0,
            "stop",
            outcome=0.0,
        )
        for _ in range(count)
    ]
    return pack([Group(0, tuple(made))])


def loss_of(model: PreTrainedModel, batch: TokenBatch, *, compiled: bool) -> Callable[[], Tensor]:
    """Return the loss of a training forward: packed with our functions; compiled: the stock model
    on [S, T] tokens, one graph."""
    if not compiled:
        prepare_for_training(model, torch.device("cpu"))
        return lambda: -forward(model, batch).logp.sum()
    model.set_experts_implementation("batched_mm")
    whole = torch.compile(model)
    ids = batch.input_ids.view(batch.num_samples, -1)
    return lambda: (
        whole(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)[..., 5].sum()
    )


def pairs_of(
    first: Callable[[], None], second: Callable[[], None], count: int
) -> tuple[Times, Times]:
    """Return the seconds of both by every clock. The first of the two alternates. Two pairs of
    warm-up do not count."""
    times: tuple[Times, Times] = ({name: [] for name in CLOCKS}, {name: [] for name in CLOCKS})
    for pair in range(-2, count):
        for which, run in sorted(enumerate((first, second)), reverse=bool(pair % 2)):
            begun = {name: clock() for name, clock in CLOCKS.items()}
            run()
            if pair >= 0:
                for name, clock in CLOCKS.items():
                    times[which][name].append(clock() - begun[name])
    return times


def ratio(above: list[float], below: list[float], digits: int = 3) -> str:
    """Return the median of the pairs' ratios, and its 95% bootstrap interval."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    low, high = medians[49], medians[1949]
    return f"{statistics.median(ratios):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def kept(run: Callable[[], Tensor]) -> int:
    """Return the bytes of the distinct storages that autograd keeps between forward and
    backward."""
    storages: dict[int, int] = {}

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        loss = run()
    del loss
    return sum(storages.values())


def measure_replay(name: str, args: argparse.Namespace) -> list[str]:
    model, batch = build(name), samples(args.samples, args.length)
    routers, loss = bind_routers(model), loss_of(model, batch, compiled=args.compiled)
    trace = own_routes(model, routers, loss)

    def step(routes: RoutingTrace | None) -> None:
        model.zero_grad(set_to_none=True)
        with nullcontext() if routes is None else routers.replay(routes, check=False):
            value = loss()
        value.backward()

    def replayed() -> Tensor:
        with routers.replay(trace, check=False):
            return loss()

    on, off = pairs_of(lambda: step(trace), lambda: step(None), args.pairs)
    extra = "-" if args.compiled else f"{kept(replayed) - kept(loss)} B"
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    return [
        f"{routers.num_experts} experts, {millions:.1f}M",
        f"{statistics.median(off['wall']) * 1e3:.0f} ms",
        ratio(on["wall"], off["wall"]),
        ratio(on["CPU"], off["CPU"]) if args.threads == 1 else "-",
        f"{trace.ids.numel() * trace.ids.element_size() / len(trace):.0f} = "
        f"{len(routers.layers)} x {routers.top_k}",
        extra,
    ]


def measure_check(name: str, args: argparse.Namespace) -> list[str]:
    """Time forwards alone, with the check that `replay()` makes by default and without it.

    Replayed are the routes of a bfloat16 copy, because routes that differ nowhere cost less. The
    ratio of two forwards is as wide as their noise; the check's own calls are timed inside the
    checked forward too, where that noise is on both sides of one fraction.
    """
    model, batch = build(name), samples(args.samples, args.length)
    routers, loss = bind_routers(model), loss_of(model, batch, compiled=False)
    starts = tuple(batch.cu_seqlens.tolist()[:-1])
    rounded = build(name).bfloat16()
    rounded.load_state_dict(model.state_dict())
    trace = own_routes(rounded, bind_routers(rounded), loss_of(rounded, batch, compiled=False))
    trace = trace.with_origin(TraceOrigin(starts))
    agreement = routing_agreement(trace, own_routes(model, routers, loss))

    def run(check: bool) -> None:
        with torch.no_grad(), routers.replay(trace, check=check):
            loss()

    on, off = pairs_of(lambda: run(True), lambda: run(False), args.pairs)
    clock = "CPU" if args.threads == 1 else "wall"
    with timed_check(CLOCKS[clock]) as inside:
        checked, own = [], []
        for _ in range(args.pairs):
            inside.clear()
            begun = CLOCKS[clock]()
            run(True)
            checked.append(CLOCKS[clock]() - begun)
            own.append(sum(inside))
    rest = [whole - part for whole, part in zip(checked, own, strict=True)]
    return [
        f"{routers.num_experts} experts, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M",
        f"{float(agreement.mean()):.2%}",
        f"{statistics.median(off[clock]) * 1e3:.0f} ms",
        ratio(on[clock], off[clock]),
        ratio(own, rest, digits=4),
    ]


@contextmanager
def timed_check(clock: Callable[[], float]) -> Iterator[list[float]]:
    """Yield a list to which every outermost call of the check appends its seconds."""
    seconds: list[float] = []
    depth = [0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            begun = clock()
            try:
                return call(*args, **kwargs)
            finally:
                depth[0] -= 1
                if depth[0] == 0:
                    seconds.append(clock() - begun)

        return run

    with ExitStack() as patches:
        for owner, name in CHECK_CALLS:
            call = vars(owner)[name]
            patches.enter_context(patch.object(owner, name, timed(call)))
        yield seconds


def own_routes(
    model: PreTrainedModel, routers: Routers, loss: Callable[[], Tensor]
) -> RoutingTrace:
    with torch.no_grad(), routers.record() as tape:
        loss()
    return tape.trace()


def measure_recording(batch: int, args: argparse.Namespace) -> list[str]:
    prompts = torch.randint(3, 32, (batch, 26))
    config = HFEngineConfig(dtype="float32", max_num_seqs=batch)
    runs = [
        engine_runner(
            HFEngine(build_model(), config, return_routes=record, max_len=101), prompts, 75
        )
        for record in (True, False)
    ]
    on, off = pairs_of(runs[0], runs[1], args.pairs)
    cpu = ratio(on["CPU"], off["CPU"]) if args.threads == 1 else "-"
    return [
        str(batch),
        f"{statistics.median(off['wall']):.2f} s",
        ratio(on["wall"], off["wall"]),
        cpu,
    ]


def add(table: Table, row: list[str]) -> None:
    print(*row, sep=", ", flush=True)
    table.add_row(*row)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="*", default=["8", "32", "128", "large"], help="experts, or 'large'"
    )
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument(
        "--check", action="store_true", help="measure the check of every forward instead"
    )
    parser.add_argument("--recording", action="store_true", help="measure the embedded engine too")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[16, 64], help="sequences decoded together"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.check:
        table = Table(
            title=f"forward, {args.samples} x {args.length} tokens, {args.threads} thread(s)"
        )
        for column in ("model", "routes agree", "not checked", "checked / not", "own calls / rest"):
            table.add_column(column, justify="right")
        for name in args.models:
            add(table, measure_check(name, args))
        return Console(width=150).print(table)
    how = "compiled" if args.compiled else "eager"
    table = Table(
        title=f"forward + backward, {args.samples} x {args.length} tokens, "
        f"{args.threads} thread(s), {how}"
    )
    for column in (
        "model",
        "plain",
        "replay / plain, wall",
        "the same, CPU",
        "ids, bytes per token",
        "kept, replay - plain",
    ):
        table.add_column(column, justify="right")
    for name in args.models:
        add(table, measure_replay(name, args))
    if args.models:
        Console(width=150).print(table)
    if args.recording:
        table = Table(title=f"embedded engine, 26 + 75 tokens, float32, {args.threads} thread(s)")
        for column in ("batch", "not recording", "recording / not, wall", "the same, CPU"):
            table.add_column(column, justify="right")
        for batch in args.batches:
            add(table, measure_recording(batch, args))
        Console(width=150).print(table)


if __name__ == "__main__":
    main()
