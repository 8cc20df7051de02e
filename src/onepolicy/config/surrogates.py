"""The surrogates of a policy's loss: what rules, settings and docs ask of each.

A surrogate is a row here and the function of that name in objective/surrogate.py, which gets the
settings that the row names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

LEVELS = ("token", "sequence", "sequence-token", "trajectory")
"""What objective.ratio_level can be."""
CLIP = ("clip_low", "clip_high")


class SurrogateRow(NamedTuple):
    """A surrogate. Its loss is of a slot with ratio r, advantage A and probability p."""

    loss: str
    gradient: str  # by log p
    source: str
    reads: tuple[str, ...] = ()  # settings of `objective` that its function gets by name
    levels: tuple[str, ...] = LEVELS  # of the ratio; none: it takes no ratio of a slot
    has_ratio: bool = True  # r is a factor, so that a ratio new/rollout corrects it
    detached: bool = False  # r carries no gradient
    whole_samples: bool = False  # a slot's loss is one of its sample, so A is one per sample


CLIPPED_LEVELS = ("token", "sequence", "sequence-token")

SURROGATES = {
    "ppo": SurrogateRow(
        "-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); `dual_clip` c: at most -c A where "
        "A < 0",
        "-r A, 0 where clipped",
        "PPO (1707.06347) eq. 7; dual clip: 1912.09729 eq. 5",
        reads=(*CLIP, "dual_clip"),
        levels=CLIPPED_LEVELS,
    ),
    "cispo": SurrogateRow(
        "-sg(clip(r)) A log p",
        "-clip(r) A",
        "MiniMax-M1 (2506.13585) eq. 4",
        reads=CLIP,
        levels=CLIPPED_LEVELS,
        detached=True,
    ),
    "pg": SurrogateRow("-A log p", "-A", "Williams 1992", levels=(), has_ratio=False),
    "sapo": SurrogateRow(
        "-(4 / tau) sigmoid(tau (r - 1)) A",
        "-4 s (1 - s) r A",
        "SAPO (2511.20347)",
        reads=("tau_positive", "tau_negative"),
        levels=CLIPPED_LEVELS,
    ),
    "topr": SurrogateRow(
        "-A log p where A >= 0, -sg(min(r, 1)) A log p elsewhere",
        "-A, -min(r, 1) A",
        "Tapered off-policy REINFORCE (2503.14286) eq. 3",
        detached=True,
    ),
    "gmpo": SurrogateRow(
        "-exp(mean of clipped log r over the sample) A",
        "0 in clipped slots",
        "GMPO (2507.20673) eq. 4",
        reads=CLIP,
        levels=(),
        whole_samples=True,
    ),
}
BOUNDS = tuple(dict.fromkeys(name for row in SURROGATES.values() for name in row.reads))
"""Settings of all surrogates, which do nothing where r is 1."""

if TYPE_CHECKING:
    SurrogateName = str
else:
    SurrogateName = Literal[tuple(SURROGATES)]


def markdown_table() -> str:
    """Return the table of surrogates of docs/objectives.md."""
    lines = [
        "| surrogate | loss of a slot | gradient by log p | source |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {row.loss} | {row.gradient} | {row.source} |"
        for name, row in SURROGATES.items()
    ]
    return "\n".join(lines)
