"""The cost of the alignment detector, and the agreement of real routes.

These are numbers of docs/costs.md and docs/replay.md.

    python benchmarks/detector.py cost --model tiny        # the parts of a replayed forward
    python benchmarks/detector.py cost --experts 64        # a random MoE of about 200M parameters
    python benchmarks/detector.py agreement --model tiny   # bf16 engine, fp32 trainer
    python benchmarks/detector.py agreement --kind vllm    # the same with routes of vLLM

`cost` counts CPU seconds, runs all variants in every round and prints medians of the ratios within
a round with their 95% bootstrap intervals.
"""

import argparse
import asyncio
import dataclasses
import itertools
import os
import random
import statistics
import time


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["cost", "agreement"])
    parser.add_argument(
        "--model",
        help="policy folder, or tiny (the one make-policy made); cost: a random MoE if unset",
    )
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=1, help="agreement: clean batches")
    parser.add_argument("--engine", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--kind", default="hf", choices=["hf", "vllm"], help="agreement: rollout.engine.kind"
    )
    parser.add_argument(
        "--quantise", choices=["int8", "int4", "fp8"], help="agreement: round the engine's weights"
    )
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


args = arguments()
os.environ.update(OMP_NUM_THREADS=str(args.threads), OMP_WAIT_POLICY="passive")

import torch  # noqa: E402
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402

from onepolicy import bind_routers  # noqa: E402
from onepolicy.build.components import build_components  # noqa: E402
from onepolicy.config import ModelConfig, resolve  # noqa: E402
from onepolicy.config.input_files import resolve_model  # noqa: E402
from onepolicy.divergence.routing import routing_agreement  # noqa: E402
from onepolicy.models.buckets import BucketedPacking  # noqa: E402
from onepolicy.models.load import load_model  # noqa: E402
from onepolicy.models.prepare import prepare_for_training  # noqa: E402
from onepolicy.objective.advantages import compute_outcomes  # noqa: E402
from onepolicy.replay.alignment import check_alignment  # noqa: E402
from onepolicy.replay.checks import RoutingError  # noqa: E402
from onepolicy.replay.windows import window_starts  # noqa: E402
from onepolicy.rollout.collect import collect_rollouts  # noqa: E402
from onepolicy.run.step_metrics import mismatch_metrics  # noqa: E402
from onepolicy.sync.push import push_weights  # noqa: E402
from onepolicy.train.pack import pack  # noqa: E402

# plain; replay: routes replayed; native: and the router's own choice and gate mass kept; detector:
# and compared
WAYS = ("plain", "replay", "native", "detector")


def random_moe(experts: int):
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_experts=experts,
            num_experts_per_tok=8,
            moe_intermediate_size=max(8, 16384 // experts),
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
        )
    ).eval()


def cost() -> None:
    cpu = torch.device("cpu")
    if args.model:
        model = load_model(resolve_model(ModelConfig(path=args.model)), torch.float32, cpu).eval()
    else:
        model = random_moe(args.experts)
    prepare_for_training(model, cpu)
    routers = bind_routers(model)
    length = 128
    bounds = torch.arange(0, args.tokens + 1, length)
    packed = {
        "input_ids": torch.randint(3, model.config.vocab_size, (1, args.tokens)),
        "position_ids": torch.arange(length).repeat(args.tokens // length)[None],
        "packing": BucketedPacking.of(bounds.int(), cpu),
        "use_cache": False,
    }

    def forward(trace, how: str) -> float:
        begun = time.process_time()
        if how == "plain":
            model.model(**packed)  # the vocabulary projection is no part of the MoE forward
        else:
            with routers.replay(trace, native=how != "replay", check=False) as replayed:
                model.model(**packed)
            if how == "detector":
                replayed.check_alignment(bounds)
        return time.process_time() - begun

    with torch.no_grad():
        with routers.record() as tape:
            model.model(**packed)
        trace = tape.trace()
        rounds = []
        for _ in range(args.rounds + 1):
            order = random.sample(WAYS, k=len(WAYS))
            rounds.append({how: forward(trace, how) for how in order})
        del rounds[0]  # warm-up
    plain = statistics.median(r["plain"] for r in rounds)
    print(
        f"{model.num_parameters() / 1e6:.1f}M parameters, {len(routers.layers)} MoE layers, "
        f"top {routers.top_k} of "
        f"{routers.num_experts}, {args.tokens} tokens: "
        f"plain forward {plain * 1000:.0f} ms of CPU, {args.rounds} rounds"
    )
    for one, other in (
        ("replay", "plain"),
        ("native", "replay"),
        ("detector", "native"),
        ("detector", "plain"),
    ):
        ratios = [r[one] / r[other] for r in rounds]
        draws = sorted(
            statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000)
        )
        print(
            f"{one:8s} / {other:8s} {statistics.median(ratios):.4f} [{draws[50]:.4f}, "
            f"{draws[1949]:.4f}]"
        )


def agreement() -> None:
    recipe = {
        "out": "x",
        "steps": 1,
        "model": {"path": args.model or "tiny"},
        "task": {"kind": "chain"},
        "optim": {"lr": 1e-4},
        "replay": {"min_agreement": 0},
        "rollout": {"prompts_per_step": 6, "group_size": 4, "sampling": {"max_tokens": 100}},
        "train": {"threads": args.threads},
        "log": {"report": False, "tensorboard": False},
    }
    recipe["rollout"]["engine"] = {"kind": args.kind, "dtype": args.engine}
    parts, _ = build_components(resolve(recipe))

    async def play(step: int):
        await push_weights(parts.learner, parts.engine)
        if args.quantise:
            quantise(parts.engine._batch.forward.model)
        cfg = parts.config.rollout
        return await collect_rollouts(
            parts.engine,
            parts.environment,
            cfg,
            parts.sampling,
            step=step,
            seed=0,
            route_spec=parts.route_spec,
        )

    clean, k3 = [], {"replayed": [], "not replayed": []}
    for step in range(args.steps):
        groups, _ = asyncio.run(play(step))
        batch = pack(compute_outcomes(groups, parts.config.objective))
        clean.append(agreements(parts.learner, batch, batch.routing.ids))
        scorer = parts.learner.scorer
        for how, replay in (("replayed", True), ("not replayed", False)):
            k3[how].append(mismatch_metrics(scorer.score(batch, replay=replay))["mismatch/k3"])
    lowest = torch.stack([layers for layers, _ in clean]).amin(0)
    cells = torch.cat([cells for _, cells in clean])
    print(f"{args.steps} batches, {len(cells)} windows")
    show("clean (lowest of all batches)", lowest, cells)
    means = {how: statistics.mean(values) for how, values in k3.items()}
    print(
        f"k3 replayed {means['replayed']:.2e}, not replayed {means['not replayed']:.2e}, lower in "
        f"{sum(a < b for a, b in zip(*k3.values(), strict=True))} of {args.steps} batches"
    )
    ids, bounds = batch.routing.ids, batch.cu_seqlens.tolist()
    swapped = ids.clone()
    n = min(bounds[1], bounds[5] - bounds[4])
    swapped[:n], swapped[bounds[4] : bounds[4] + n] = ids[bounds[4] : bounds[4] + n], ids[:n]
    one_layer = ids.clone()
    one_layer[:, 0] = ids[:, 1]
    wrong = {
        "one row late": ids.roll(1, 0),
        "layers moved": ids.roll(1, 1),
        "samples 0, 4": swapped,
        "layer 0": one_layer,
    }
    for name, changed in wrong.items():
        show(name, *agreements(parts.learner, batch, changed))
        print(f"    {refusal(parts.learner, batch, changed)}")
    equal = (ids[1:] == ids[:-1]).flatten(1).all(1)
    other = equal & (batch.input_ids[1:] != batch.input_ids[:-1])
    print(
        f"adjacent rows with equal routes in all layers: {int(equal.sum())}, "
        f"of other tokens {int(other.sum())}"
    )


def agreements(learner, batch, ids):
    """Return the mean agreement of every layer [L] and of every window of 8 or more rows."""
    scored = learner.score(batch.replace(routing=dataclasses.replace(batch.routing, ids=ids)))
    found = routing_agreement(scored.routing, scored.routing_native)
    starts = [*window_starts(scored.cu_seqlens).tolist(), len(found)]
    cells = torch.stack([found[a:b].mean() for a, b in itertools.pairwise(starts) if b - a >= 8])
    return found.mean(0), cells


def refusal(learner, batch, ids) -> str:
    """Return the detector's error for these routes at its default threshold."""
    scored = learner.score(batch.replace(routing=dataclasses.replace(batch.routing, ids=ids)))
    try:
        check_alignment(scored.routing, scored.routing_native, scored.cu_seqlens)
    except RoutingError as error:
        return f"stopped: {error}"
    return "NOT stopped"


def show(name: str, layers, cells) -> None:
    numbers = ", ".join(f"{x:.3f}" for x in layers.tolist())
    print(f"{name:30s} layers {numbers}; windows {cells.min():.3f} to {cells.max():.3f}")


@torch.no_grad()
def quantise(model) -> None:
    """Round the weights of attention and experts, one scale per row."""
    for name, weight in model.named_parameters():
        if weight.dim() < 2 or "embed" in name or "lm_head" in name or name.endswith("gate.weight"):
            continue
        top = weight.float().abs().amax(-1, keepdim=True)
        if args.quantise == "fp8":
            rounded = (weight.float() / top * 448).to(torch.float8_e4m3fn).float() * top / 448
        else:
            levels = 2 ** (int(args.quantise[3:]) - 1) - 1
            rounded = (weight.float() / top * levels).round() * top / levels
        weight.copy_(rounded.to(weight.dtype))


if __name__ == "__main__":
    cost() if args.what == "cost" else agreement()
