"""Predicted keep-rate and attenuation: B8, closed forms, and the correction itself on samples of
the model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from onepolicy.config import CorrectionConfig, UsageError, resolve
from onepolicy.config.correction import correction_presets
from onepolicy.correct.predict import predict, warning
from onepolicy.correct.presets import preset
from onepolicy.correct.weights import reweight
from onepolicy.interfaces import Progress


@pytest.mark.parametrize(
    ("kl", "length", "expected"),
    [
        (1e-3, 500, 0.7253),
        (1e-3, 2000, 0.3261),
        (1e-3, 8000, 0.0422),
        (1e-4, 2000, 0.92),
        (1e-4, 32000, 0.20),
    ],
)
def test_attenuation_of_the_trl_default_b8(kl: float, length: int, expected: float) -> None:
    """The attenuation is Phi((ln 3 - Tk) / sqrt(2Tk))."""
    found = predict(preset("trl-default"), kl, length).attenuation
    assert found == pytest.approx(expected, abs=0.005 if kl == 1e-4 else 5e-5)
    total = length * kl
    assert found == pytest.approx(
        torch.special.ndtr(torch.tensor((math.log(3) - total) / math.sqrt(2 * total))).item(),
        abs=1e-6,
    )


def test_closed_forms() -> None:
    assert predict(preset("recompute"), 0.01, 100).attenuation == pytest.approx(1)
    assert predict(preset("vanilla-is"), 0.01, 100).attenuation == pytest.approx(
        1, abs=1e-6
    )  # E[rho] = 1
    assert predict(preset("geo-rs"), 1e-3, 10**6).keep == pytest.approx(
        0.5, abs=0.01
    )  # the lower bound is the mean
    assert predict(preset("mis"), 0.05, 1000).attenuation == 1  # self-normalised
    kept = predict(preset("geo-rs", denominator="kept"), 1e-3, 100)
    assert (kept.attenuation, kept.keep < 0.2) == (pytest.approx(1), True)
    assert predict(preset("kpop"), 0.01, 100).not_modelled == ("binary_kl_sym.token",)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in correction_presets()
        if not preset(n).live and not predict(preset(n), 1e-3, 9).not_modelled
    ],
)
@pytest.mark.parametrize(("kl", "length"), [(0.002, 200), (0.02, 25)])
def test_the_correction_agrees_with_its_prediction(name: str, kl: float, length: int) -> None:
    """4000 sequences are drawn from the model. veto and trm's largest slot are sharp functions of
    the tail."""
    g = torch.Generator().manual_seed(length)
    logs = torch.randn(4000, length, generator=g, dtype=torch.float64) * math.sqrt(2 * kl) - kl
    config = preset(name, normalise="none") if name == "mis" else preset(name)
    applied = reweight(
        logs, torch.zeros_like(logs), torch.ones_like(logs, dtype=torch.bool), config
    )
    found = predict(config, kl, length)
    assert found.keep == pytest.approx(1 - applied.report["correction/rejected"], abs=0.03)
    assert found.attenuation == pytest.approx(applied.report["correction/weight_mean"], abs=0.04)


def test_turns_and_signs() -> None:
    turn = CorrectionConfig.model_validate(
        {"weight": {"level": "turn", "high": 3, "outside": "zero"}}
    )
    assert predict(turn, 1e-3, 8000, turns=16).attenuation == pytest.approx(
        0.7253, abs=1e-4
    )  # turns of 500
    gate = {"statistic": "ratio", "low": 0.999, "high": 1.001}
    both = predict(CorrectionConfig.model_validate({"gates": [gate]}), 0.01, 10).keep
    for when in ("negative", "positive"):
        half = predict(
            CorrectionConfig.model_validate({"gates": [gate | {"when": when}]}), 0.01, 10
        ).keep
        assert half == pytest.approx((1 + both) / 2)
    toward = predict(
        CorrectionConfig.model_validate({"gates": [gate | {"when": "toward"}]}), 0.01, 10
    ).keep
    assert toward == pytest.approx(0.5, abs=0.01)


class Notes(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_run_reports_it_before_it_loads_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onepolicy.run import train

    monkeypatch.setattr(train, "build_components", lambda *_: None)
    tree = {
        "out": str(tmp_path / "run"),
        "steps": 1,
        "model": {"path": "tiny"},
        "task": {"kind": "chain"},
        "log": {"report": False, "tensorboard": False},
    }
    for name, expected in (("trl-default", 1), ("tis", 0)):
        notes = Notes()
        with pytest.raises(TypeError):  # build_components returned nothing to train
            train.start_run(
                resolve(tree, [f"correction.preset={name}", "rollout.sampling.max_tokens=8000"]),
                notes,
            )
        assert len(notes.notes) == expected


def test_a_config_that_shrinks_the_step_is_named_at_the_start() -> None:
    text = warning(preset("trl-default"), 8000)
    assert text is not None
    assert "correction trl-default would multiply the step by 0.042" in text
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
        config = resolve(
            tree | sampling | {"task": task | limits, "correction": {"weight": weight}}
        )
        tokens, turns = config.longest_episode
        return warning(config.correction, tokens, turns=turns)

    assert said(gym) is None
    text = said(episode)
    assert text is not None
    assert "multiply the step by 0.15 " in text
    assert "4096 tokens in 16 turns" in text
    assert said(episode, level="turn") is None
    assert said(episode, max_tokens=300) is None
    assert "2048 tokens in 8 turns" in (said(episode, max_turns=8) or "")
