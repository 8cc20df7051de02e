"""What the checks of every replayed sample find, and what they find wrongly.

    python benchmarks/sample_checks.py planted                   # wrong routes in one sample of 20
    python benchmarks/sample_checks.py clean --forwards 10000    # false stops

Random Qwen3-MoE models of 4 layers, a float32 trainer, samples of 80 to 120 tokens. The routes are
those of an engine: a copy of the model in bfloat16, with weights rounded to int8, or with another
choice in a tenth of the routes (`rollout.pressure`).

planted: forwards of 20 samples. Every 20th run begins with a new model and a clean forward. Then
one sample of each forward holds wrong routes in a part of its rows. They come in the payloads of
six engines and trainers, and are wrong in one of five ways. Printed is how many of these forwards
stop, and how many of the clean ones.

clean: forwards of 4 samples, one of them of one repeated token or a short cycle, of which
none should stop.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from onepolicy.config import RoutingPressure
from onepolicy.integrations.core.payload import to_trace
from onepolicy.replay import Routers, RoutingError, bind_routers
from onepolicy.rollout.hf.pressure import Pressure
from onepolicy.types import RoutingTrace

VOCAB, LAYERS = 128, 4
SHORTEST, LONGEST = 80, 120
RUNS_OF_A_MODEL = 20
FORMS = ("vllm", "sglang", "verl", "prime-rl", "slime", "skyrl")
SIZES = (1.0, 0.5, 0.25, 0.1, 0.07, 0.05, 0.03)
PRESSURE = 0.1  # share of routes that choose otherwise


def make_model(seed: int, *, experts: int = 16, top_k: int = 4) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=16,
        initializer_range=0.2,
    )
    return Qwen3MoeForCausalLM(config).eval()


@torch.no_grad()
def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy whose weights are rounded to int8, one scale per row, but for the routers'."""
    engine = copy.deepcopy(model)
    for name, weight in engine.named_parameters():
        if weight.dim() > 1 and not name.endswith("gate.weight"):
            scale = weight.abs().amax(-1, keepdim=True) / 127
            weight.copy_((weight / scale).round() * scale)
    return engine


def pressed(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that chooses otherwise in PRESSURE of its routers."""
    tokens = torch.randint(VOCAB, (8, 64))
    own = routes(model, tokens)
    low, high = 0.0, 2.0
    for _ in range(12):
        engine, scale = copy.deepcopy(model), (low + high) / 2
        Pressure(engine, RoutingPressure(scale=scale)).refresh(0)
        other = (routes(engine, tokens).sort(-1)[0] != own.sort(-1)[0]).any(-1).float().mean()
        low, high = (low, scale) if other > PRESSURE else (scale, high)
    return engine


ENGINES: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "bf16": lambda model: copy.deepcopy(model).to(torch.bfloat16),
    "int8": rounded,
    "pressure": pressed,
}
CLEAN = {
    "bf16, top 4 of 16": ("bf16", 16, 4),
    "int8, top 4 of 16": ("int8", 16, 4),
    "bf16, top 1 of 128": ("bf16", 128, 1),
    "int8, top 1 of 128": ("int8", 128, 1),
    "pressure 10%, top 4 of 16": ("pressure", 16, 4),
    "pressure 10%, top 1 of 128": ("pressure", 128, 1),
}


@torch.no_grad()
def routes(model: PreTrainedModel, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the experts [B, S, L, K] int64 that a model chooses for tokens [B, S]."""
    with bind_routers(model).record() as tape:
        model(input_ids=tokens, attention_mask=mask, use_cache=False, logits_to_keep=1)
    ids = tape.trace().ids.long()
    return ids.view(*tokens.shape, *ids.shape[1:])


@dataclass
class Batch:
    """Samples, padded on the right, without the last token that was sampled."""

    tokens: Tensor  # [B, S]
    mask: Tensor  # [B, S]
    lengths: list[int]

    @classmethod
    def draw(cls, samples: int, generator: torch.Generator, *, odd_every: int = 0) -> Batch:
        """odd_every: every so many samples repeat a cycle of 1 to 4 tokens."""
        lengths = torch.randint(SHORTEST, LONGEST + 1, (samples,), generator=generator).tolist()
        tokens = torch.randint(VOCAB, (samples, max(lengths)), generator=generator)
        for sample in range(0, samples, odd_every or samples + 1):
            cycle = int(torch.randint(1, 5, (), generator=generator))
            if odd_every:
                tokens[sample] = tokens[sample, :cycle].repeat(max(lengths))[: max(lengths)]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        return cls(tokens, mask.long(), lengths)


class Trainer:
    """A trainer's model that replays what an engine returned, one engine for all forwards."""

    def __init__(self, kind: str, experts: int, top_k: int, seed: int) -> None:
        self.model = make_model(seed, experts=experts, top_k=top_k)
        self.engine = ENGINES[kind](self.model)
        self.routers: Routers = bind_routers(self.model)

    def captured(self, batch: Batch) -> list[Tensor]:
        """Return each sample's routes [n, L, K], as the engine returns them."""
        found = routes(self.engine, batch.tokens, batch.mask)
        return [ids[:length] for ids, length in zip(found, batch.lengths, strict=True)]

    @torch.no_grad()
    def replay(self, batch: Batch, traces: list[RoutingTrace]) -> str:
        """Run a forward. Return the error that stopped it, "" for none."""
        packed = torch.cat([t[:n] for t, n in zip(batch.tokens, batch.lengths, strict=True)])
        positions = torch.cat([torch.arange(n) for n in batch.lengths])
        try:
            with self.routers.replay(RoutingTrace.concat(traces)):
                self.model(
                    input_ids=packed[None],
                    position_ids=positions[None],
                    use_cache=False,  # else transformers does not see that samples are packed
                    logits_to_keep=1,
                )
        except RoutingError as error:
            return str(error)
        return ""

    def traces(self, payloads: list[Tensor], form: str) -> list[RoutingTrace]:
        return [
            to_trace(self.routers, in_form(ids, form), tokens=len(ids) + 1, form=form)
            for ids in payloads
        ]


def in_form(ids: Tensor, form: str) -> Any:
    """Return routes [n, L, K] as the payload of an engine or trainer."""
    if form == "verl":
        return torch.cat([ids, torch.zeros_like(ids[:1])]).to(torch.int16)
    if form == "prime-rl":
        data = ids.to(torch.uint8).numpy()
        return {"data": data.tobytes(), "shape": list(data.shape), "dtype": "uint8"}
    if form == "skyrl":
        filler = torch.arange(ids.shape[-1]).expand(1, *ids.shape[1:])
        return torch.cat([ids, filler]).numpy()
    return ids.to(torch.int32).numpy()


def doubled(ids: Tensor, rows: slice, other: Tensor) -> Tensor:
    """A resumed request's routes: the sample begins again."""
    out = ids.clone()
    out[rows] = ids[: rows.stop - rows.start]
    return out


def late(ids: Tensor, rows: slice, other: Tensor) -> Tensor:
    """Each row holds those of the row before."""
    out = ids.clone()
    out[rows] = ids.roll(1, 0)[rows]
    return out


def stale(ids: Tensor, rows: slice, other: Tensor) -> Tensor:
    """Rows that another request left behind."""
    out = ids.clone()
    at = torch.arange(rows.start, rows.stop) % len(other)
    out[rows] = other[at]
    return out


def rebalanced(ids: Tensor, rows: slice, other: Tensor) -> Tensor:
    """Physical ids, once expert rebalancing has moved the experts."""
    out = ids.clone()
    moved = torch.randperm(16, generator=torch.Generator().manual_seed(len(ids)))
    out[rows] = moved[ids[rows]]
    return out


def scattered(ids: Tensor, rows: slice, other: Tensor) -> Tensor:
    """Stale rows, not in one piece."""
    out = ids.clone()
    order = torch.Generator().manual_seed(len(ids))
    at = torch.randperm(len(ids), generator=order)[: rows.stop - rows.start]
    out[at] = other[at % len(other)]
    return out


WRONG = {
    "doubled": doubled,
    "late": late,
    "stale": stale,
    "rebalanced": rebalanced,
    "scattered": scattered,
}


def planted(args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield a row per size of the damage: the runs that stop in the forward it first appears in."""
    yield ["rows that are wrong", *WRONG, "clean forwards stopped"]
    for size in args.sizes:
        tried, found, early = Counter[str](), Counter[str](), 0
        for number in range(args.runs):
            draw = random.Random(f"{size} {number}")
            way, form = list(WRONG)[number % len(WRONG)], FORMS[number % len(FORMS)]
            if number % RUNS_OF_A_MODEL == 0:
                trainer = Trainer("bf16", 16, 4, seed=number)
                early += bool(replay_one(trainer, draw, form, lambda payloads: None))
            spoil = functools.partial(plant, WRONG[way], size, draw)
            tried[way] += 1
            found[way] += bool(replay_one(trainer, draw, form, spoil))
        shares = [f"{found[way]} of {tried[way]}" for way in WRONG]
        yield [f"{size:.0%}", *shares, str(early)]


def replay_one(
    trainer: Trainer, draw: random.Random, form: str, spoil: Callable[[list[Tensor]], None]
) -> str:
    """Replay a batch of 20 samples, whose routes `spoil` changes. Return the error, "" for none."""
    batch = Batch.draw(20, torch.Generator().manual_seed(draw.randrange(2**31)))
    payloads = trainer.captured(batch)
    spoil(payloads)
    return trainer.replay(batch, trainer.traces(payloads, form))


def plant(
    wrong: Callable[[Tensor, slice, Tensor], Tensor],
    size: float,
    draw: random.Random,
    payloads: list[Tensor],
) -> None:
    """Make this share of the rows of one sample wrong, in place."""
    sample = draw.randrange(len(payloads))
    rows = len(payloads[sample])
    count = min(math.ceil(size * rows), rows - 1)
    start = draw.randrange(1, rows - count + 1)
    other = payloads[(sample + 1) % len(payloads)]
    payloads[sample] = wrong(payloads[sample], slice(start, start + count), other)


def clean(args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield a row per kind of engine and model: its false stops."""
    yield ["engine and model", "forwards", "samples", "false stops"]
    each = args.forwards // len(CLEAN)
    for name, (kind, experts, top_k) in CLEAN.items():
        stopped = 0
        generator = torch.Generator().manual_seed(1_000_000 * args.seed + len(name))
        for forward in range(each):
            if forward % 100 == 0:
                trainer = Trainer(kind, experts, top_k, seed=1_000_000 * args.seed + forward)
            batch = Batch.draw(args.samples, generator, odd_every=4)
            traces = trainer.traces(trainer.captured(batch), "slime")
            error = trainer.replay(batch, traces)
            if error:
                stopped += 1
                print(f"{name}, forward {forward}: {error}", file=sys.stderr, flush=True)
        yield [name, str(each), str(each * args.samples), str(stopped)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["planted", "clean"])
    parser.add_argument("--runs", type=int, default=200, help="planted: for each size")
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES)
    parser.add_argument("--forwards", type=int, default=10_000, help="clean: all kinds together")
    parser.add_argument("--samples", type=int, default=4, help="clean: in a forward")
    parser.add_argument("--seed", type=int, default=0, help="clean: of models and tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    works = {"planted": planted, "clean": clean}
    for number, row in enumerate(works[args.what](args)):
        print(f"| {' | '.join(row)} |", flush=True)
        if number == 0:
            print("|" + " --- |" * len(row), flush=True)


if __name__ == "__main__":
    main()
