"""rollout.pressure: what contradicts it, what makes it idle, and the line that it writes."""

import pytest

from onepolicy.config import RunConfig, UsageError, resolve
from onepolicy.config.idle import idle_settings

MINIMAL = {
    "out": "runs/x",
    "steps": 3,
    "model": {"path": "tiny"},
    "task": {"kind": "chain"},
    "rollout": {"pressure": {"kind": "routing", "scale": 0.6}},
}
OFF = "replay.mode=off"
RUNNER_UP = ("rollout.pressure.kind=runner-up", "rollout.pressure.scale=0.6")  # kind drops scale


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ["replay.min_agreement: 0.8", "on purpose", "set it to 0"]),
        (
            ["replay.mode=soft", "replay.ratio=0.5", "replay.min_agreement=0.1"],
            ["replay.min_agreement: 0.1"],
        ),
        ([OFF, "rollout.engine.kind=vllm"], ["rollout.pressure", "kind = vllm", "use hf"]),
        ([OFF, "cluster.kind=ray"], ["rollout.pressure", "cluster.kind = local"]),
        (
            [OFF, "numerics=on-policy", "rollout.engine.dtype=float32"],
            ["rollout.pressure", "numerics = on-policy"],
        ),
        ([OFF, "rollout.quant=int8"], ["rollout.quant = int8", "leave one out"]),
        (
            ["replay.source=reprefill", "replay.min_agreement=0"],
            ["replay.source = reprefill", "set replay.source to engine"],
        ),
        ([OFF, "rollout.pressure.layers=[]"], ["rollout.pressure.layers: []"]),
        ([OFF, "rollout.pressure.layers=[1, 1]"], ["rollout.pressure.layers: [1, 1]"]),
        ([OFF, "rollout.pressure.scale=-1"], ["rollout.pressure.scale", "-1"]),
        ([OFF, "rollout.pressure.kind=heat"], ["rollout.pressure.kind", "heat"]),
        (
            [OFF, *RUNNER_UP, "rollout.pressure.scale=1.5"],
            ["rollout.pressure: kind = runner-up", "share of the tokens, at most 1", "(1.5)"],
        ),
        (
            [OFF, *RUNNER_UP, "rollout.pressure.weights=true"],
            ["rollout.pressure: kind = runner-up", "(weights = True)"],
        ),
    ],
    ids=lambda x: x[-1] if x and "=" in str(x[-1]) else None,
)
def test_contradictions_name_field_and_fix(overrides, words):
    with pytest.raises(UsageError) as error:
        resolve(MINIMAL, overrides)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("overrides", [[OFF], ["replay.mode=r2"], ["replay.min_agreement=0"]])
def test_without_the_guard_it_is_accepted_and_stored(overrides):
    run = resolve(MINIMAL, overrides)
    assert RunConfig.model_validate_json(run.model_dump_json()) == run
    assert run.rollout.pressure.scale == 0.6


def test_off_is_none():
    assert resolve(MINIMAL, ["rollout.pressure=off"]).rollout.pressure is None


def test_scale_0_is_idle():
    run = resolve(MINIMAL, [OFF, "rollout.pressure.scale=0"])
    assert [each.setting for each in idle_settings(run)] == ["rollout.pressure.scale"]
    assert idle_settings(resolve(MINIMAL, [OFF])) == []


def test_the_line_says_what_is_pressed():
    line = resolve(MINIMAL, [OFF]).rollout.pressure.describe()
    assert line == (
        "the engine is under artificial routing pressure (scale 0.6, all MoE layers, noise drawn "
        "once, the choice of experts only): its numbers say nothing about real engines"
    )
    more = ["redraw=sync", "weights=true", "layers=[0, 2]"]
    run = resolve(MINIMAL, [OFF, *(f"rollout.pressure.{each}" for each in more)])
    assert run.rollout.pressure.describe() == (
        "the engine is under artificial routing pressure (scale 0.6, layers 0, 2, noise drawn anew "
        "at every weight sync, the choice of experts and their weights): its numbers say nothing "
        "about real engines"
    )
    run = resolve(MINIMAL, [OFF, *RUNNER_UP])
    assert run.rollout.pressure.describe() == (
        "the engine is under artificial routing pressure (the runner-up for 0.6 of the tokens, all "
        "MoE layers, tokens drawn once, the choice of experts only): its numbers say nothing about "
        "real engines"
    )
