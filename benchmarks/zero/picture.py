"""The page and the picture of `make zero`: what differs at each turn of all conversations.

    python benchmarks/zero/picture.py                      # docs/figures/zero.svg of docs/data
    python benchmarks/zero/picture.py runs/zero/zero.json  # and the tables, of a new run

The picture has both themes: a page's own, by prefers-color-scheme.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from zero.witness import PROMPT, Counts, Turn, total_of

from onepolicy.gateway.turns import Reason
from onepolicy.notation import counted
from onepolicy.report.page import Card, Drawing, Page, Section, Table, write_page

ROOT = Path(__file__).resolve().parents[2]
OUT, DATA = ROOT / "docs" / "figures" / "zero.svg", ROOT / "docs" / "data" / "zero.json"
KINDS = (
    ("log-probabilities that differ", "values", "tokens", "trainer"),
    ("choices of experts that differ", "routes_differing", "routes", "replay"),
    ("tokens outside their support", "outside", "tokens", "rollout"),
)
"""Name, count, of how many, and colour of a row."""
COLUMNS = tuple(vars(Turn()))
MOST = 14  # columns; the last one has all later turns
WIDTH, HEIGHT = 900, 396
LEFT, RIGHT = 268, 884
BARS, ROWS, NEWEST, NAMES = 150, (196, 240, 284), 334, 372
STYLE = """<style>
text{font:13px sans-serif;fill:#1d2430}.m{font-size:12px;fill:#5b6575}
.t{font:600 18px sans-serif}.zero{font:600 14px sans-serif;fill:#fff}.bad{fill:#b42318}
.paper{fill:#fff}.line{stroke:#e4e7ec;fill:none}.bar{fill:#b3bcc9}.newest{font-weight:600}
.trainer{fill:#0b63b8}.replay{fill:#00795a}.rollout{fill:#b54700}
@media (prefers-color-scheme:dark){
text{fill:#e6e9ee}.m{fill:#98a2b3}.zero{fill:#181d25}.bad{fill:#ff8a80}
.paper{fill:#181d25}.line{stroke:#2b323d}.bar{fill:#4d586a}
.trainer{fill:#6db3f7}.replay{fill:#35c99a}.rollout{fill:#f58a4b}}
</style>"""


def main() -> None:
    tables = json.loads(DATA.read_text(encoding="utf-8"))
    if sys.argv[1:]:
        found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        tables = [table | found["tables"].get(table["id"], {}) for table in tables]
        write_tables(DATA, tables)
    OUT.write_text(drawn(turns_of(tables)), encoding="utf-8")
    print(f"wrote {OUT}", file=sys.stderr)


def write_tables(path: Path, tables: Sequence[Mapping[str, object]]) -> None:
    """Write the tables of a page, a row a line."""
    parts = []
    for table in tables:
        fields = []
        for name, value in table.items():
            text = json.dumps(value)
            if name in ("columns", "rows"):
                rows = ",\n    ".join(map(json.dumps, value))  # type: ignore[call-overload]
                text = f"[\n    {rows}\n  ]"
            fields.append(f'  "{name}": {text}')
        parts.append("{\n" + ",\n".join(fields) + "\n}")
    path.write_text("[\n" + ",\n".join(parts) + "\n]\n", encoding="utf-8")


def tables_of(counts: Counts) -> dict[str, Mapping[str, object]]:
    """Return what a run changes in the tables of the page."""
    total, found = counts.total, counts.requests
    size = counts.support / max(1, total.tokens)
    older = sum(number for age, number in counts.by_age.items() if age)
    played = (
        f"{len(counts.rewards)} steps of {found['episodes'] // len(counts.rewards)} programs: "
        f"{found['turns']:,} turns, {counted(found[Reason.COMPACTION], 'compaction')}, "
        f"{len(set(counts.weights))} different weights, mean reward "
        f"{sum(counts.rewards) / len(counts.rewards):.2f}."
    )
    rows = [
        ["log-probabilities, under the weights that sampled them", total.tokens, total.values],
        ["choices of experts", total.routes, total.routes_differing],
        [f"sampled tokens and their supports ({size:.2f} tokens on average)",
         total.tokens, total.outside],
        ["control: older ones with a choice, under the newest weights", total.older, total.newest],
        ["tokens of older weights than their update's", older, None],
        ["paths of a conversation", counts.samples, None],
        ["paths that span an update", counts.spanning, None],
    ]  # fmt: skip
    turns = [
        [number, *(getattr(turn, column) for column in COLUMNS)]
        for number, turn in sorted(counts.turns.items())
    ]
    return {
        "line": {"claim": f"**{counts.line()}.** {played}", "rows": rows},
        "turns": {"rows": turns},
    }


def turns_of(tables: Sequence[Mapping[str, object]]) -> dict[int, Turn]:
    """Return the counts by turn that the tables of the page have."""
    (rows,) = [table["rows"] for table in tables if table["id"] == "turns"]
    return {row[0]: Turn(*row[1:]) for row in rows}  # type: ignore[attr-defined]


def write_pages(out: Path, counts: Counts) -> Path:
    """Write OUT/report.html, zero.svg and zero.json. Return the page's path."""
    picture, shown = drawn(counts.turns), counts.as_json() | {"tables": tables_of(counts)}
    (out / "zero.json").write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    (out / "zero.svg").write_text(picture, encoding="utf-8")
    return write_page(out / "report.html", page_of(counts, picture))


def drawn(turns: Mapping[int, Turn]) -> str:
    """Return the picture: a column a turn, a row for each thing that could differ.

    The last row is the control: how many log-probabilities would differ if the newest weights
    scored tokens that older ones sampled.
    """
    total, columns = total_of(turns.values()), columns_of(turns)
    title = (
        f"{total.values:,} of {total.tokens:,} log-probabilities differ between what was sampled "
        "and what is trained"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{title}">',
        STYLE,
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        text(20, 30, title, "t"),
        text(20, 52, "An unmodified agent program plays a tiny hybrid of experts at top_p 0.95, "
             "whose weights change between its turns.", "m"),
        *named(BARS - 10, "tokens compared", f"{total.tokens:,}, with a choice {total.free:,}"),
        *named(NEWEST, "control: scored by the newest weights",
               f"{total.newest:,} of {total.older:,} older with a choice would differ"),
        text(20, NAMES, "turn of a conversation", "m"),
    ]  # fmt: skip
    for y, (name, field, of, _) in zip(ROWS, KINDS, strict=True):
        parts += named(y, name, f"{getattr(total, field):,} of {getattr(total, of):,}")
        parts.append(f'<path class="line" d="M{LEFT} {y}H{RIGHT}"/>')
    most = max(turn.tokens for turn in columns.values())
    for at, (name, turn) in enumerate(columns.items()):
        x = LEFT + (at + 0.5) * (RIGHT - LEFT) / len(columns)
        height = 62 * turn.tokens / most
        parts += [
            f'<rect class="bar" x="{x - 12:.1f}" y="{BARS - height:.1f}" width="24" '
            f'height="{height:.1f}"/>',
            text(x, BARS - height - 5, f"{turn.tokens:,}", "m", "middle"),
            *(
                mark(x, y, getattr(turn, field), color)
                for y, (_, field, _, color) in zip(ROWS, KINDS, strict=True)
            ),
            text(x, NEWEST + 5, f"{turn.newest:,}", "newest", "middle"),
            text(x, NAMES, name, "m", "middle"),
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def columns_of(turns: Mapping[int, Turn]) -> dict[str, Turn]:
    """Return the turns of the policy by their names, the last ones added up."""
    numbers = sorted(number for number in turns if number != PROMPT)
    columns = {str(number): turns[number] for number in numbers[:MOST]}
    if len(numbers) > MOST:
        last = numbers[MOST - 1]
        del columns[str(last)]
        columns[f"{last}+"] = total_of(turns[number] for number in numbers if number >= last)
    return columns


def named(y: float, name: str, small: str) -> list[str]:
    return [text(20, y - 3, name), text(20, y + 14, small, "m")]


def mark(x: float, y: float, count: int, color: str) -> str:
    """Return a disc with a 0, or the number alone in red."""
    if count:
        return text(x, y + 5, f"{count:,}", "bad newest", "middle")
    disc = f'<circle class="{color}" cx="{x:.1f}" cy="{y}" r="13"/>'
    return disc + text(x, y + 5, "0", "zero", "middle")


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{words}</text>'


def page_of(counts: Counts, picture: str) -> Page:
    """Return the page: the line, the picture, and tables of turns, weights and requests."""
    verdict = Card(
        counts.line(),
        badge="equal" if counts.is_zero else "differs",
        bad=not counts.is_zero,
        lines=counts.describe().splitlines(),
    )
    drawing = Drawing(picture, counts.line())
    return Page(
        "Zero, through an unmodified agent",
        "Zero, through an unmodified agent",
        "make zero",
        [verdict],
        [
            Section(
                "By turn", "Does a longer conversation differ more?", [drawing, turn_table(counts)]
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
        rows.append([name, *(f"{getattr(turn, column):,}" for column in COLUMNS)])
    header = ("turn", "tokens", "values differ", "choices of experts", "differ", "outside",
              "differ under the newest weights", "tokens with a choice",
              "of older weights")  # fmt: skip
    return Table(header, rows)


def count_table(header: Sequence[str], counts: object) -> Table:
    return Table(header, [[str(name), f"{number:,}"] for name, number in counts])  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
