"""Corrections: presets can be changed, printed and read back."""

import tomllib

import pytest

from onepolicy.cli import main
from onepolicy.config import CorrectionConfig, ObjectiveConfig, UsageError, Weight, presets
from onepolicy.config.presets import (
    ALIASES,
    correction_presets,
    offered_corrections,
    toml_lines,
)
from onepolicy.correct.equations import FRAMEWORKS, NAMED, equation
from onepolicy.correct.presets import preset

TOKEN = {"weight": {"level": "token"}}

OFFERED = """
    recompute tis cis icepop mis m2po k3-rs geo-rs seq-tis seq-mis trl-default ppo-is pg-tis ipo
    score-centering opsm
"""
TRANSLATED = """
    vanilla-is geo-rs-token-tis seq-mask-tis k3-rs-token-tis trm miles-moe miles-moe-bn
    miles-moe-wide miles-moe-tis veto nemo-seq-error dppo-tv kpop flash-reinforce pg-seq-tis
    cispo-rollout score-centering-tis
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
            row = correction_presets()[name]
            assert set(FRAMEWORKS) <= set(row)
            for key, title in NAMED.items():
                if key not in row:
                    assert title not in printed.splitlines()
                    continue
                text = row[key]
                if text.startswith("cannot"):
                    text = "cannot express it"
                assert title in printed
                assert text in printed


def test_every_row_of_the_table_is_there(capsys) -> None:
    offered = [name for names in offered_corrections().values() for name in names]
    assert offered == OFFERED.split()
    assert set(correction_presets()) == {*offered, *TRANSLATED.split()}
    assert set(ALIASES.values()) <= set(offered)
    assert main(["config", "preset"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line and line[0] != "#"]
    assert [line.split()[0] for line in lines] == offered
    with pytest.raises(SystemExit):
        main(["config", "--help"])
    text = capsys.readouterr().out
    assert all(f"  {question}\n" in text for question in offered_corrections())


def test_a_translated_name_works_and_says_once_what_to_write(caplog, monkeypatch) -> None:
    monkeypatch.setattr(presets, "WARNED", set())
    config = preset("miles-moe-wide", weight={"low": 0.25})
    assert preset("miles-moe-wide").weight == Weight(level="token", low=0.5, high=2.0)
    assert config.weight == Weight(level="token", low=0.25, high=2.0)
    assert (config.name, config.normalise) == ("miles-moe-wide (changed)", "batch")
    written = """write preset = "cis", gates = [{ statistic = "ratio", aggregate = "mean", """
    written += """scope = "sequence", low = 0.99, high = 1.001 }], normalise = "batch" instead"""
    assert [record.message for record in caplog.records] == [
        f"correction.preset: miles-moe-wide still works; {written}"
    ]
    preset("tis")
    assert len(caplog.records) == 1


def test_the_settings_to_write_for_a_translated_name_are_the_same_correction() -> None:
    for name in TRANSLATED.split():
        lines = toml_lines(correction_presets()[name]["settings"])
        written = CorrectionConfig.model_validate(tomllib.loads("\n".join(lines)))
        assert written.model_copy(update={"preset": name}) == preset(name), name


@pytest.mark.parametrize(
    ("framework", "theirs", "preset"),
    [
        ("skyrl", "# policy_loss_type=dppo, binary_tv, deltas 0.2", 'preset = "ipo"'),
        ("prime-rl", "# its default loss, which adds kl_tau", 'preset = "ipo"'),
        ("openrlhf", "# level=seq mode=mask gating=binary_kl threshold=[0,0.01]", "weight = "),
    ],
)
def test_a_page_of_a_trainer_names_the_row_that_is_printed(
    capsys: pytest.CaptureFixture[str], framework: str, theirs: str, preset: str
) -> None:
    assert main(["config", "preset", "--from", framework]) == 0
    assert f"{theirs}\n[correction]\n{preset}" in capsys.readouterr().out


def test_from_a_framework(capsys: pytest.CaptureFixture[str]) -> None:
    """What a trainer's settings are here. Each block is TOML of the correction or objective."""
    assert main(["config", "preset", "--from", "verl"]) == 0
    blocks = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert blocks[0].startswith("# verl 0.9.1")
    rows = [row for row in correction_presets().values() if not row["verl"].startswith("cannot")]
    assert sum("[correction]" in block for block in blocks) == len(rows)
    assert (
        "# rollout_is=token rollout_is_threshold=2.0 rollout_rs=seq_mean_k3 "
        "rollout_rs_threshold=0.01 (decoupled_k3_rs_token_tis)\n"
        '[correction]\npreset = "k3-rs"\nweight = { level = "token", high = 2.0 }' in blocks
    )
    for block in blocks[1:]:
        tree = tomllib.loads(block)
        CorrectionConfig.model_validate(tree.get("correction", {}))
        ObjectiveConfig.model_validate(tree.get("objective", {}))
    for words, reason in (
        (["preset", "--from"], "give one of verl, miles, trl"),
        (["preset", "--from", "vrel"], "did you mean verl?"),
        (["preset", "tis", "--from", "trl"], "leave 'tis' out"),
        (["recipe.toml", "--from", "trl"], "goes with `config preset`"),
    ):
        assert main(["config", *words]) == 2
        assert reason in capsys.readouterr().err


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
        ("tsi", {}, "'tsi'; there are recompute, tis, cis"),
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
