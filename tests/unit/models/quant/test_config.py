"""`rollout.quant`: its settings in one line, and refusals of settings without effect."""

from onepolicy.config import Fp8, Fp8Weight, Int8, RunConfig, Simulated, resolve

MINIMAL = {"out": "runs/x", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}


def with_quant(text):
    """Resolve settings of `rollout`."""
    return resolve(MINIMAL, [f"rollout.{setting}" for setting in text.split()])


def test_one_line(subtests):
    for overrides, quant in (
        ("", None),
        ("quant=int8", Int8()),
        ("quant=fp8", Fp8()),
        ("quant=fp8-weight", Fp8Weight()),
        ("quant=simulated", Simulated(bits=4)),
        ("quant.format=simulated quant.bits=3", Simulated(bits=3)),
        ("quant.format=int8 quant.activations=static", Int8(activations="static")),
        ("quant.bits=3 quant.format=simulated quant.format=fp8", Fp8()),
        ("quant=int8 quant=off", None),
    ):
        with subtests.test(overrides=overrides):
            config = with_quant(overrides)
            assert config.rollout.quant == quant
            assert RunConfig.model_validate_json(config.model_dump_json()) == config
