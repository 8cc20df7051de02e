"""Mismatch by turn number in scripted episodes of 32 and 100 turns: bfloat16 rollout against
float32 trainer.

The policy samples its turns, and its observations are scripted: after turn n comes the n-th passage
of a chain, whatever the search asked for. So every episode has all its turns. The trainer then
scores the sampled tokens twice, with the rollout's routes and with its own: both scores are of the
same tokens. The policy is that of turn_curves.py, warmed up further on episodes of up to 100 turns,
or (--short) not: then turns from the 17th on are none it was warmed up on.

    python benchmarks/turn_mismatch.py --figures docs/figures --png   # 16 episodes of 32 and of 100
    python benchmarks/turn_mismatch.py --short
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from turn_tables import markdown, turn_curves, turn_table
from turn_task import (
    Chain,
    found,
    make_data,
    make_long_policy,
    make_policy,
    question,
    random_chain,
    search,
)

from onepolicy.build.measure import build_engine_and_scorer
from onepolicy.config import load
from onepolicy.divergence.breakdown import TURNS, metrics_per_turn, turn_bins, turn_name
from onepolicy.divergence.routing import routing_disagreement
from onepolicy.envs.multiturn.tokenization import decode_tokens, encode_text
from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.interfaces import RolloutEngine
from onepolicy.models.load import load_tokenizer
from onepolicy.report.figures.groups import NATIVE, by_turn
from onepolicy.report.png import write_figures
from onepolicy.rollout.collect import request_seed
from onepolicy.train.pack import pack
from onepolicy.types import Group, Sample, Sampling, TokenBatch

RECIPE = Path(__file__).with_name("turn_curves.toml")
MAX_LEN = 8192
SETTINGS = {
    "replay.mode": "r3",
    "rollout.engine.max_len": MAX_LEN,
    "rollout.engine.max_num_seqs": 16,
}
TURN = 32  # tokens of a turn, at most


def main() -> None:
    options = arguments()
    make_data(options.out)
    make = make_policy if options.short else make_long_policy
    path = f"model.path={make(options.out)}"
    config = load(RECIPE, [path, *(f"{key}={value}" for key, value in SETTINGS.items())])
    pair, tokenizer = (
        build_engine_and_scorer(config, config.model, MAX_LEN),
        load_tokenizer(config.model),
    )
    drawn = []
    for turns in options.turns:
        batch, right = asyncio.run(play(pair.engine, tokenizer, turns, options.episodes))
        native, replayed = pair.scorer.score(batch, replay=False), pair.scorer.score(batch)
        slots = batch.num_slots // batch.num_samples
        print(
            f"{batch.num_samples} episodes of {turns} turns and {slots} slots; "
            f"{right:.1%} search as scripted\n"
        )
        rows = [metrics(native.select([i]), replayed.select([i])) for i in range(batch.num_samples)]
        print(f"{turn_table(rows)}\n\n{table(native, replayed)}\n", flush=True)
        where = f"Scripted episodes, the same tokens scored twice; {len(rows)} episodes."
        drawn.append(
            dataclasses.replace(
                by_turn(turn_curves(rows), where),
                name=f"turns_scripted_{turns}{'_short' * options.short}",
            )
        )
    if options.figures:
        for each in write_figures(options.figures, drawn, png=options.png):
            print(each)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", nargs="+", type=int, default=[32, 100], metavar="N")
    parser.add_argument("--episodes", type=int, default=16, metavar="N")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/turns"), help="where turn_curves.py has its policy"
    )
    parser.add_argument(
        "--short", action="store_true", help="the policy of turn_curves.py, which knows 16 turns"
    )
    parser.add_argument("--figures", type=Path, help="folder for the figures as plotly JSON")
    parser.add_argument("--png", action="store_true", help="and as PNG")
    return parser.parse_args()


async def play(
    engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, turns: int, episodes: int
) -> tuple[TokenBatch, float]:
    """Return all episodes packed, and the share of turns that made the search whose passage came
    next."""
    rng = np.random.default_rng(turns)
    chains = [random_chain(turns, rng) for _ in range(episodes)]
    played = await asyncio.gather(
        *(episode(engine, tokenizer, chain, i) for i, chain in enumerate(chains))
    )
    samples = (
        dataclasses.replace(sample, outcome=0.0, episode=i) for i, (sample, _) in enumerate(played)
    )
    return pack([Group(0, tuple(samples))]), sum(right for _, right in played) / (turns * episodes)


async def episode(
    engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, chain: Chain, number: int
) -> tuple[Sample, int]:
    """Play one scripted episode, and count its turns that made the script's search."""
    path, right = Trajectory(encode_text(tokenizer, f"{question(chain.entries[0])}\n")), 0
    for turn, (entry, passage) in enumerate(zip(chain.entries, chain.passages, strict=True)):
        asked = Sampling(
            1.0, TURN, stop=(tokenizer.eos_token_id,), routes_from=path.first_missing_route
        )
        completion = await engine.generate(
            path.tokens, asked, seed=request_seed(0, number, 0, 0, turn)
        )
        right += decode_tokens(tokenizer, completion.token_ids.tolist()) == search(entry)
        path.append_completion(completion)
        path.append_observation(encode_text(tokenizer, found(passage), untrusted=True))
    return path.to_sample(reward=0.0, temperature=1.0), right


def metrics(native: TokenBatch, replayed: TokenBatch) -> dict[str, float]:
    """Return k3 by turn of one episode, scored both ways."""
    return metrics_per_turn(replayed) | {
        f"{NATIVE}{name}": value for name, value in metrics_per_turn(native).items()
    }


def table(native: TokenBatch, replayed: TokenBatch) -> str:
    """Return other differences by turn, over all episodes. The entropy is that of the scoring
    without replay."""
    names = ("max dlogp", "routes differing")
    rows = [
        (
            "turns",
            *(f"{name} {side}" for name in names for side in ("without", "with replay")),
            "entropy",
        )
    ]
    bins = turn_bins(native.turn.long().clamp(min=0))
    for i in bins[native.trainable].unique().tolist():
        slots = (native.trainable & (bins == i)).nonzero()[:, 0]
        both = (native, replayed)
        dlogp = (f"{largest(each, slots):.3f}" for each in both)
        routers = (f"{differing(each, slots):.2%}" for each in both)
        assert native.entropy is not None
        rows.append(
            (turn_name(TURNS[i]), *dlogp, *routers, f"{float(native.entropy[slots].mean()):.3f}")
        )
    return markdown(rows)


def largest(batch: TokenBatch, slots: Tensor) -> float:
    assert batch.logp_old is not None
    return float((batch.logp_old - batch.logp_rollout)[slots].abs().max())


def differing(batch: TokenBatch, slots: Tensor) -> float:
    """Return the share of routes at which the trainer's own choice, in this scoring, is not the
    rollout's."""
    assert batch.routing is not None
    assert batch.routing_native is not None
    return routing_disagreement(batch.routing_native.at(slots), batch.routing.at(slots)).routers


if __name__ == "__main__":
    main()
