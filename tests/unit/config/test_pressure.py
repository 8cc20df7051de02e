"""rollout.pressure: what contradicts it, what makes it idle, and the line that it writes."""

import pytest

from onepolicy.config import RunConfig, UsageError, resolve
from onepolicy.config.idle import idle_settings

MINIMAL = {"out": "runs/x", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
MINIMAL["rollout"] = {"pressure": {"kind": "routing", "scale": 0.6}}
OFF = "replay.mode=off"
RUNNER_UP = ("rollout.pressure.kind=runner-up", "rollout.pressure.scale=0.6")  # kind drops scale
SOFT = ("replay.mode=soft", "replay.ratio=0.5")
REFUSED = [  # overrides, words of the message
    ([], "replay.min_agreement: 0.8", "on purpose", "set it to 0"),
    ([*SOFT, "replay.min_agreement=0.1"], "replay.min_agreement: 0.1"),
    ([OFF, "rollout.engine.kind=vllm"], "rollout.pressure", "kind = vllm", "use hf"),
    ([OFF, "cluster.kind=ray"], "rollout.pressure", "cluster.kind = local"),
    ([OFF, "numerics=on-policy", "rollout.engine.dtype=float32"], "pressure", "= on-policy"),
    ([OFF, "rollout.quant=int8"], "rollout.quant = int8", "leave one out"),
    (["replay.source=reprefill", "replay.min_agreement=0"], "set replay.source to engine"),
    ([OFF, "rollout.pressure.layers=[]"], "rollout.pressure.layers: []"),
    ([OFF, "rollout.pressure.layers=[1, 1]"], "rollout.pressure.layers: [1, 1]"),
    ([OFF, "rollout.pressure.scale=-1"], "rollout.pressure.scale", "-1"),
    ([OFF, "rollout.pressure.kind=heat"], "rollout.pressure.kind", "heat"),
    ([OFF, *RUNNER_UP, "rollout.pressure.scale=1.5"], "kind = runner-up", "at most 1", "(1.5)"),
    ([OFF, *RUNNER_UP, "rollout.pressure.weights=true"], "kind = runner-up", "(weights = True)"),
]


def test_contradictions_name_field_and_fix(subtests):
    for overrides, *words in REFUSED:
        with subtests.test(" ".join(overrides)):
            with pytest.raises(UsageError) as error:
                resolve(MINIMAL, overrides)
            assert [word for word in words if word not in str(error.value)] == []


def test_without_the_guard_it_is_accepted_and_stored():
    for override in (OFF, "replay.mode=r2", "replay.min_agreement=0"):
        run = resolve(MINIMAL, [override])
        assert RunConfig.model_validate_json(run.model_dump_json()) == run
        assert run.rollout.pressure.scale == 0.6


def test_off_is_none():
    assert resolve(MINIMAL, ["rollout.pressure=off"]).rollout.pressure is None


def test_scale_0_is_idle():
    run = resolve(MINIMAL, [OFF, "rollout.pressure.scale=0"])
    assert [each.setting for each in idle_settings(run)] == ["rollout.pressure.scale"]
    assert idle_settings(resolve(MINIMAL, [OFF])) == []


def test_the_line_says_what_is_pressed():
    more = [f"rollout.pressure.{each}" for each in ("redraw=sync", "weights=true", "layers=[0, 2]")]
    for overrides, how in (
        ([], "scale 0.6, all MoE layers, noise drawn once, the choice of experts only"),
        (
            more,
            "scale 0.6, layers 0, 2, noise drawn anew at every weight sync, the choice of experts "
            "and their weights",
        ),
        (
            RUNNER_UP,
            "the runner-up for 0.6 of the tokens, all MoE layers, tokens drawn once, the choice of "
            "experts only",
        ),
    ):
        assert resolve(MINIMAL, [OFF, *overrides]).rollout.pressure.describe() == (
            f"the engine is under artificial routing pressure ({how}): its numbers say nothing "
            "about real engines"
        )
