"""Whole distributions in the report of `onepolicy measure --top N`. Input: `distribution` in OUT/measure.json."""

from __future__ import annotations

from onepolicy.report.figure import REPLAY, TRAINER, Figure, LogScale, Spec, line
from onepolicy.report.words import DASH, Tree, number

SCORINGS = {"without_replay": ("without replay", TRAINER), "with_replay": ("with replay", REPLAY)}
QUANTITIES = {  # name in JSON -> (words, is a share)
    "argmax_differs": ("positions whose likeliest token differs", True),
    "tv_low": ("total variation, mean, at least", False),
    "tv_high": ("total variation, mean, at most", False),
    "tv_low_max": ("total variation, largest, at least", False),
    "kl_low": ("KL(rollout || trainer), nats, at least", False),
    "kl_shared": ("KL given that it is one of the {top}, nats", False),
    "overlap": ("of the {top}, also among the trainer's {top} likeliest", True),
    "mass_rollout": ("rollout's probability of the {top}", True),
    "mass_trainer": ("trainer's probability of the {top}", True),
}
HEADER = ("", *(words for words, _ in SCORINGS.values()))
WORST_HEADER = ("Text before", "Sampled", "TV", "Likeliest: p rollout / p trainer", "sequence, place")


def title(found: Tree) -> str:
    return f"Whole distributions, from the rollout's {found['top']} likeliest tokens of each position"


def rows(found: Tree) -> list[tuple[str, ...]]:
    metrics = [found["metrics"].get(name, {}) for name in SCORINGS]
    return [
        (words.format(top=found["top"]), *(number(each.get(name), share=share) for each in metrics))
        for name, (words, share) in QUANTITIES.items()
    ]


def figure(found: Tree) -> Figure:
    """Share of positions whose total variation is above x; the truth lies between the two lines of a scoring."""
    curves = [(*SCORINGS[name], sides["low"], sides["high"]) for name, sides in found["above"].items()]
    scale = LogScale.of(*(values for *_, low, high in curves for values in (low, high)), [0.0], top=1.0)
    data: list[Spec] = []
    for words, look, low, high in curves:
        data.append(line(f"{words}, at least", found["edges"], scale.lift(low), look))
        thin = {"color": look.color, "dash": look.dash, "width": 0.8}
        data.append(line(f"{words}, at most", found["edges"], scale.lift(high), look, line=thin))
    layout = {
        "xaxis": LogScale.of(found["edges"]).axis("total variation x (log)") | {"tickangle": 0},
        "yaxis": scale.axis("share beyond x (log)"),
    }
    note = (
        "Total variation = half the sum of |p_trainer - p_rollout| over the vocabulary. Of tokens the engine did not "
        "return only the whole mass is known: thick lines take the least they can add, thin lines the most."
    )
    plain = found["metrics"]["without_replay"]
    least, most = number(plain["tv_low"]), number(plain["tv_high"])
    differs = number(plain["argmax_differs"], share=True)
    heading = f"Total variation {least} {DASH} {most} on average; the likeliest token differs at {differs} of positions"
    return Figure("distribution", heading, note, data, layout, width="wide")


def worst_rows(found: Tree) -> list[tuple[str, ...]]:
    return [
        (
            each["before"],
            repr(each["sampled"]),
            f"{number(each['tv_low'])} {DASH} {number(each['tv_high'])}",
            ", ".join(
                f"{c['token']!r} {number(c['p_rollout'])} / {number(c['p_trainer'])}" for c in each["candidates"]
            ),
            f"{each['sequence']}, {each['place']}",
        )
        for each in found["worst"]
    ]
