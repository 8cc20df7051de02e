"""Play one healthy run and six sick ones, and draw each beside the healthy one for docs/healthy.md.

    python benchmarks/healthy.py            # plays what benchmarks/healthy.jsonl lacks, then draws
    python benchmarks/healthy.py --show     # draws only; a test compares

Every run is recipes/routing_gap.toml from the policy in the tree, one thread, 120 steps, seed 0. An
arm's settings are its sickness. The pictures have both themes: a page's own, by
prefers-color-scheme.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "healthy.jsonl"
FIGURES = ROOT / "docs" / "figures"
COMMON = (
    "model.path=benchmarks/evidence/policies/one-of-8",
    *("steps=120", "eval.every=0", "checkpoint.every=120", "log.report=false"),
)
UNCORRECTED = ("replay.mode=off", "correction.preset=recompute")


@dataclass(frozen=True)
class Arm:
    """A run: what is wrong with it, and the settings that make it so."""

    title: str
    settings: tuple[str, ...]


ARMS = {
    "healthy": Arm("healthy", ()),
    "experts": Arm(
        "other experts in the engine, nothing corrected",
        (*UNCORRECTED, "rollout.engine.dtype=float32", "rollout.pressure.scale=0.6"),
    ),
    "rounded": Arm(
        "weights of 3 bits in the engine, no correction",
        (
            *("replay.mode=off", "correction.preset=ppo-is"),
            *("rollout.quant.format=simulated", "rollout.quant.bits=3"),
        ),
    ),
    "old": Arm("old weights in the engine", ("rollout.max_staleness=8", "replay.min_agreement=0")),
    "rate": Arm("learning rate too high", ("optim.lr=2e-3",)),
    "bonus": Arm("entropy bonus too large", ("objective.entropy_coef=0.3",)),
    "minibatches": Arm(
        "large updates, many a batch",
        ("rollout.prompts_per_step=8", "objective.num_minibatches=8", "optim.lr=6e-4"),
    ),
}


@dataclass(frozen=True)
class Panel:
    """A metric and how it is drawn. `floor`: smallest value of a logarithmic axis."""

    name: str
    metrics: tuple[str, ...]  # summed
    log: bool = False
    floor: float = 0.0
    lines: tuple[float, ...] = ()  # thresholds


PANELS = (
    Panel("k3 [nats]", ("mismatch/k3",), log=True, floor=1e-8, lines=(1e-3,)),
    Panel("ESS [share]", ("mismatch/ess",), lines=(0.5,)),
    Panel("gradient norm", ("train/grad_norm",), log=True, floor=1e-2),
    Panel("entropy [nats]", ("train/entropy",)),
    Panel("response length [tokens]", ("train/response_length",)),
    Panel("clipped slots [share]", ("train/clip_high", "train/clip_low")),
)
WIDTH, HEIGHT = 900, 360
STYLE = """<style>
text{font:13px sans-serif;fill:#1d2430}.m{font-size:12px;fill:#5b6575}
.t{font:600 17px sans-serif}.paper{fill:#fff}.line{stroke:#e4e7ec;fill:none}
.limit{stroke:#5b6575;stroke-dasharray:4 4}.well{stroke:#7d8aa0;fill:none;stroke-width:1.5}
.sick{stroke:#d9771f;fill:none;stroke-width:2}.sickt{fill:#b45f12}
@media (prefers-color-scheme:dark){
text{fill:#e6e9ee}.m{fill:#98a2b3}.paper{fill:#181d25}.line{stroke:#2b323d}
.limit{stroke:#98a2b3}.well{stroke:#8fa3bf}.sick{stroke:#ffb266}.sickt{fill:#ffb266}}
</style>"""
Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--show", action="store_true", help="play nothing")
    options = parser.parse_args()
    runs = finished_runs()
    if not options.show:
        for name in ARMS:
            if name not in runs:
                runs[name] = played(name)
                lines = (json.dumps(runs[each]) for each in ARMS if each in runs)
                RESULTS.write_text("\n".join(lines) + "\n")
    for name in ARMS:
        if name != "healthy":
            figure_of(name).write_text(drawn(name, runs), encoding="utf-8")
            print(f"wrote {figure_of(name).relative_to(ROOT)}", file=sys.stderr)


def finished_runs() -> dict[str, Run]:
    """Return the runs in the tree by their arm."""
    if not RESULTS.exists():
        return {}
    found = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
    return {run["arm"]: run for run in found}


def played(name: str) -> Run:
    """Play an arm and return its curves, three digits a value; None where a step has no value."""
    out = ROOT / "runs" / "healthy" / name
    shutil.rmtree(out, ignore_errors=True)
    settings = [*COMMON, *ARMS[name].settings, f"out={out}"]
    words = [sys.executable, "-m", "onepolicy", "train", "recipes/routing_gap.toml", *settings]
    ended = subprocess.run(words, cwd=ROOT, check=False)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "mismatch/k3" in row]
    curves = {panel.name: [value(row, panel) for row in rows] for panel in PANELS}
    return {
        "arm": name,
        "settings": [*COMMON, *ARMS[name].settings],
        "status": ended.returncode,
        "curves": curves,
    }


def value(row: dict[str, float], panel: Panel) -> float | None:
    """Return a metric of a step, None if it has none or no finite one."""
    found = [row[metric] for metric in panel.metrics if row.get(metric) is not None]
    if not found or not math.isfinite(sum(found)):
        return None
    return float(f"{sum(found):.3g}")


def figure_of(name: str) -> Path:
    return FIGURES / f"sick_{name}.svg"


def drawn(name: str, runs: dict[str, Run]) -> str:
    """Return the picture of a sick run: six panels, the healthy run behind it."""
    title = ARMS[name].title
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{title}, beside a healthy run">',
        STYLE,
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        text(16, 26, title, "t sickt"),
        text(WIDTH - 16, 26, "grey: a healthy run of the same policy; 120 steps", "m", "end"),
    ]
    for at, panel in enumerate(PANELS):
        left, top = 62 + at % 3 * 292, 62 + at // 3 * 152
        curves = {each: runs[each]["curves"][panel.name] for each in ("healthy", name)}
        parts += panel_drawn(panel, left, top, curves["healthy"], curves[name])
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel_drawn(
    panel: Panel, left: int, top: int, well: list[float | None], sick: list[float | None]
) -> list[str]:
    """Return one panel, 216 x 104, at (left, top)."""
    width, height = 216, 104
    heights = [position(panel, each) for each in (*well, *sick, *panel.lines) if each is not None]
    low, high = min(heights), max(heights)
    if not panel.log:
        low = min(low, 0.0)
    high = max(high, low + 1e-3)

    def at(number: float) -> float:
        return top + height - (position(panel, number) - low) / (high - low) * height

    parts = [text(left, top - 9, panel.name)]
    for mark in marks(panel, low, high):
        y = at(mark)
        parts.append(f'<path class="line" d="M{left} {y:.1f}H{left + width}"/>')
        parts.append(text(left - 6, y + 4, f"{mark:g}", "m", "end"))
    parts += [
        f'<path class="limit" d="M{left} {at(limit):.1f}H{left + width}"/>' for limit in panel.lines
    ]
    for style, curve in (("well", well), ("sick", sick)):
        points = [
            (left + step / 119 * width, at(number))
            for step, number in enumerate(curve)
            if number is not None
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path class="{style}" d="M{path}"/>')
    return parts


def position(panel: Panel, number: float) -> float:
    """Return where a value stands on its axis."""
    if panel.log:
        return math.log10(max(number, panel.floor))
    return number


def marks(panel: Panel, low: float, high: float) -> list[float]:
    """Return two to four values for an axis."""
    if panel.log:
        first, last = math.ceil(low), math.floor(high)
        step = max(1, math.ceil((last - first + 1) / 4))
        return [10.0**each for each in range(first, last + 1, step)]
    step = 10 ** math.floor(math.log10(high - low))
    for factor in (0.2, 0.5, 1, 2, 5):
        if (high - low) / (factor * step) <= 4:
            step *= factor
            break
    first = math.ceil(low / step)
    return [round(each * step, 6) for each in range(first, math.floor(high / step) + 1)]


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{words}</text>'


if __name__ == "__main__":
    main()
