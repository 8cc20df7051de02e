"""Replay rules of other projects beside ours, on the same tiny models and rollouts:
docs/data/comparison.json.

    python benchmarks/comparison.py            # prints the tables
    python benchmarks/comparison.py --write    # and writes them into docs/data/comparison.json

Every rule is our own few lines from the project's source or paper. No other project is run or
copied.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from doc_tables import Number, replace_rows
from torch import Tensor
from transformers import PreTrainedModel

import onepolicy as op
from onepolicy.replay import Routers
from onepolicy.replay.topk_hook import override_attribute
from onepolicy.types import RoutingTrace

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.families import TABLE  # noqa: E402

MODELS = {
    "Qwen3-MoE": ("qwen3_moe", {"norm_topk_prob": True}),  # layer 1 of 3 dense
    "Qwen2-MoE": (
        "qwen2_moe",
        {"norm_topk_prob": False, "use_sliding_window": False},
    ),  # every second layer
    "OLMoE": ("olmoe", {"norm_topk_prob": False}),
    "GLM-4.5": ("glm4_moe", {"norm_topk_prob": True}),  # sigmoid, layer 0 dense
    "DeepSeek-V3": ("deepseek_v3", {"norm_topk_prob": True}),  # sigmoid, groups, layer 0 dense
    "gpt-oss": ("gpt_oss", {}),  # softmax of the selected logits
}
MISSING = 0.05  # share of rows that an engine did not capture, for the rules about those


@dataclass(frozen=True)
class Rollout:
    tokens: Tensor  # [B, S] int64
    logp: Tensor  # [B * (S - 1)] float32, of the bf16 engine
    trace: RoutingTrace  # B * (S - 1) rows


@dataclass(frozen=True)
class Result:
    k3: float
    max_dlogp: float
    wrong: float  # share of routes whose experts are not the rollout's


Rule = Callable[[PreTrainedModel, Routers, Rollout], AbstractContextManager]


def ours(model: PreTrainedModel, routers: Routers, rollout: Rollout) -> AbstractContextManager:
    return routers.replay(rollout.trace, check=False)


def off(model: PreTrainedModel, routers: Routers, rollout: Rollout) -> AbstractContextManager:
    return nullcontext()


def layers_in_order(
    model: PreTrainedModel, routers: Routers, rollout: Rollout
) -> AbstractContextManager:
    """Let the i-th MoE block take entry i of an axis of all decoder layers, whose dense entries are
    zero."""
    trace = rollout.trace
    whole = trace.ids.new_zeros(len(trace), model.config.num_hidden_layers, trace.top_k)
    whole[:, list(trace.layers)] = trace.ids
    return _unchecked(routers, whole[:, : len(trace.layers)])


def zero_fill(model: PreTrainedModel, routers: Routers, rollout: Rollout) -> AbstractContextManager:
    """Give rows that were not captured expert 0, K times."""
    return _unchecked(routers, rollout.trace.ids.masked_fill(_missing(rollout)[:, None, None], 0))


def first_experts(
    model: PreTrainedModel, routers: Routers, rollout: Rollout
) -> AbstractContextManager:
    """Give rows that were not captured experts 0..K-1."""
    filler = torch.arange(rollout.trace.top_k, dtype=rollout.trace.ids.dtype)
    return _unchecked(
        routers, torch.where(_missing(rollout)[:, None, None], filler, rollout.trace.ids)
    )


def own_choice(
    model: PreTrainedModel, routers: Routers, rollout: Rollout
) -> AbstractContextManager:
    """Let the trainer route rows that were not captured: onepolicy's valid=False."""
    ids, layers, experts = rollout.trace.ids, rollout.trace.layers, rollout.trace.num_experts
    return routers.replay(RoutingTrace(ids, ~_missing(rollout), layers, experts), check=False)


def softmax_of_all(
    model: PreTrainedModel, routers: Routers, rollout: Rollout
) -> AbstractContextManager:
    """Weigh by the softmax over all experts at the recorded ids, normalised if the config sets
    it."""
    normalise = getattr(model.config, "norm_topk_prob", False)

    def weigh(logits: Tensor, ids: Tensor) -> Tensor:
        picked = logits.softmax(-1).gather(-1, ids)
        return picked / picked.sum(-1, keepdim=True) if normalise else picked

    return _weighed(routers, rollout.trace, weigh)


def softmax_of_selected(
    model: PreTrainedModel, routers: Routers, rollout: Rollout
) -> AbstractContextManager:
    """Weigh by the R3 paper's equation (8) to the letter: the softmax over the recorded experts'
    logits."""
    return _weighed(routers, rollout.trace, lambda logits, ids: logits.gather(-1, ids).softmax(-1))


RULES: dict[str, Rule] = {
    "no replay": off,
    "onepolicy": ours,
    "layers by order, not by index": layers_in_order,
    "softmax of all logits": softmax_of_all,
    "softmax of the selected (eq. 8)": softmax_of_selected,
    "5% missing: onepolicy (own choice)": own_choice,
    "5% missing: experts 0..K-1": first_experts,
    "5% missing: expert 0 K times": zero_fill,
}


def _missing(rollout: Rollout) -> Tensor:
    return torch.rand(len(rollout.trace), generator=torch.Generator().manual_seed(5)) < MISSING


@contextmanager
def _unchecked(routers: Routers, ids: Tensor) -> Iterator[None]:
    """Replay traces that our check would refuse."""
    trace = RoutingTrace(
        ids, torch.ones(len(ids), dtype=torch.bool), routers.layers, routers.num_experts
    )
    with routers.replay_known(trace):
        yield


def _weighed(
    routers: Routers, trace: RoutingTrace, weigh: Callable[[Tensor, Tensor], Tensor]
) -> AbstractContextManager:
    """Let routers return (logits, weigh(logits, ids), ids) for the recorded ids."""

    def standing_in(forward: Callable, ids: Tensor) -> Callable:
        def route(*args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = forward(*args)[0].float()
            return logits, weigh(logits, ids), ids

        return route

    modules = [router.module for router in routers._routers]
    columns = trace.ids.long().unbind(1)
    return override_attribute(
        "forward",
        [(m, standing_in(m.forward, ids)) for m, ids in zip(modules, columns, strict=True)],
    )


def build(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Build the trainer in float32, and its copy in bfloat16 that represents the rollout engine."""
    family, changes = MODELS[name]
    trainer, engine = (
        TABLE[family].model(dtype=dtype, **changes).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    engine.load_state_dict(trainer.state_dict())
    return trainer, engine


def logp(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].flatten()


def roll_out(engine: PreTrainedModel, samples: int, length: int) -> Rollout:
    """Sample tokens with the engine, so that k3 estimates KL(rollout || trainer)."""
    torch.manual_seed(3)
    tokens = torch.randint(2, 60, (samples, 1))
    for _ in range(length - 1):
        logits = engine(input_ids=tokens, use_cache=False).logits[:, -1].float()
        tokens = torch.cat([tokens, logits.softmax(-1).multinomial(1)], 1)
    with op.bind_routers(engine).record() as tape:
        logps = logp(engine, tokens)
    return Rollout(tokens, logps, tape.trace())


@contextmanager
def experts_used(routers: Routers) -> Iterator[list[Tensor]]:
    """Return [rows, K] ids that left each router, in layer order."""
    seen: list[Tensor] = []
    hooks = [
        r.module.register_forward_hook(lambda _, __, out: seen.append(out[2]))
        for r in routers._routers
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def measure(trainer: PreTrainedModel, rollout: Rollout, rule: Rule) -> Result:
    routers = op.bind_routers(trainer)
    with rule(trainer, routers, rollout), experts_used(routers) as used:
        logps = logp(trainer, rollout.tokens)
    found = op.mismatch(logps, rollout.logp, torch.ones_like(logps, dtype=torch.bool))
    recorded = rollout.trace.ids.long().unbind(1)
    wrong = [
        (a.sort(-1).values != b.sort(-1).values).any(-1)
        for a, b in zip(used, recorded, strict=True)
    ]
    return Result(found.k3, found.max_dlogp, torch.stack(wrong).float().mean().item())


def compare(name: str, *, samples: int = 32, length: int = 48) -> dict[str, Result]:
    with torch.no_grad():
        trainer, engine = build(name)
        rollout = roll_out(engine, samples, length)
        return {rule: measure(trainer, rollout, replay) for rule, replay in RULES.items()}


def tables() -> dict[str, list[list[str]]]:
    """Return the rows of every table of the page, a column for each model."""
    columns = [compare(name) for name in MODELS]
    found: dict[str, list[list[str]]] = {"k3": [], "max-dlogp": [], "routers-wrong": []}
    for rule in RULES:
        of_rule = [results[rule] for results in columns]
        found["k3"].append([rule, *(scientific(r.k3) for r in of_rule)])
        found["max-dlogp"].append([rule, *(Number(f"{r.max_dlogp:.2f}") for r in of_rule)])
        found["routers-wrong"].append([rule, *(Number(f"{100 * r.wrong:.1f}") for r in of_rule)])
    return found


def scientific(value: float) -> Number:
    """Return two digits and an exponent without leading zeros."""
    digits, exponent = f"{value:.1e}".split("e")
    return Number(f"{digits}e{int(exponent)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="replace the tables in docs/data/comparison.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    for table_id, rows in tables().items():
        print(f"\n{table_id}: {', '.join(MODELS)}", *map(" | ".join, rows), sep="\n")
        if args.write:
            replace_rows("comparison", table_id, rows)


if __name__ == "__main__":
    main()
