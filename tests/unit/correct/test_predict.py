"""Predicted keep-rate and attenuation: B8, closed forms, and samples of the model."""

import math
from statistics import NormalDist

import pytest
import torch

from onepolicy.config import CorrectionConfig, UsageError, resolve
from onepolicy.config.presets import correction_presets
from onepolicy.correct.predict import predict, warning
from onepolicy.correct.presets import preset
from onepolicy.correct.reweight import reweight
from onepolicy.interfaces import Progress


def test_attenuation_of_the_trl_default_b8() -> None:
    """The attenuation is Phi((ln 3 - Tk) / sqrt(2Tk))."""
    for kl, length, expected, within in (
        (1e-3, 500, 0.7253, 5e-5),
        (1e-3, 2000, 0.3261, 5e-5),
        (1e-3, 8000, 0.0422, 5e-5),
        (1e-4, 2000, 0.92, 0.005),
        (1e-4, 32000, 0.20, 0.005),
    ):
        found = predict(preset("trl-default"), kl, length).attenuation
        assert found == pytest.approx(expected, abs=within)
        phi = NormalDist().cdf((math.log(3) - length * kl) / math.sqrt(2 * length * kl))
        assert found == pytest.approx(phi, abs=1e-6)


def test_closed_forms() -> None:
    assert predict(preset("recompute"), 0.01, 100).attenuation == pytest.approx(1)
    unbounded = predict(preset("vanilla-is"), 0.01, 100)
    assert unbounded.attenuation == pytest.approx(1, abs=1e-6)  # E[rho] = 1
    at_the_mean = predict(preset("geo-rs"), 1e-3, 10**6)  # where the lower bound is
    assert at_the_mean.keep == pytest.approx(0.5, abs=0.01)
    assert predict(preset("mis"), 0.05, 1000).attenuation == 1  # self-normalised
    kept = predict(preset("geo-rs", denominator="kept"), 1e-3, 100)
    assert (kept.attenuation, kept.keep < 0.2) == (pytest.approx(1), True)
    assert predict(preset("kpop"), 0.01, 100).not_modelled == ("binary_kl_sym.token",)


def test_a_correction_without_gates_keeps_all_on_every_processor() -> None:
    found = {predict(preset("tis"), kl, n).keep for kl in (1e-5, 5e-3, 0.3) for n in (1, 78, 1000)}
    assert found == {1.0}


def test_a_product_that_is_clipped_on_both_sides() -> None:
    """E[min(max(x, 1/2), 3)] of a log-normal x with mean 1: its log has the mean -0.5 and variance
    1. By its parts: P(below) / 2, E[x] between, 3 P(above)."""
    phi, low, high = NormalDist().cdf, math.log(0.5), math.log(3)
    between = phi(high - 0.5) - phi(low - 0.5)
    expected = 0.5 * phi(low + 0.5) + between + 3 * (1 - phi(high + 0.5))
    weight = {"level": "sequence", "low": 0.5, "high": 3}
    found = predict(CorrectionConfig.model_validate({"weight": weight}), 5e-4, 1000)
    assert found.attenuation == pytest.approx(expected, abs=1e-3)
    assert found.keep == pytest.approx(1)


MODELLED = [
    name
    for name in correction_presets()
    if not preset(name).live and not predict(preset(name), 1e-3, 9).not_modelled
]


@pytest.mark.full
@pytest.mark.parametrize(("kl", "length", "count"), [(0.002, 200, 2000), (0.02, 25, 4000)])
def test_the_correction_agrees_with_its_prediction(kl, length, count, subtests) -> None:
    """So many sequences are drawn from the model. veto and trm's largest slot are sharp functions
    of the tail."""
    assert len(MODELLED) > 10
    g = torch.Generator().manual_seed(length)
    logs = torch.randn(count, length, generator=g, dtype=torch.float64) * math.sqrt(2 * kl) - kl
    zeros, mask = torch.zeros_like(logs), torch.ones_like(logs, dtype=torch.bool)
    for name in MODELLED:
        with subtests.test(name):
            config = preset(name)
            if name == "mis":
                config = preset(name, normalise="none")
            applied = reweight(logs, zeros, mask, config).report
            found = predict(config, kl, length)
            assert found.keep == pytest.approx(1 - applied["correction/rejected"], abs=0.03)
            weight_mean = applied["correction/weight_mean"]
            assert found.attenuation == pytest.approx(weight_mean, abs=0.04)


def test_turns_and_signs() -> None:
    weight = {"level": "turn", "high": 3, "outside": "zero"}
    turn = CorrectionConfig.model_validate({"weight": weight})
    found = predict(turn, 1e-3, 8000, turns=16).attenuation  # turns of 500
    assert found == pytest.approx(0.7253, abs=1e-4)

    def keep(**when):
        gate = {"statistic": "ratio", "low": 0.999, "high": 1.001} | when
        return predict(CorrectionConfig.model_validate({"gates": [gate]}), 0.01, 10).keep

    assert keep(when="negative") == pytest.approx((1 + keep()) / 2)
    assert keep(when="positive") == pytest.approx((1 + keep()) / 2)
    assert keep(when="toward") == pytest.approx(0.5, abs=0.01)


def test_a_run_reports_it_before_it_loads_anything(tmp_path, monkeypatch) -> None:
    from onepolicy.run import train

    class Notes(Progress):
        def note(self, text: str) -> None:
            notes.append(text)

    monkeypatch.setattr(train, "build_components", lambda *_: None)
    tree = {"out": str(tmp_path / "run"), "steps": 1, "model": {"path": "tiny"}}
    tree |= {"task": {"kind": "chain"}, "log": {"report": False, "tensorboard": False}}
    for name, expected in (("trl-default", 1), ("tis", 0)):
        notes: list[str] = []
        typed = [f"correction.preset={name}", "rollout.sampling.max_tokens=8000"]
        with pytest.raises(TypeError):  # build_components returned nothing to train
            train.start_run(resolve(tree, typed), Notes())
        assert len(notes) == expected


def test_a_config_that_shrinks_the_step_is_named_at_the_start() -> None:
    said = warning(preset("trl-default"), 8000)
    assert "correction trl-default would multiply the step by 0.042" in said
    assert warning(preset("trl-default"), 100) is None
    assert warning(preset("tis"), 10**5) is None
    with pytest.raises(UsageError, match="kl=0"):
        predict(preset("tis"), 0, 10)


def test_the_warning_of_a_run_considers_whole_episodes():
    """A product over 16 turns of 256 tokens shrinks the step, one over a turn of 256 does not: Phi
    of (ln 3 - Tk) over sqrt(2 T k) at k = 1e-3 is 0.15 at T = 4096 and 0.88 at 256."""
    tree = {"out": "x", "steps": 1, "model": {"path": "m"}, "replay": {"mode": "off"}}
    gym = {"kind": "gym", "name": "products"}
    episode = {"kind": "react", "problems": gym, "tools": [{"kind": "calculator"}], "max_turns": 16}
    sampling = {"rollout": {"sampling": {"max_tokens": 256}, "engine": {"max_len": 8192}}}

    def said(task, level="sequence", **limits):
        weight = {"level": level, "high": 3.0, "outside": "zero"}
        more = {"task": task | limits, "correction": {"weight": weight}}
        config = resolve(tree | sampling | more)
        tokens, turns = config.longest_episode
        return warning(config.correction, tokens, turns=turns)

    assert said(gym) is None
    assert "multiply the step by 0.147 " in said(episode)
    assert "4096 tokens in 16 turns" in said(episode)
    assert said(episode, level="turn") is None
    assert said(episode, max_tokens=300) is None
    assert "2048 tokens in 8 turns" in said(episode, max_turns=8)
