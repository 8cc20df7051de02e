"""Corrections as formulas, and their settings in other trainers. Loads no torch."""

from __future__ import annotations

from onepolicy.config.correction import STATISTICS, CorrectionConfig, Gate, Weight
from onepolicy.config.presets import (
    correction_presets,
    framework_name,
    frameworks,
    objective_presets,
    offered_corrections,
    toml_lines,
)
from onepolicy.correct.presets import preset

FRAMEWORKS = {name: row["title"] for name, row in frameworks().items() if row.get("rows")}
"""Frameworks whose settings every row of corrections.toml gives, or says that there are none."""
NAMED = {name: row["title"] for name, row in frameworks().items()}
"""Frameworks that `translations` knows."""


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
    if config.gates or config.weight.outside == "zero":
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
    lines = [f"{config.preset}: {row['source']}", "", "[correction]"]
    if "question" in row:
        settings = toml_lines(config.model_dump(exclude_defaults=True, exclude={"preset"}))
        lines.append(f'preset = "{config.preset}"  # which is')
        lines += [f"# {line}" for line in settings] or ["# nothing weighted or rejected"]
    else:
        lines += toml_lines(row["settings"])
    lines += ["", *equation(config), ""]
    if config.live:
        lines += [f"evaluated in the loss, with surrogate: {config.surrogate}", ""]
    width = max(map(len, FRAMEWORKS.values()))
    known = [(title, row[key]) for key, title in NAMED.items() if key in row]
    lines += [f"{title:{width}}  {_foreign(theirs)}" for title, theirs in known]
    return "\n".join(lines)


def translations(framework: str) -> str:
    """Return a framework's names of corrections and objectives, each with our settings.

    Raises UsageError for a framework that is not in NAMED.
    """
    framework = framework_name(framework)
    blocks = [f"# {NAMED[framework]} -> onepolicy"]
    if "corrections" in frameworks()[framework]:
        blocks[0] += f"\n# corrections: {frameworks()[framework]['corrections']}"
    for section, rows in (("correction", correction_presets()), ("objective", objective_presets())):
        for name, row in rows.items():
            theirs = row.get(framework, "cannot")
            if theirs.startswith("cannot"):
                continue
            ours = {"preset": name}
            if section == "correction" and "question" not in row:
                ours = row["settings"]
            blocks.append("\n".join([f"# {theirs}", f"[{section}]", *toml_lines(ours)]))
    return "\n\n".join(blocks)


def in_their_settings(settings: str, framework: str) -> str:
    """Return settings of ours, as a verdict advises them, as a framework's users write them.

    settings: `replay.mode=r3`, `correction.preset=NAME`, or both with a space between them.
    framework: a name of frameworks.toml. Empty without settings.
    """
    row, parts = frameworks()[framework], []
    for setting in settings.split():
        name, _, value = setting.partition("=")
        if name == "replay.mode":
            parts.append(f"replay is {row['replay']}")
        else:
            parts.append(f"{value} is {_their_correction(value, row, framework)}")
    if not parts:
        return ""
    return f"In {row['title']}: {'; '.join(parts)}"


def _their_correction(name: str, row: dict[str, str], framework: str) -> str:
    """Return a preset in the framework's own setting, in onepolicy's adapter, or either."""
    theirs = correction_presets()[name].get(framework, "cannot")
    ways = []
    if not theirs.startswith("cannot"):
        ways.append(_spelled(theirs, row))
    if "adapter" in row:
        ways.append(row["adapter"].replace("{}", name))
    return ", or ".join(ways) or "not to be had there"


def _spelled(theirs: str, row: dict[str, str]) -> str:
    """Return a framework's settings of corrections.toml as its users write them."""
    if "each" not in row:
        return theirs
    words = [word.partition("=") for word in theirs.partition(" (")[0].split()]
    if "all" not in row:  # on a command line, where a list is several words
        words = [(name, "", value.strip("[]").replace(",", " ")) for name, _, value in words]
        return " ".join(_each(row["each"], name, value) for name, _, value in words)
    named = [(name, value if value[:1].isdigit() else f'"{value}"') for name, _, value in words]
    return row["all"].replace("{}", ", ".join(_each(row["each"], *pair) for pair in named))


def _each(template: str, name: str, value: str) -> str:
    return template.replace("NAME", name).replace("VALUE", value)


def _foreign(text: str) -> str:
    if not text.startswith("cannot"):
        return text
    reason = text.removeprefix("cannot").removeprefix(":").strip()
    if not reason:
        return "cannot express it"
    return f"cannot express it: {reason}"


def show_all() -> str:
    """Return the presets to choose among with their sources, grouped by the question they answer.

    A line that begins with a name is a preset.
    """
    width = max(len(name) for names in offered_corrections().values() for name in names)
    groups = [
        "\n".join([f"# {question}", *(f"{name:{width}}  {_source(name)}" for name in names)])
        for question, names in offered_corrections().items()
    ]
    rest = "# Equations of other frameworks: onepolicy config preset --from FRAMEWORK"
    return "\n\n".join([*groups, f"{rest}\n# FRAMEWORK: {', '.join(NAMED)}"])


def _source(name: str) -> str:
    return str(correction_presets()[name]["source"])


def markdown_lists() -> str:
    """Return the lists of presets of docs/corrections.md, one a question."""
    return "\n\n".join(
        "\n".join([f"**{question}**", "", *map(_markdown_line, names)])
        for question, names in offered_corrections().items()
    )


def _markdown_line(name: str) -> str:
    config = preset(name)
    parts = equation(config)[1:-1]
    if config.surrogate == "ppo":
        parts.append("r = new / rollout in the surrogate")
    if config.centering != "none":
        parts.append("minus the rollout's mean score")
    if config.surrogate != "any":
        parts.append(f"surrogate {config.surrogate}")
    formula = "; ".join(parts) or "no weights, no gates"
    return f"- `{name}`: {formula}. *{_source(name)}*"
