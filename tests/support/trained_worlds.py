"""Numbers in the shape of trained policies: low entropy, groups of siblings with shared prefixes,
turns, long answers; genuine mismatch of many kinds, and faults of a whole side.

Logits are a function of the context, as a model's are: siblings with one prefix have one
distribution, on each side. So equal prefixes give equal values to the bit.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.verdict.declared import Declared, Format
from onepolicy.verdict.rules import QUIET_KL
from support.audit_faults import FAULTS, PROMPT, VOCABULARY, Fault, Planted, World, merged

GROUP = 8
TABLE = 4096
ENTROPIES = (0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 2.0)
SHAPES = {  # rows, shortest, longest, turns
    "short": (192, 16, 40, 1),
    "usual": (96, 60, 160, 1),
    "turns": (48, 150, 400, 8),
    "many turns": (16, 600, 1200, 64),
    "long": (16, 1500, 2500, 1),
}


@dataclasses.dataclass(frozen=True)
class Noise:
    """What one side's arithmetic adds to the logits of a context.

    even: standard deviation of every logit. relative: of a logit's own size. shrink: factor on the
    distance to the mean, the same everywhere. flips: share of contexts in which other experts
    fire, far: the noise of their logits, dulled: largest share of the margin that they take.
    growth: factor on all noise at 1,000 tokens.
    """

    even: float = 0.0
    relative: float = 0.0
    shrink: float = 0.0
    flips: float = 0.0
    far: float = 0.0
    dulled: float = 0.0
    growth: float = 0.0


MISMATCH = {
    "bf16": Noise(0.02, 0.004),
    "fp8": Noise(0.06, 0.01, 0.005),
    "int8": Noise(0.05, 0.008, 0.005),
    "nf4": Noise(0.25, 0.03, 0.02),
    "int3": Noise(0.5, 0.06, 0.04),
    "flips 1%": Noise(0.02, 0.004, flips=0.01, far=1.0, dulled=0.3),
    "flips 5%": Noise(0.02, 0.004, flips=0.05, far=0.7, dulled=0.5),
    "flips 10%": Noise(0.03, 0.004, flips=0.1, far=0.7, dulled=0.3),
    "flips 40%": Noise(0.03, 0.004, flips=0.4, far=0.4, dulled=0.2),
    "growth 4": Noise(0.04, 0.006, growth=3.0),
    "growth 10": Noise(0.04, 0.006, growth=9.0),
    "growth 40": Noise(0.02, 0.004, growth=39.0),
}


class Policy:
    """Logits as a function of a context, which is a hash of the prefix."""

    def __init__(self, seed: int, entropy: float):
        self.entropy = entropy
        g = torch.Generator().manual_seed(seed)
        self.tables = torch.randn(8, TABLE, VOCABULARY, generator=g)

    def drawn(self, context: Tensor, which: int) -> Tensor:
        """Return [R, V] standard normal numbers of these contexts, the same at every call."""
        a, b = (mixed(context, 2 * which + i) % TABLE for i in (0, 1))
        return (self.tables[2 * which][a] + self.tables[2 * which + 1][b]) / 2**0.5

    def logits(self, context: Tensor) -> Tensor:
        """Return [R, V]: certain contexts, and forks of 2, 3, 5 or all tokens."""
        z = 1.5 * self.drawn(context, 0)
        order = self.drawn(context, 1).argsort(-1).argsort(-1)
        uncertain = uniform(context, 11) < min(1.0, 0.6 * self.entropy)
        kind = uniform(context, 12)
        live = torch.where(kind < 0.5, 2, torch.where(kind < 0.7, 3, 5))
        if self.entropy >= 1:
            live = torch.where(kind < 0.3, VOCABULARY, live)
        least = np.log(72 * VOCABULARY / self.entropy)
        margin = least + 10 * uniform(context, 13).square()
        lift = torch.where(uncertain, float(least), margin)
        return z + lift[:, None] * (order < torch.where(uncertain, live, 1)[:, None])

    def noisy(self, z: Tensor, context: Tensor, place: int, noise: Noise) -> Tensor:
        """Return the logits as another arithmetic has them."""
        apart = z - z.mean(-1, keepdim=True)
        spread = (0.5 * self.tables[0, :, 0][mixed(context, 14) % TABLE]).exp()
        size = (noise.even + noise.relative * apart.abs()) * spread[:, None]
        size = size * (1 + noise.growth * place / 1000)
        z = z - noise.shrink * apart + size * self.drawn(context, 2)
        flipped = uniform(context, 15) < noise.flips
        dull = noise.dulled * uniform(context, 16)[:, None] * apart.clamp(min=0)
        moved = z - dull + noise.far * self.drawn(context, 3)
        return torch.where(flipped[:, None], moved, z)


def mixed(context: Tensor, salt: int) -> Tensor:
    """Return [R] int64 >= 0, another hash of a context."""
    x = context + salt * 0x1F3D5B79
    for factor in (0x2545F4914F6CDD1D, 0x1B03738712FAD5C9):
        x = (x ^ ((x >> 29) & 0x7FFFFFFFF)) * factor
    return (x >> 16) & 0x7FFFFFFFFFFF


def uniform(context: Tensor, salt: int) -> Tensor:
    """Return [R] numbers between 0 and 1 of these contexts."""
    return (mixed(context, salt) % 1_000_003).double().div(1_000_003).float()


Side = Callable[[Policy, Tensor, Tensor, int], Tensor]
"""(policy, logits, context, place) -> logits of one side, [R, V]."""


def as_it_is(_: Policy, z: Tensor, context: Tensor, place: int) -> Tensor:
    return z


def with_noise(noise: Noise) -> Side:
    return lambda policy, z, context, place: policy.noisy(z, context, place, noise)


def trained_world(
    seed: int,
    entropy: float,
    shape: str = "usual",
    *,
    engine: Side = as_it_is,
    trainer: Side = as_it_is,
    jitter: float = 0.0,
    ages: tuple[float, ...] = (),
) -> World:
    """Make a world of a policy of about this mean entropy [nats a token].

    jitter: noise that the engine does not repeat (its batches differ). ages: of declared versions,
    how far their weights are from the newest; the row's version is drawn.
    """
    rows, shortest, longest, turns = SHAPES[shape]
    policy, g = Policy(seed, entropy), torch.Generator().manual_seed(seed + 1)
    group = torch.arange(rows) // GROUP
    lengths = PROMPT + torch.randint(shortest, longest + 1, (rows,), generator=g)
    age = torch.randint(len(ages) + 1, (rows,), generator=g)
    drift = torch.tensor([0.0, *ages])[age][:, None]
    context = mixed(group, 1000 + seed)
    period = max(2, longest // turns)
    made: dict[str, list[Tensor]] = {"tokens": [], "trainer": [], "engine": [], "sampled": []}
    for place in range(int(lengths.max())):
        z = policy.logits(context)
        here = trainer(policy, z, context, place)
        there = engine(policy, z, context, place)
        if ages:
            older = Noise(1.0, 0.05, 0.1)
            there = there + drift * (policy.noisy(z, mixed(context, 77), place, older) - z)
        if jitter:
            there = there + jitter * torch.randn(there.shape, generator=g)
        drawn = torch.multinomial(there.softmax(-1), 1, generator=g)[:, 0]
        told = mixed(context, 21) % VOCABULARY
        inside = place >= PROMPT
        if turns > 1:
            inside = inside and place % period < 0.7 * period
        tokens = drawn if inside else told
        for name, value in (("tokens", tokens), ("trainer", here), ("engine", there)):
            made[name].append(value)
        made["sampled"].append(torch.full((rows,), inside))
        context = mixed(context, 31) ^ (tokens + 1) * 0x9E3779B97F4A7C1
    kept = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    flat = {name: torch.stack(values, 1)[kept] for name, values in made.items()}
    segment = torch.arange(rows).repeat_interleave(lengths)
    place = torch.arange(len(segment)) - (lengths.cumsum(0) - lengths)[segment]
    columns = {"mask": flat["sampled"].clone()}
    if ages:
        columns |= {"version": 9 - age, "trained_version": torch.full((rows,), 9)}
    w = World(
        np.random.default_rng(seed),
        g,
        lengths,
        segment,
        place,
        flat["sampled"],
        flat["trainer"],
        flat["engine"],
        flat["tokens"],
        columns,
    )
    w.score()
    return w


# --- verdicts -------------------------------------------------------------------------------------

QLORA = "nf4 trainer"
AGES = {"1 update old": (0.15,), "up to 4 updates old": (0.15, 0.3, 0.45, 0.6)}
DECLARED: dict[str, Format] = {
    "fp8": "fp8", "int8": "int8", "nf4": "4bit", "int3": "4bit", QLORA: "4bit",
}  # fmt: skip
CLEAN = (*MISMATCH, QLORA, *AGES)
BESIDE = ("bf16", "flips 5%", "int8", "flips 1%", "fp8")
"""Genuine mismatch beside a planted fault, by the world's number."""


def sound(kind: str, seed: int, entropy: float, shape: str) -> World:
    """Make a world with genuine mismatch of a kind alone."""
    jitter = 0.01 if seed % 2 else 0.0
    if kind == QLORA:
        noise = with_noise(MISMATCH["nf4"])
        return trained_world(seed, entropy, shape, trainer=noise, jitter=jitter)
    if kind in AGES:
        noise = with_noise(MISMATCH["bf16"])
        return trained_world(seed, entropy, shape, engine=noise, jitter=jitter, ages=AGES[kind])
    noise = with_noise(MISMATCH[kind])
    return trained_world(seed, entropy, shape, engine=noise, jitter=jitter)


def lost(part: float, duller: float) -> Fault:
    """Let the engine sample by other weights in all rows, which say that they are of now.

    part: noise of every logit. duller: share of the margin that those weights lack on average; it
    differs from context to context.
    """

    def plant(w: World) -> None:
        apart = w.engine - w.engine.mean(-1, keepdim=True)
        lacking = 2 * duller * torch.rand(len(apart), 1, generator=w.generator)
        other = w.engine - lacking * apart + part * w.noise(1.0)
        w.draw(other)
        w.score(engine=other)

    return plant


WHOLE = {
    "adapter lost, all rows": Planted(lost(1.0, 0.15)),
    "weights 200 updates old, all rows": Planted(lost(0.5, 0.1)),
    "experts not synced, all rows": Planted(lost(0.7, 0.0)),
}
"""Faults of all rows that leave nothing but a gap: no column names them."""
PLANTED = {
    name: FAULTS[name]
    for name in (
        "T 0.7, processed", "T 0.9, processed", "T 1.3, processed", "T 1.4 in the trainer",
        "T 0.7, raw", "top-k 3, no entropy", "top-p 0.8", "top-p 0.9, raw", "base 10, rollout",
        "halved, trainer", "per character, rollout", "shift by 1, all", "shift, second turn, 50%",
        "end token -9999", "filled with -9999, 1%", "filled with 0, 3%", "row means",
        "swapped rows, all", "merged token, 50%", "stale half, declared", "stale 30%, far",
        "system prompt missing", "prompts in mask, both sides", "clipped at -3, rollout",
    )
} | WHOLE  # fmt: skip
PLANTED["merged token, 50%"] = Planted(merged(0.5), ("retokenised", "shift"))
"""Where most tokens are certain the place of the merge cannot be seen."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A verdict on a world of trained policies."""

    action: str
    causes: tuple[str, ...]
    k3: float
    ceiling: float


def judged(w: World, kind: str) -> Outcome:
    """Audit a world whose number format is declared."""
    declared = Declared(DECLARED.get(kind, "bfloat16"))
    try:
        found = w.audited(declared)
    except UsageError:
        return Outcome("refused", (), np.nan, np.nan)
    assert found.accumulated.overall is not None
    k3 = found.accumulated.overall.statistics()["k3"]
    ages = found.accumulated.ages
    age = max(ages.by_age) if ages.explains_gap else 0
    ceiling = dataclasses.replace(declared, age=age).ceiling
    return Outcome(found.verdict.action, found.verdict.causes, k3, ceiling)


def settings(number: int) -> tuple[float, str]:
    """Return entropy and shape of a world, by its number."""
    shapes = list(SHAPES)
    return ENTROPIES[number % len(ENTROPIES)], shapes[number // len(ENTROPIES) % len(shapes)]


def clean_table(seeds: range) -> str:
    """Return Markdown: the verdicts on sound worlds, and their largest k3."""
    lines = ["| mismatch | worlds | verdicts | largest k3 | ceiling |", "|---|---|---|---|---|"]
    for kind in CLEAN:
        found = [judged(sound(kind, seed, *settings(seed)), kind) for seed in seeds]
        said = ", ".join(f"{n} {a}" for a, n in Counter(o.action for o in found).most_common())
        largest = max(found, key=lambda o: o.k3)
        lines.append(
            f"| {kind} | {len(found)} | {said} | {largest.k3:.2g} | {largest.ceiling:.2g} |"
        )
    return "\n".join(lines)


def planted_outcomes(seeds: range) -> dict[str, list[tuple[Outcome, Outcome]]]:
    """Return the verdicts without and with each fault, in every world.

    A world is made once for all faults, which takes most of the time.
    """
    found: dict[str, list[tuple[Outcome, Outcome]]] = {name: [] for name in PLANTED}
    for seed in seeds:
        kind = BESIDE[seed % len(BESIDE)]
        made = sound(kind, seed, *settings(seed))
        before = judged(made, kind)
        for name, fault in PLANTED.items():
            w = made.copy()
            fault.plant(w)
            found[name].append((before, judged(w, kind)))
    return found


def planted_table(found: dict[str, list[tuple[Outcome, Outcome]]]) -> str:
    """Return Markdown: the verdicts on planted faults, and in how many worlds the right cause is
    named among those with ten times the sound world's k3, and more than needs nothing."""
    lines = [
        "| fault | verdicts | right cause | correct above the ceiling | nothing, yet k3 tenfold |",
        "|---|---|---|---|---|",
    ]
    for name, outcomes in found.items():
        wanted = set(PLANTED[name].causes)
        tenfold = [after for before, after in outcomes if is_tenfold(before, after)]
        after = [each for _, each in outcomes]
        said = ", ".join(f"{n} {a}" for a, n in Counter(o.action for o in after).most_common())
        named = "no mark names it"
        if wanted:
            right = sum(bool(wanted & set(each.causes)) for each in tenfold)
            named = f"{right} of {len(tenfold)}"
        above = sum(each.action == "correct" and each.k3 > each.ceiling for each in after)
        missed = sum(each.action == "nothing" for each in tenfold)
        lines.append(f"| {name} | {said} | {named} | {above} | {missed} |")
    return "\n".join(lines)


def is_tenfold(before: Outcome, after: Outcome) -> bool:
    """Return whether the fault moves k3 tenfold, and above what needs nothing."""
    return after.action == "refused" or not after.k3 <= max(10 * before.k3, QUIET_KL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 70
    faults = planted_table(planted_outcomes(range(min(count, 40))))
    print(clean_table(range(count)), faults, sep="\n\n")
