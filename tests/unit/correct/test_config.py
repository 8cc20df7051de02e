"""Corrections: presets can be changed, printed and read back."""

import pytest

from onepolicy.cli import main
from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.config.correction import PRESET_ALIASES, correction_presets
from onepolicy.correct.equations import FRAMEWORKS, equation
from onepolicy.correct.presets import preset

TOKEN = {"weight": {"level": "token"}}

WANTED = """
    recompute vanilla-is tis ppo-is cis icepop seq-tis seq-mis trl-default geo-rs geo-rs-token-tis
    seq-mask-tis k3-rs trm mis veto nemo-seq-error opsm ipo dppo-tv miles-moe miles-moe-bn
    miles-moe-wide miles-moe-tis kpop flash-reinforce m2po pg-tis pg-seq-tis cispo-rollout
    score-centering score-centering-tis k3-rs-token-tis
"""


def test_one_sided_bounds_are_legal() -> None:
    for side in ({"low": 0.5}, {"high": 2.0}):
        CorrectionConfig.model_validate({"weight": {"level": "token", "outside": "zero"} | side})
        CorrectionConfig.model_validate({"gates": [{"statistic": "ratio"} | side]})


def test_every_preset_round_trips_and_prints_itself(capsys, subtests) -> None:
    for name in correction_presets():
        with subtests.test(name):
            config = preset(name)
            assert config.name == name
            assert CorrectionConfig.model_validate_json(config.model_dump_json()) == config
            assert main(["config", "preset", name]) == 0
            printed = capsys.readouterr().out
            assert [line for line in equation(config) if line not in printed] == []
            for key, title in FRAMEWORKS.items():
                text = correction_presets()[name][key]
                if text.startswith("cannot"):
                    text = "cannot express it"
                assert title in printed
                assert text in printed


def test_every_row_of_the_table_is_there(capsys) -> None:
    assert set(correction_presets()) == set(WANTED.split())
    assert set(PRESET_ALIASES.values()) <= set(correction_presets())
    assert main(["config", "preset"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(correction_presets())


def test_printed_settings_are_the_preset() -> None:
    """The settings that `config preset` shows as comments are the same correction."""
    for name in correction_presets():
        config = preset(name)
        settings = config.model_dump(exclude_defaults=True, exclude={"preset"})
        spelled = CorrectionConfig.model_validate(settings)
        assert spelled == config.model_copy(update={"preset": None})


def test_changing_a_preset() -> None:
    wide = preset("tis", weight={"high": 3.0})
    assert (wide.weight.level, wide.weight.high, wide.name) == ("token", 3.0, "tis (changed)")
    assert preset("tis").weight.high == 2.0
    assert preset("off") == preset("recompute")
    assert CorrectionConfig().name == "recompute"
    assert CorrectionConfig.model_validate(TOKEN).name == "custom"
    assert preset("bypass").name == "ppo-is"
    for name, more, words in (
        ("tsi", {}, "'tsi'; there are recompute, vanilla-is"),
        ("tis", {"weigth": {"high": 3}}, "did you mean weight"),
        ("tis", {"weight": {"high": 0.5}}, "leave out 1"),
    ):
        with pytest.raises(UsageError, match=words):
            preset(name, **more)


EQUATIONS = {
    "recompute": """rho_t = pi_old(a_t) / pi_rollout(a_t)
        loss = sum of slots surrogate_t / N""",
    "icepop": """w_t = rho_t where 0.5 <= it <= 5, else rejected
        loss = sum of kept slots w_t surrogate_t / N""",
    "cis": "w_t = clip(rho_t, 0.5, 2)",
    "ppo-is": """rho_t = pi_new(a_t) / pi_rollout(a_t)
        loss = sum of slots surrogate_t(r = rho_t) / N""",
    "pg-tis": """w_t = min(rho_t, 2)
        loss = sum of slots -A_t w_t log pi_new(a_t) / N""",
    "dppo-tv": "keep slots where -0.2 <= p_trainer - p_rollout <= 0.2 "
    "(upper bound where A > 0, lower where A < 0)",
    "veto": "keep sequences where 0.0001 <= min of rho",
    "miles-moe-bn": "w_t <- w_t / mean of w before the gates",
}


def test_equations(subtests) -> None:
    for name, lines in EQUATIONS.items():
        with subtests.test(name):
            assert set(map(str.strip, lines.splitlines())) <= set(equation(preset(name)))


def test_config_preset_refuses_two_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "preset", "tis", "mis"]) == 2
    assert "one name, not tis mis" in capsys.readouterr().err
    assert main(["config", "preset", "tsi"]) == 2
