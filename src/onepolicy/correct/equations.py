"""Corrections as formulas, and their settings in other trainers. Loads no torch."""

from __future__ import annotations

from typing import Any

from onepolicy.config.correction import (
    STATISTICS,
    CorrectionConfig,
    Gate,
    Weight,
    correction_presets,
)
from onepolicy.correct.presets import preset

FRAMEWORKS = {
    "verl": "verl 0.9.1",
    "miles": "miles / slime",
    "trl": "TRL 1.16",
    "openrlhf": "OpenRLHF 0.11.2",
    "nemo": "NeMo-RL",
}


def equation(config: CorrectionConfig) -> list[str]:
    """Return the correction as formulas, one a line. N is the original count of slots."""
    numerator = config.ratio.removesuffix("/rollout")
    lines = [f"rho_t = pi_{numerator}(a_t) / pi_rollout(a_t)"]
    lines += [f"keep {_gate(gate)}" for gate in config.gates]
    if config.weight.level != "none":
        lines.append(f"w_t = {_weight(config.weight)}")
    if config.normalise == "self":
        lines.append("w_t <- w_t N / sum of kept w")
    elif config.normalise == "batch":
        lines.append("w_t <- w_t / mean of w before the gates")
    total, count = "sum of slots", "N"
    if config.gates or config.weight.rejects:
        total = "sum of kept slots"
    if config.denominator == "kept":
        count = "N_kept"
    return [*lines, f"loss = {total} {_summand(config)} / {count}"]


def _summand(config: CorrectionConfig) -> str:
    """Return one slot's term of the loss."""
    w = ""
    if config.weight.level != "none" or config.normalise != "none":
        w = "w_t "
    if config.surrogate == "any":
        return f"{w}surrogate_t"
    if config.surrogate == "ppo":
        return "surrogate_t(r = rho_t)"
    if config.centering == "none":
        return f"-A_t {w}log pi_new(a_t)"
    return f"-A_t ({w}log pi_new(a_t) - E_rollout[w log pi_new])"


def _weight(weight: Weight) -> str:
    body = {
        "token": "rho_t",
        "turn": "product of rho over the turn",
        "geometric": "exp(mean of log rho over the sequence)",
        "sequence": "product of rho over the sequence",
    }[weight.level]
    low, high = weight.low, weight.high
    if not weight.bounded:
        return body
    if weight.outside == "zero":
        return f"{body} where {_between('it', low, high)}, else rejected"
    if low is None:
        return f"min({body}, {high:g})"
    if high is None:
        return f"max({body}, {low:g})"
    return f"clip({body}, {low:g}, {high:g})"


def _gate(gate: Gate) -> str:
    if gate.statistic == "ratio":
        value = {"none": "rho_t", "sum": "product of rho", "mean": "exp(mean of log rho)"}.get(
            gate.aggregate, f"{gate.aggregate} of rho"
        )
    else:
        value = STATISTICS[gate.statistic].formula
        if gate.aggregate not in ("none", "budget"):
            value = f"{gate.aggregate} of {value}"
    if gate.aggregate == "budget":
        return f"the slots of smallest {value} whose mean <= {gate.high:g}"
    numerator = {"new/rollout": " with pi_new as trainer"}.get(gate.ratio or "", "")
    when = {
        "always": "",
        "negative": " (only where A < 0)",
        "positive": " (only where A > 0)",
        "toward": " (upper bound where A > 0, lower where A < 0)",
    }[gate.when]
    units = {"token": "slots"}.get(gate.scope, f"{gate.scope}s")
    return f"{units} where {_between(value, gate.low, gate.high)}{when}{numerator}"


def _between(value: str, low: float | None, high: float | None) -> str:
    text = value
    if low is not None:
        text = f"{low:g} <= {text}"
    if high is not None:
        text = f"{text} <= {high:g}"
    return text


def show(name: str) -> str:
    """Return the text that `onepolicy config preset NAME` prints."""
    config = preset(name)
    assert config.preset is not None
    row = correction_presets()[config.preset]
    settings = config.model_dump(exclude_defaults=True, exclude={"preset"})
    lines = [
        f"{config.preset}: {row['source']}",
        "",
        "[correction]",
        f'preset = "{config.preset}"  # which is',
    ]
    lines += [f"# {key} = {_toml(value)}" for key, value in settings.items()] or [
        "# nothing weighted or rejected"
    ]
    lines += ["", *equation(config), ""]
    if config.live:
        lines += [f"evaluated in the loss, with surrogate: {config.surrogate}", ""]
    width = max(map(len, FRAMEWORKS.values()))
    lines += [f"{title:{width}}  {_foreign(row[key])}" for key, title in FRAMEWORKS.items()]
    return "\n".join(lines)


def _foreign(text: str) -> str:
    if not text.startswith("cannot"):
        return text
    reason = text.removeprefix("cannot").removeprefix(":").strip()
    if not reason:
        return "cannot express it"
    return f"cannot express it: {reason}"


def show_all() -> str:
    """Return all presets with their sources, one a line."""
    width = max(map(len, correction_presets()))
    return "\n".join(
        f"{name:{width}}  {row['source']}" for name, row in correction_presets().items()
    )


def _toml(value: Any) -> str:
    match value:
        case dict():
            fields = ", ".join(f"{k} = {_toml(v)}" for k, v in value.items() if v is not None)
            return f"{{ {fields} }}"
        case list() | tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case str():
            return f'"{value}"'
        case _:
            return f"{value}"


def markdown_table() -> str:
    """Return the preset table of docs/corrections.md."""
    lines = [
        "| preset | correction | surrogate | same in verl | source |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in correction_presets().items():
        config = preset(name)
        parts = equation(config)[1:-1]
        if config.surrogate == "ppo":
            parts.append("r = new / rollout in the surrogate")
        if config.centering != "none":
            parts.append("minus the rollout's mean score")
        formula = "; ".join(parts) or "no weights, no gates"
        cells = [f"`{name}`", formula, config.surrogate, _foreign(row["verl"]), row["source"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
