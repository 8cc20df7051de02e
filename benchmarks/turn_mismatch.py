"""Mismatch by turn number in scripted episodes of 32 and 100 turns: bfloat16 rollout against float32 trainer.

The policy of turn_curves.py samples its turns; what it reads is scripted: after turn n comes the n-th passage of a
chain, whatever was searched for. So every episode has all its turns. The sampled tokens are then scored twice by the
trainer, with the rollout's routes and with its own: both are of the same tokens.

    python benchmarks/turn_mismatch.py                                      # 16 episodes of 32 turns, 16 of 100
    python benchmarks/turn_mismatch.py --figures docs/figures --png
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase
from turn_tables import markdown, mean, points, spread
from turn_task import Chain, found, make_data, make_policy, question, random_chain, search

from onepolicy.config import load
from onepolicy.envs.dialogue import encode
from onepolicy.envs.render import decode
from onepolicy.envs.trajectory import Trajectory
from onepolicy.interfaces import RolloutEngine
from onepolicy.loop.setup import build_pair
from onepolicy.measure.attribution import k3_terms
from onepolicy.measure.routing import routing_disagreement
from onepolicy.models.load import load_tokenizer
from onepolicy.report.figure import REPLAY, TRAINER, Figure, LogScale, axis
from onepolicy.report.png import write_figures
from onepolicy.rollout.collect import seed_of
from onepolicy.train.pack import pack
from onepolicy.types import Group, Sample, Sampling, TokenBatch

RECIPE = Path(__file__).with_name("turn_curves.toml")
MAX_LEN = 8192
SETTINGS = {"replay.mode": "r3", "rollout.engine.max_len": MAX_LEN, "rollout.engine.slots": 16}
TURN = 32  # tokens of a turn, at most
EDGES = (0, 1, 2, 4, 8, 16, 32, 64)  # bins of turn numbers start here
SIDES = {"without replay": TRAINER, "with replay": REPLAY}


@dataclass(frozen=True)
class Bin:
    """Turns [first, last] of all episodes. k3: one mean per episode; max_dlogp and routers are of all tokens."""

    first: int
    last: int
    k3: list[float]
    max_dlogp: float
    routers: float
    entropy: float


def main() -> None:
    options = arguments()
    make_data(options.out)
    path = f"model.path={make_policy(options.out)}"
    config = load(RECIPE, [path, *(f"{key}={value}" for key, value in SETTINGS.items())])
    pair, tokenizer = build_pair(config, config.model, MAX_LEN), load_tokenizer(config.model)
    drawn = []
    for turns in options.turns:
        batch, right = asyncio.run(play(pair.engine, tokenizer, turns, options.episodes))
        scored = (pair.learner.score_without_replay(batch), pair.learner.score_again(batch))
        bins = {side: by_turn(each, turns) for side, each in zip(SIDES, scored, strict=True)}
        slots = batch.num_slots // batch.num_samples
        print(f"{batch.num_samples} episodes of {turns} turns and {slots} slots; {right:.1%} search as scripted\n")
        print(f"{table(bins)}\n", flush=True)
        drawn.append(figure(turns, bins))
    if options.figures:
        for each in write_figures(options.figures, drawn, png=options.png):
            print(each)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", nargs="+", type=int, default=[32, 100], metavar="N")
    parser.add_argument("--episodes", type=int, default=16, metavar="N")
    parser.add_argument("--out", type=Path, default=Path("runs/turns"), help="where turn_curves.py has its policy")
    parser.add_argument("--figures", type=Path, help="folder for the figures as plotly JSON")
    parser.add_argument("--png", action="store_true", help="and as PNG")
    return parser.parse_args()


async def play(
    engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, turns: int, episodes: int
) -> tuple[TokenBatch, float]:
    """All episodes packed, and the share of turns that made the search whose passage came next."""
    rng = np.random.default_rng(turns)
    chains = [random_chain(turns, rng) for _ in range(episodes)]
    played = await asyncio.gather(*(episode(engine, tokenizer, chain, i) for i, chain in enumerate(chains)))
    samples = (dataclasses.replace(sample, outcome=0.0, episode=i) for i, (sample, _) in enumerate(played))
    return pack([Group(0, tuple(samples))]), sum(right for _, right in played) / (turns * episodes)


async def episode(
    engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, chain: Chain, number: int
) -> tuple[Sample, int]:
    """One scripted episode, and how many of its turns made the script's search."""
    path, right = Trajectory(encode(tokenizer, f"{question(chain.entries[0])}\n")), 0
    for turn, (entry, passage) in enumerate(zip(chain.entries, chain.passages, strict=True)):
        asked = Sampling(1.0, TURN, stop=(tokenizer.eos_token_id,), routes_from=path.next_route)
        completion = await engine.generate(path.tokens, asked, seed=seed_of(0, number, 0, 0, turn))
        right += decode(tokenizer, completion.token_ids.tolist()) == search(entry)
        path.sampled(completion)
        path.observe(encode(tokenizer, found(passage), outside=True))
    return path.sample(reward=0.0, temperature=1.0), right


def by_turn(batch: TokenBatch, turns: int) -> list[Bin]:
    """batch: scored."""
    assert batch.logp_old is not None
    assert batch.entropy is not None
    assert batch.routing is not None
    assert batch.routing_native is not None
    terms = k3_terms(batch.logp_old, batch.logp_rollout)
    bins = []
    for first, end in itertools.pairwise(sorted({*(edge for edge in EDGES if edge < turns), turns})):
        here = batch.trainable & (batch.turn >= first) & (batch.turn < end)
        slots = here.nonzero()[:, 0]
        per_episode = [float(terms[here & (batch.segment == i)].mean()) for i in range(batch.num_samples)]
        dlogp = (batch.logp_old - batch.logp_rollout)[slots].abs()
        differing = routing_disagreement(batch.routing_native.at(slots), batch.routing.at(slots))
        entropy = float(batch.entropy[slots].mean())
        bins.append(Bin(first + 1, end, per_episode, float(dlogp.max()), differing.routers, entropy))
    return bins


def table(bins: dict[str, list[Bin]]) -> str:
    """Two scorings of the same tokens side by side."""
    names = ("k3", "max dlogp", "routers differing")
    rows = [("turns", *(f"{name}, {side}" for name in names for side in SIDES), "entropy")]
    for without, replayed in zip(*bins.values(), strict=True):
        both = (without, replayed)
        k3 = (f"{mean(each.k3):.1e} ± {spread(each.k3):.1e}" for each in both)
        rest = (*(f"{each.max_dlogp:.3f}" for each in both), *(f"{each.routers:.2%}" for each in both))
        rows.append((f"{without.first} to {without.last}", *k3, *rest, f"{without.entropy:.3f}"))
    return markdown(rows)


def figure(turns: int, bins: dict[str, list[Bin]]) -> Figure:
    scale = LogScale.of(*(each.k3 for own in bins.values() for each in own))
    data = []
    for side, look in SIDES.items():
        x = [math.sqrt(each.first * each.last) for each in bins[side]]
        data.append(points(side, x, [each.k3 for each in bins[side]], look))
    ticks = [each.first for each in bins["with replay"]]
    xaxis = axis("turn", type="log", tickmode="array", tickvals=ticks, ticktext=[str(t) for t in ticks])
    note = "Scripted episodes, the same tokens scored twice: mean and standard deviation of the episodes."
    title = f"Mismatch by turn number, {turns} turns"
    return Figure(f"turns_scripted_{turns}", title, note, data, {"xaxis": xaxis, "yaxis": scale.axis("k3 [nats]")})


if __name__ == "__main__":
    main()
