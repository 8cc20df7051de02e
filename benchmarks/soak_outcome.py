"""Results of soak.py: the conditions that held, the cost of the kills, reward over steps."""

import json
import math
import statistics
from pathlib import Path

import torch
from safetensors.torch import load_file

from onepolicy.report.figures.parts import (
    NEUTRAL,
    REPLAY,
    ROLLOUT,
    TRAINER,
    Figure,
    LineStyle,
    axis,
    line,
    markers,
)

TAIL = 1 << 16  # bytes, more than a line
SAMPLES = 32  # a step
# float32 on both sides: rounding leaves 2e-13, the weights of one update before 4e-7 and more
K3 = 1e-9
SMOOTH = 25  # steps
LOOKS = {
    "driver": ROLLOUT,
    "driver, resuming": LineStyle(ROLLOUT.color, "", "circle-open", ""),
    "rank": TRAINER,
    "server": REPLAY,
    "driver and server": NEUTRAL,
}
CURVES = {  # folder -> name, look, width
    "whole": ("in peace", LineStyle("@soft", "solid", "", ""), 7),
    "killed": ("with kills", LineStyle("@ink", "solid", "", ""), 1.8),
}


def outcome(out: Path, steps: int, strikes: list[dict]) -> dict:
    """Return the conditions (true or false) and the costs of the run in OUT/killed, compared with
    OUT/whole if it exists."""
    rows = lines(out / "killed" / "metrics.jsonl")
    folder = out / "killed" / "checkpoints" / f"step_{steps:05d}"
    tensors = tensors_of(folder)
    held = {
        "every_step_once": [row["step"] for row in rows] == list(range(1, steps + 1)),
        "samples_exact": all(samples_in(row) == SAMPLES for row in rows),
        "weights_finite": bool(tensors)
        and all(bool(torch.isfinite(t).all()) for t in tensors.values()),
        "sampled_from_the_learners_weights": all(
            row["mismatch/k3"] < K3
            and row["replay/missing_samples"] == row["replay/native_rows"] == 0
            for row in rows
        ),
    }
    if (out / "whole").exists():
        held |= equal_to_the_bit(out, tensors, rows)
    return {"held": held | rose(rows), "reward": reward(rows), "cost": cost(strikes)}


def failed(found: dict) -> list[str]:
    return [name for name, held in found["held"].items() if not held]


def samples_in(row: dict) -> float:
    """Return the number of samples: trainable slots / mean tokens of a sample; the two are counted
    separately."""
    return row["correction/slots"] / row["train/response_length"]


def equal_to_the_bit(out: Path, tensors: dict[str, torch.Tensor], rows: list[dict]) -> dict:
    whole, killed = out / "whole", out / "killed"
    first, steps = lines(whole / "metrics.jsonl"), len(rows)
    others = tensors_of(whole / "checkpoints" / f"step_{steps:05d}")
    same = tensors.keys() == others.keys() and all(
        torch.equal(tensors[name], others[name]) for name in tensors
    )
    return {
        "metrics_bit_equal": list(map(timeless, first)) == list(map(timeless, rows)),
        "weights_bit_equal": same,
        "samples_equal": (whole / "samples.jsonl").read_bytes()
        == (killed / "samples.jsonl").read_bytes(),
    }


def timeless(row: dict) -> dict:
    return {k: v for k, v in row.items() if not k.startswith("time/") and "per_second" not in k}


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the model, the optimiser and their shards: `file/name` -> tensor."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {
        f"{file.relative_to(checkpoint)}/{name}": t
        for file in files
        for name, t in load_file(file).items()
    }


def tenths(rows: list[dict]) -> tuple[list[float], list[float]]:
    """Return rewards of the first and of the last tenth of the steps, at least two each."""
    rewards, tenth = [row["train/reward"] for row in rows], max(2, len(rows) // 10)
    return rewards[:tenth], rewards[-tenth:]


def rose(rows: list[dict]) -> dict:
    """Return whether the reward rose by more than three standard errors of the difference."""
    first, last = tenths(rows)
    error = math.sqrt(
        statistics.variance(first) / len(first) + statistics.variance(last) / len(last)
    )
    return {"reward_rose": statistics.mean(last) - statistics.mean(first) > 3 * error}


def reward(rows: list[dict]) -> dict:
    first, last = tenths(rows)
    return {"first_tenth": statistics.mean(first), "last_tenth": statistics.mean(last)}


def cost(strikes: list[dict]) -> dict:
    """Return, for all kills and per kind of victim: how many, steps computed again, seconds until a
    new step."""
    kinds = dict.fromkeys(each["whom"] for each in strikes)
    return {
        name: cost_of([each for each in strikes if name in ("all", each["whom"])])
        for name in ("all", *kinds)
    }


def cost_of(strikes: list[dict]) -> dict:
    seconds = [each["seconds"] for each in strikes if each["seconds"] is not None]
    found = {"kills": len(strikes), "steps_recomputed": sum(each["lost"] for each in strikes)}
    if seconds:
        found |= {"seconds_median": statistics.median(seconds), "seconds_largest": max(seconds)}
    return found


def figure(out: Path, strikes: list[dict], found: dict) -> Figure:
    """Draw the moving average of the reward, with every kill on it, over the undisturbed run's."""
    curves = {
        name: smooth(lines(out / name / "metrics.jsonl"))
        for name in CURVES
        if (out / name).exists()
    }
    data = []
    for name, curve in curves.items():
        words, look, width = CURVES[name]
        drawn = line(words, list(range(1, len(curve) + 1)), curve, look)
        data.append(drawn | {"line": drawn["line"] | {"width": width}})
    for whom, look in LOOKS.items():
        steps = [max(1, each["step"]) for each in strikes if each["whom"] == whom]
        at = [curves["killed"][step - 1] for step in steps]
        if steps:
            size = 15 if look.symbol.endswith("-open") else 10  # a ring around the kill before it
            data.append(
                markers(f"killed: {whom} ({len(steps)})", steps, at, look, marker={"size": size})
            )
    note = (
        f"{len(curves['killed'])} steps of {SAMPLES} samples, "
        f"{len(strikes)} kills at random moments; mean of the "
        f"last {SMOOTH} steps. "
    )
    if found["held"].get("metrics_bit_equal"):
        note += "The two runs are equal to the bit in every metric but times."
    layout = {"xaxis": axis("step"), "yaxis": axis("reward", range=[0, 1])}
    name, title = out.name.replace("-", "_"), "Killed again and again, the run learns all the same"
    return Figure(name, title, note, data, layout, "wide")


def smooth(rows: list[dict]) -> list[float]:
    rewards = [row["train/reward"] for row in rows]
    return [
        statistics.mean(rewards[max(0, end - SMOOTH) : end]) for end in range(1, len(rewards) + 1)
    ]


def lines(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def last_step(out: Path) -> int:
    """Return the last complete step of a log that is being written."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        complete = file.read().split(b"\n")[:-1]
    return json.loads(complete[-1])["step"] if complete else 0


def newest_checkpoint(out: Path) -> int:
    return max(
        (int(path.name.removeprefix("step_")) for path in out.glob("checkpoints/step_*")), default=0
    )
