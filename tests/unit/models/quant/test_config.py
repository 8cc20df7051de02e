"""`rollout.quant`: its settings in one line, and refusals of settings without effect."""

import pytest

from onepolicy.config import Fp8, Fp8Weight, Int8, RunConfig, Simulated, UsageError, resolve

MINIMAL = {"out": "runs/x", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}


@pytest.mark.parametrize(
    ("overrides", "quant"),
    [
        ([], None),
        (["rollout.quant=int8"], Int8()),
        (["rollout.quant=fp8"], Fp8()),
        (["rollout.quant=fp8-weight"], Fp8Weight()),
        (["rollout.quant=simulated"], Simulated(bits=4)),
        (["rollout.quant.format=simulated", "rollout.quant.bits=3"], Simulated(bits=3)),
        (
            ["rollout.quant.format=int8", "rollout.quant.activations=static"],
            Int8(activations="static"),
        ),
        (
            ["rollout.quant.bits=3", "rollout.quant.format=simulated", "rollout.quant.format=fp8"],
            Fp8(),
        ),
        (["rollout.quant=int8", "rollout.quant=off"], None),
    ],
    ids=str,
)
def test_one_line(overrides, quant):
    config = resolve(MINIMAL, overrides)
    assert config.rollout.quant == quant
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.quant=int4"], r"rollout\.quant.*'int8', 'fp8', 'fp8-weight', 'simulated'"),
        (
            ["rollout.quant.format=fp8", "rollout.quant.activations=static"],
            r"activations: unknown setting",
        ),
        (
            ["rollout.quant=fp8", "rollout.engine.kind=sglang"],
            r"fp8 is not available with .*kind = sglang.*; use hf",
        ),
        (
            [
                'rollout.quant={format="int8", extra_modules=["lm_head"]}',
                "rollout.engine.lm_head=float32",
            ],
            r"rollout\.quant\.extra_modules: lm_head contradicts rollout\.engine\.lm_head",
        ),
        (
            ["rollout.quant=int8", "numerics=on-policy"],
            r"rollout\.quant: int8, but with numerics = on-policy",
        ),
    ],
    ids=str,
)
def test_contradictions_are_refused(overrides, message):
    with pytest.raises(UsageError, match=message):
        resolve(MINIMAL, overrides)
