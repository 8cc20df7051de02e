"""The page and the picture of `make zero`: what differs at each turn of all conversations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zero.witness import PROMPT, Counts

from onepolicy.report.figures.parts import REPLAY, ROLLOUT, SOFT, TRAINER, Figure, axis, bars, line
from onepolicy.report.page import Card, Page, Section, Table, write_page
from onepolicy.report.png import write_figures

KINDS = (
    ("log-probabilities that differ", "values", "circle", 14, TRAINER),
    ("choices of experts that differ", "routes_differing", "square", 9, REPLAY),
    ("tokens outside their support", "outside", "diamond", 5, ROLLOUT),
)


def write_pages(out: Path, counts: Counts) -> Path:
    """Write OUT/report.html and OUT/zero.json of the figure. Return the page's path."""
    figure = draw(counts)
    write_figures(out / "figures", [figure], png=False)
    return write_page(out / "report.html", page_of(counts, figure))


def draw(counts: Counts) -> Figure:
    """Draw the counts over turns, above the number of tokens that were compared."""
    turns = sorted(turn for turn in counts.turns if turn != PROMPT)
    data = [
        bars("tokens compared", turns, [counts.turns[turn].tokens for turn in turns], SOFT)
        | {"yaxis": "y2", "opacity": 0.5}
    ]
    for name, field, symbol, size, style in KINDS:
        found = [getattr(counts.turns[turn], field) for turn in turns]
        data.append(
            line(name, turns, found, style)
            | {"mode": "lines+markers", "marker": {"symbol": symbol, "size": size}}
        )
    most = max(max(each["y"]) for each in data[1:])
    total = counts.total
    layout = {
        "xaxis": axis("turn of the conversation", dtick=1),
        "yaxis": axis("that differ", range=[-0.08 * max(1, most), 1.1 * max(1, most)]),
        "yaxis2": axis("tokens compared", overlaying="y", side="right", showgrid=False),
    }
    return Figure(
        "zero",
        f"{total.values:,} of {total.tokens:,} log-probabilities differ",
        "Every token that an unmodified agent program's turns were sampled from, scored anew under "
        "the weights that sampled it. The three lines lie on each other where all are zero.",
        data,
        layout,
        "wide",
    )


def page_of(counts: Counts, figure: Figure) -> Page:
    """Return the page: the line, the picture, and tables of turns, weights and requests."""
    verdict = Card(
        counts.line(),
        badge="equal" if counts.is_zero else "differs",
        bad=not counts.is_zero,
        lines=counts.describe().splitlines(),
    )
    return Page(
        "Zero, through an unmodified agent",
        "Zero, through an unmodified agent",
        "make zero",
        [verdict],
        [
            Section(
                "By turn", "Does a longer conversation differ more?", [figure, turn_table(counts)]
            ),
            Section(
                "By weights",
                "Which weights sampled the tokens, and how many updates later was it?",
                [
                    count_table(("version", "tokens"), sorted(counts.by_version.items())),
                    count_table(("updates since", "tokens"), sorted(counts.by_age.items())),
                ],
            ),
            Section(
                "Requests",
                "What did the program ask for, and what stands apart?",
                [count_table(("requests, by what they are", "number"), counts.requests.items())],
            ),
        ],
    )


def turn_table(counts: Counts) -> Table:
    """Return what was compared in each turn, and in the tokens that are no turn of the policy."""
    rows = []
    for number, turn in sorted(counts.turns.items()):
        name = str(number)
        if number == PROMPT:
            name = "prompts and replies"
        shares = turn.values, turn.routes, turn.routes_differing, turn.outside
        rows.append([name, *(f"{value:,}" for value in (turn.tokens, *shares))])
    header = "turn", "tokens", "values differ", "choices of experts", "differ", "outside"
    return Table(header, rows)


def count_table(header: Sequence[str], counts: object) -> Table:
    return Table(header, [[str(name), f"{number:,}"] for name, number in counts])  # type: ignore[attr-defined]
