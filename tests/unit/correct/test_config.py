"""The correction section: contradictions and no-ops are refused, presets can be changed, printed
and read back."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from onepolicy.cli import main
from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.config.correction import PRESET_ALIASES, correction_presets
from onepolicy.correct.equations import FRAMEWORKS, equation
from onepolicy.correct.presets import preset

TOKEN = {"weight": {"level": "token"}}
GATE = {"statistic": "k3", "high": 0.1}

WANTED = {
    *(
        "recompute",
        "vanilla-is",
        "tis",
        "ppo-is",
        "cis",
        "icepop",
        "seq-tis",
        "seq-mis",
        "trl-default",
        "geo-rs",
    ),
    *(
        "geo-rs-token-tis",
        "seq-mask-tis",
        "k3-rs",
        "trm",
        "mis",
        "veto",
        "nemo-seq-error",
        "opsm",
        "ipo",
        "dppo-tv",
    ),
    *(
        "miles-moe",
        "miles-moe-bn",
        "miles-moe-wide",
        "miles-moe-tis",
        "kpop",
        "flash-reinforce",
        "m2po",
        "pg-tis",
        "pg-seq-tis",
        "cispo-rollout",
        "score-centering",
    ),
    *("score-centering-tis", "k3-rs-token-tis"),
}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"weight": {"high": 2.0}}, "low and high bound a weight, but level = none"),
        ({"weight": {"level": "token", "outside": "zero"}}, "rejects nothing without low or high"),
        ({"weight": {"level": "token", "low": 3, "high": 2}}, "low 3.0 is above high 2.0"),
        (
            {"weight": {"level": "token", "high": 0.5}},
            "leave out 1, the value where both engines agree",
        ),
        ({"weight": {"level": "token", "low": 1.5}}, "leave out 1"),
        (
            {"weight": {"level": "token", "low": 0}},
            "low 0.0 bounds nothing, the value is never below 0",
        ),
        ({"gates": [{"statistic": "k3"}]}, "neither low nor high"),
        ({"gates": [GATE | {"low": -1}]}, "never below 0"),
        ({"gates": [{"statistic": "tv", "high": 1}]}, "never above 1"),
        ({"gates": [{"statistic": "exp_abs", "high": 0.5}]}, "leave out 1"),
        (
            {"gates": [GATE | {"aggregate": "mean"}]},
            "scope = token does not go with aggregate = mean",
        ),
        (
            {"gates": [GATE | {"scope": "sequence"}]},
            "scope = sequence does not go with aggregate = none",
        ),
        ({"gates": [GATE | {"when": "toward"}]}, "needs a signed statistic"),
        (
            {"gates": [GATE | {"aggregate": "budget", "when": "negative"}]},
            "a budget is a bound `high`",
        ),
        (
            {
                "gates": [
                    {"statistic": "exp_abs", "aggregate": "sum", "scope": "sequence", "high": 9}
                ]
            },
            "only counts tokens",
        ),
        ({"gates": [GATE, GATE | {"high": 0.2}]}, "k3.token is there twice"),
        (
            {"gates": [GATE | {"ratio": "old/rollout"}], "ratio": "new/rollout"},
            "there is no old policy",
        ),
        ({"gates": [GATE], "protect": ["kl", "kl"]}, "names a term twice"),
        (TOKEN | {"gates": [GATE], "normalise": "self", "denominator": "kept"}, "already add up"),
        (TOKEN | {"ratio": "new/rollout", "normalise": "self"}, "exists one micro-batch at a time"),
        (
            {"gates": [GATE | {"ratio": "new/rollout"}], "denominator": "kept"},
            "exists one micro-batch at a time",
        ),
        (
            {"gates": [GATE | {"aggregate": "budget"}], "ratio": "new/rollout"},
            "a budget ranks the whole step",
        ),
        ({"centering": "head"}, "needs ratio = new/rollout"),
        (
            {"centering": "head", "ratio": "new/rollout", "weight": {"level": "sequence"}},
            "vocabulary of a slot",
        ),
        (
            {"centering": "head", "ratio": "new/rollout", "gates": [GATE]},
            "where this gate would have to be evaluated",
        ),
        ({"preset": "tsi"}, "none is called 'tsi'"),
        (TOKEN | {"cap": 2}, "Extra inputs are not permitted"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        CorrectionConfig.model_validate(settings)


def test_one_sided_bounds_are_legal() -> None:
    for side in ({"low": 0.5}, {"high": 2.0}):
        CorrectionConfig.model_validate({"weight": {"level": "token", "outside": "zero"} | side})
        CorrectionConfig.model_validate({"gates": [{"statistic": "ratio"} | side]})


@pytest.mark.parametrize("name", correction_presets())
def test_every_preset_round_trips_and_prints_itself(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = preset(name)
    assert config.name == name
    assert CorrectionConfig.model_validate_json(config.model_dump_json()) == config
    assert main(["config", "preset", name]) == 0
    printed = capsys.readouterr().out
    for line in equation(config):
        assert line in printed
    for key, title in FRAMEWORKS.items():
        text = correction_presets()[name][key]
        assert title in printed
        assert (text if not text.startswith("cannot") else "cannot express it") in printed


def test_every_row_of_the_table_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(correction_presets()) == WANTED
    assert set(PRESET_ALIASES.values()) <= set(correction_presets())
    assert main(["config", "preset"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(
        correction_presets()
    )


def test_printed_settings_are_the_preset() -> None:
    """Without the preset's name, the settings that `config preset` shows as comments are the same
    correction."""
    for name in correction_presets():
        config = preset(name)
        spelled = CorrectionConfig.model_validate(
            config.model_dump(exclude_defaults=True, exclude={"preset"})
        )
        assert spelled == config.model_copy(update={"preset": None})


def test_changing_a_preset() -> None:
    wide = preset("tis", weight={"high": 3.0})
    assert (wide.weight.level, wide.weight.high, wide.name) == ("token", 3.0, "tis (changed)")
    assert preset("tis").weight.high == 2.0
    assert preset("off") == preset("recompute")
    assert CorrectionConfig().name == "recompute"
    assert CorrectionConfig.model_validate(TOKEN).name == "custom"
    assert preset("bypass").name == "ppo-is"
    with pytest.raises(UsageError, match="'tsi'; there are recompute, vanilla-is"):
        preset("tsi")
    with pytest.raises(UsageError, match="did you mean weight"):
        preset("tis", weigth={"high": 3})
    with pytest.raises(UsageError, match="leave out 1"):
        preset("tis", weight={"high": 0.5})


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "recompute",
            ["rho_t = pi_old(a_t) / pi_rollout(a_t)", "loss = sum of slots surrogate_t / N"],
        ),
        (
            "icepop",
            [
                "w_t = rho_t where 0.5 <= it <= 5, else rejected",
                "loss = sum of kept slots w_t surrogate_t / N",
            ],
        ),
        ("cis", ["w_t = clip(rho_t, 0.5, 2)"]),
        (
            "ppo-is",
            [
                "rho_t = pi_new(a_t) / pi_rollout(a_t)",
                "loss = sum of slots surrogate_t(r = rho_t) / N",
            ],
        ),
        ("pg-tis", ["w_t = min(rho_t, 2)", "loss = sum of slots -A_t w_t log pi_new(a_t) / N"]),
        (
            "dppo-tv",
            [
                "keep slots where -0.2 <= p_trainer - p_rollout <= 0.2 (upper bound where A > 0, "
                "lower where A < 0)"
            ],
        ),
        ("veto", ["keep sequences where 0.0001 <= min of rho"]),
    ],
)
def test_equations(name: str, lines: list[str]) -> None:
    assert set(lines) <= set(equation(preset(name)))


def test_config_preset_refuses_two_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "preset", "tis", "mis"]) == 2
    assert "one name, not tis mis" in capsys.readouterr().err
    assert main(["config", "preset", "tsi"]) == 2
