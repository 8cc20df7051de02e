"""rollout.pressure: the line that it writes. rule_messages.txt has what contradicts it."""

from onepolicy.config import RunConfig, resolve

MINIMAL = {"out": "runs/x", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
MINIMAL["rollout"] = {"pressure": {"kind": "routing", "scale": 0.6}}
OFF = "replay.mode=off"
RUNNER_UP = ("rollout.pressure.kind=runner-up", "rollout.pressure.scale=0.6")  # kind drops scale


def test_without_the_guard_it_is_accepted_and_stored():
    for override in (OFF, "replay.mode=r2", "replay.min_agreement=0"):
        run = resolve(MINIMAL, [override])
        assert RunConfig.model_validate_json(run.model_dump_json()) == run
        assert run.rollout.pressure.scale == 0.6


def test_off_is_none():
    assert resolve(MINIMAL, ["rollout.pressure=off"]).rollout.pressure is None


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
