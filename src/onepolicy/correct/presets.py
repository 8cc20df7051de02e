"""Corrections by name, their equation, and what means the same elsewhere. Loads no torch."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from onepolicy.config.base import UsageError
from onepolicy.config.correction import ALIASES, CorrectionConfig, Gate, Weight, presets
from onepolicy.config.load import describe as describe_error
from onepolicy.config.near import did_you_mean

FRAMEWORKS = {
    "verl": "verl 0.9.1",
    "miles": "miles / slime",
    "trl": "TRL 1.16",
    "openrlhf": "OpenRLHF 0.11.2",
    "nemo": "NeMo-RL",
}
_MEANING = {
    "k1": "-log rho",
    "k2": "(log rho)^2 / 2",
    "k3": "rho - 1 - log rho",
    "exp_abs": "exp |log rho|",
    "prob_diff": "p_trainer - p_rollout",
    "tv": "|p_trainer - p_rollout|",
    "binary_kl": "KL(Bern(p_rollout) || Bern(p_trainer))",
    "binary_kl_sym": "max of both KL(Bern || Bern)",
    "trainer_prob": "p_trainer",
}


def preset(name: str, **override: Any) -> CorrectionConfig:
    """The named correction, with single settings replaced: `preset("tis", weight={"high": 3.0})`."""
    if not isinstance(name, str) or ALIASES.get(name, name) not in presets():
        known = f"{', '.join(presets())}{did_you_mean(name, presets())}"
        raise UsageError(f"preset: no correction is called {name!r}; there are {known}")
    try:
        return CorrectionConfig.model_validate({"preset": name, **override})
    except ValidationError as error:
        raise UsageError(f"preset {name!r}: {describe_error(error, CorrectionConfig)}") from None


def check_config(caller: str, config: object) -> None:
    """UsageError if what was given as a correction is none."""
    if isinstance(config, CorrectionConfig):
        return
    if isinstance(config, str):
        raise UsageError(
            f"{caller}: config is the text {config!r}, expected a correction; pass op.preset({config!r})"
        )
    if config is None:
        raise UsageError(
            f"{caller}: config is None, expected a correction; one without a live part has none to give "
            "(correction.live says whether it has), and op.preset('recompute') corrects nothing"
        )
    raise UsageError(
        f"{caller}: config is {type(config).__name__}, expected a correction as op.preset(name) gives one"
    )


def equation(config: CorrectionConfig) -> list[str]:
    """The correction as formulas, one a line. l_t is the log-ratio of slot t; N the original count of slots."""
    new = "new" if config.ratio == "new/rollout" else "old"
    lines = [f"rho_t = pi_{new}(a_t) / pi_rollout(a_t)"]
    lines += [f"keep {_gate(gate)}" for gate in config.gates]
    if config.weight.level != "none":
        lines.append(f"w_t = {_weight(config.weight)}")
    if config.normalise == "self":
        lines.append("w_t <- w_t N / sum of kept w")
    w = "w_t " if config.weight.level != "none" or config.normalise == "self" else ""
    total = "sum of kept slots" if config.gates or config.weight.rejects else "sum of slots"
    count = "N_kept" if config.denominator == "kept" else "N"
    match config.surrogate:
        case "any":
            body = f"{w}surrogate_t"
        case "ppo":
            body = "surrogate_t(r = rho_t)"
        case "pg":
            centre = "" if config.centering == "none" else " - E_rollout[w log pi_new]"
            body = f"-A_t ({w}log pi_new(a_t){centre})" if centre else f"-A_t {w}log pi_new(a_t)"
    return [*lines, f"loss = {total} {body} / {count}"]


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
    return f"max({body}, {low:g})" if high is None else f"clip({body}, {low:g}, {high:g})"


def _gate(gate: Gate) -> str:
    if gate.statistic == "ratio":
        value = {"none": "rho_t", "sum": "product of rho", "mean": "exp(mean of log rho)"}.get(
            gate.aggregate, f"{gate.aggregate} of rho"
        )
    else:
        value = _MEANING[gate.statistic]
        value = value if gate.aggregate in ("none", "budget") else f"{gate.aggregate} of {value}"
    if gate.aggregate == "budget":
        return f"the slots of smallest {value} whose mean <= {gate.high:g}"
    live = " with pi_new as trainer" if gate.ratio == "new/rollout" else ""
    when = {
        "always": "",
        "negative": " (only where A < 0)",
        "positive": " (only where A > 0)",
        "toward": " (upper bound where A > 0, lower where A < 0)",
    }[gate.when]
    where = "slots where" if gate.scope == "token" else f"{gate.scope}s where"
    return f"{where} {_between(value, gate.low, gate.high)}{when}{live}"


def _between(value: str, low: float | None, high: float | None) -> str:
    left = "" if low is None else f"{low:g} <= "
    return f"{left}{value}" + ("" if high is None else f" <= {high:g}")


def show(name: str) -> str:
    """What `onepolicy config preset NAME` prints."""
    config = preset(name)
    assert config.preset is not None
    row = presets()[config.preset]
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
    reason = text.removeprefix("cannot").removeprefix(":").strip()
    return (
        text
        if not text.startswith("cannot")
        else "cannot express it" + (f": {reason}" if reason else "")
    )


def show_all() -> str:
    width = max(map(len, presets()))
    return "\n".join(f"{name:{width}}  {row['source']}" for name, row in presets().items())


def _toml(value: Any) -> str:
    match value:
        case dict():
            return (
                "{ "
                + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items() if v is not None)
                + " }"
            )
        case list() | tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case str():
            return f'"{value}"'
        case _:
            return f"{value}"


def markdown_table() -> str:
    """The preset table of docs/corrections.md."""
    lines = [
        "| preset | correction | surrogate | same in verl | source |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in presets().items():
        config = preset(name)
        parts = equation(config)[1:-1]
        parts += ["r = new / rollout in the surrogate"] if config.surrogate == "ppo" else []
        parts += ["minus the rollout's mean score"] if config.centering != "none" else []
        what = "; ".join(parts) or "no weights, no gates"
        cells = [f"`{name}`", what, config.surrogate, _foreign(row["verl"]), row["source"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
