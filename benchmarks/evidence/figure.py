"""Draw docs/figures/study.svg: where the 32 pairs of runs of the study end.

    python benchmarks/evidence/figure.py     # from runs.jsonl; a test compares

The file has both themes: a page's own, by prefers-color-scheme.
"""

from __future__ import annotations

import sys
from pathlib import Path

from run import RESULTS, finished_runs
from tables import by_arm, fails

OUT = Path(__file__).resolve().parents[2] / "docs" / "figures" / "study.svg"
WIDTH, HEIGHT = 900, 430
LEFT, RIGHT, TOP, BOTTOM = 62, 690, 84, 372
HIGHEST = 0.8  # accuracy at TOP; 0 at BOTTOM
ARMS = {"recompute": ("without replay", "first"), "r3": ("with replay", "other")}
STYLE = """<style>
text{font:13px sans-serif;fill:#1d2430}.m{fill:#5b6575}
.t{font:600 19px sans-serif}.b{font:600 14px sans-serif}
.paper{fill:#fff}.line{stroke:#e4e7ec}.pair{stroke:#c3cad4}
.start{stroke:#1d2430;stroke-dasharray:5 4}.first{fill:#d9771f}.other{fill:#123f7a}
@media (prefers-color-scheme:dark){
text{fill:#e6e9ee}.m{fill:#98a2b3}.paper{fill:#181d25}.line{stroke:#2b323d}
.start{stroke:#e6e9ee}.pair{stroke:#4d586a}.first{fill:#ffb266}.other{fill:#4a86d8}}
</style>"""


def main() -> None:
    OUT.write_text(drawn(), encoding="utf-8")
    print(f"wrote {OUT}", file=sys.stderr)


def drawn() -> str:
    """Return the picture: a column a seed, ordered by the end without replay."""
    arms = by_arm(line for line in finished_runs(RESULTS) if line["study"] == "main")
    chosen = {arm: arms[arm] for arm in ARMS}
    without = chosen["recompute"]
    seeds = sorted(without, key=lambda seed: (without[seed]["sampled"][-1], seed))
    failed = {arm: sum(map(fails, runs.values())) for arm, runs in chosen.items()}
    (start,) = {line["sampled"][0] for runs in chosen.values() for line in runs.values()}
    title = (
        f"Replay: {failed['recompute']} of {len(seeds)} runs end at or below their start without, "
        f"{failed['r3']} with"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{title}">',
        STYLE,
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        text(20, 30, title, "t"),
        text(20, 52, "A column is a seed, a dot a run of 400 steps: its held-out accuracy at the "
             "end. Artificial noise moves 40% of the routes.", "m"),
        *axes(),
    ]  # fmt: skip
    for at, seed in enumerate(seeds):
        ends = {arm: height(runs[seed]["sampled"][-1]) for arm, runs in chosen.items()}
        x = LEFT + 14 + at * (RIGHT - LEFT - 28) / (len(seeds) - 1)
        low, high = ends.values()
        parts.append(f'<path class="pair" d="M{x:.1f} {low:.1f}V{high:.1f}"/>')
        parts += [
            f'<circle class="{ARMS[arm][1]}" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>'
            for arm, y in ends.items()
        ]
    y = height(start)
    parts.append(f'<path class="start" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
    parts.append(text(RIGHT + 10, y + 5, f"start: {start:.2f}", "m"))
    for arm, (name, color) in ARMS.items():
        mean = sum(line["sampled"][-1] for line in chosen[arm].values()) / len(seeds)
        where = {"r3": height(mean) - 8, "recompute": y + 50}[arm]
        below = f"{failed[arm]} of {len(seeds)} at or below the start"
        parts.append(text(RIGHT + 10, where, name, f"b {color}"))
        parts.append(text(RIGHT + 10, where + 18, below))
    return "\n".join([*parts, "</svg>"]) + "\n"


def axes() -> list[str]:
    """Return the horizontal lines with their accuracies, and the names of both axes."""
    parts = []
    for tenths in range(0, round(10 * HIGHEST) + 1, 2):
        y = height(tenths / 10)
        parts.append(f'<path class="line" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        parts.append(text(LEFT - 10, y + 5, f"{tenths / 10:.1f}", "m", "end"))
    middle = (TOP + BOTTOM) / 2
    turned = f'<g transform="rotate(-90 18 {middle:.0f})">'
    parts.append(f"{turned}{text(18, middle, 'held-out accuracy, end', 'm', 'middle')}</g>")
    where = (LEFT + RIGHT) / 2
    parts.append(text(where, BOTTOM + 32, "32 seeds, by their end without replay", "m", "middle"))
    return parts


def height(accuracy: float) -> float:
    return BOTTOM - accuracy / HIGHEST * (BOTTOM - TOP)


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{words}</text>'


if __name__ == "__main__":
    main()
