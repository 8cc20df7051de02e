"""Settings that change nothing beside the others: accepted, and named in one line on stderr.

rule_messages.txt has the line of each.
"""

import logging
from itertools import product

from onepolicy.cli import main
from onepolicy.cli.common import is_set_by, warn_idle
from onepolicy.config import RunConfig, load, resolve
from onepolicy.config.idle import (
    idle_settings,
)
from onepolicy.config.presets import correction_presets, objective_presets
from onepolicy.correct.presets import preset
from support.paths import ROOT

MINIMAL = {"out": "runs/x", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}


def idle(*overrides: str) -> dict[str, str]:
    """Return the idle settings, each of which is named once, and their reasons."""
    found = idle_settings(resolve(MINIMAL, list(overrides)))
    reasons = {each.setting: each.reason for each in found}
    assert len(reasons) == len(found)
    return reasons


def test_values_of_an_objective_preset_are_never_idle(subtests):
    """`surrogate = pg` or another baseline leaves clip ranges and lam of a preset without use."""
    other = ["baseline=group", "surrogate=pg", "normalise=none", "ratio_level=token"]
    for name, more in product(objective_presets(), ([], other)):
        with subtests.test(name, more=more):
            found = idle(f"objective.preset={name}", *(f"objective.{each}" for each in more))
            assert set(found) <= {"objective.ratio_level"}


def test_values_of_a_correction_preset_are_never_idle(subtests):
    for name in correction_presets():
        overrides = [f"correction.preset={name}"]
        if preset(name).surrogate == "pg":
            overrides.append("objective.preset=reinforce")
        with subtests.test(name):
            assert idle(*overrides) == {}


def test_no_recipe_has_an_idle_setting():
    found = {path: idle_settings(load(path)) for path in (ROOT / "recipes").rglob("*.toml")}
    assert len(found) > 5
    assert {path: each for path, each in found.items() if each} == {}


def test_config_writes_the_line_on_stderr_only(tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'out = "runs/x"\nsteps = 3\nmodel.path = "tiny"\ntask.kind = "chain"\neval.top_p = 0.9\n'
    )
    assert main(["config", str(recipe), "objective.clip_low=0.1"]) == 0
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("onepolicy: no effect here: objective.clip_low = 0.1 (")
    assert line.endswith("; eval.top_p = 0.9 (eval.k = 0 samples nothing)")
    assert "no effect" not in shown.out


def test_a_server_of_ours_names_them_too(monkeypatch, capsys):
    monkeypatch.setattr("onepolicy.launch.engine_server.serve_model", lambda *_, **__: 0)
    assert main(["engine", "serve", "tiny", "dtype=float32", "lm_head=float32"]) == 0
    assert "no effect here: lm_head = float32 (dtype = float32)" in capsys.readouterr().err


def test_commands_that_read_some_sections_name_typed_settings_only(capsys):
    config = resolve(MINIMAL, ["eval.top_p=0.9", "objective.lam=0.9"])
    warn_idle(idle_settings(config), ["eval.top_p=0.9"])
    assert capsys.readouterr().err == (
        "onepolicy: no effect here: eval.top_p = 0.9 (eval.k = 0 samples nothing)\n"
    )
    warn_idle(idle_settings(config), ["eval.k=0"])
    assert capsys.readouterr().err == ""
    assert is_set_by("objective.kl.where", ["objective.kl"])
    assert not is_set_by("objective.kl.where", ["objective.k"])


def test_stored_settings_with_idle_ones_are_read_again_without_a_line(caplog):
    config = resolve(MINIMAL, ["objective.clip_low=0.1", "eval.top_p=0.9"])
    with caplog.at_level(logging.INFO):
        assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert caplog.messages == []
