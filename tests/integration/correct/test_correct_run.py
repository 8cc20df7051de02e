"""Corrections inside a run: every preset trains or is refused with its reason. Its statistics reach
metrics.jsonl."""

from __future__ import annotations

import pytest

from onepolicy.build.engines import check_engine_capabilities
from onepolicy.cli import main
from onepolicy.config import UsageError, resolve
from onepolicy.config.presets import correction_presets
from onepolicy.correct.presets import preset
from onepolicy.interfaces import EngineCaps
from support.metrics import rows

SHORT = ["steps=1", "eval.every=0"]
CENTERED = ["correction.preset=score-centering", "objective.preset=reinforce"]


def test_the_receipt_of_a_run(train, capsys):
    """bf16 rollouts and fp32 training without replay are ordinary mismatch, so no bug is
    suspected."""
    settings = ["replay.mode=off", "correction.preset=mis", "model.dtype=float32"]
    row = rows(train("mis", *SHORT, *settings))[0]
    assert row["correction/slots"] >= row["correction/kept"] > 0
    assert row["correction/weight_mean"] == pytest.approx(1)
    assert {"correction/rejected/ratio.token", "correction/rejected/ratio.min.sequence"} <= set(row)
    assert row["correction/ratio_q01"] <= row["correction/ratio_q50"] <= row["correction/ratio_q99"]
    assert "looks like a bug" not in capsys.readouterr().out


@pytest.mark.full
def test_score_centering_takes_the_rollouts_likeliest_tokens(train):
    """The likeliest 4 tokens hold less probability than the whole vocabulary, which holds all of
    it."""
    settings = [*SHORT, *CENTERED]
    head = rows(train("head", *settings, "correction.head_size=4"))[0]["train/head_mass"]
    whole = rows(train("whole", *settings, "correction.centering=support"))[0]["train/head_mass"]
    assert head < whole == pytest.approx(1, abs=1e-5)


def test_score_centering_over_what_top_p_kept(train):
    """The set's values come with it: no request asks for the likeliest tokens."""
    narrowed = ["correction.centering=support", "rollout.sampling.top_p=0.8"]
    row = rows(train("kept", *SHORT, *CENTERED, *narrowed))[0]
    assert row["train/grad_norm"] > 0
    assert "train/head_mass" not in row
    assert row["train/entropy"] < row["train/entropy_vocabulary"]


def test_more_top_logprobs_than_returned_are_refused(recipe, capsys, tmp_path):
    settings = [*CENTERED, "correction.head_size=1000"]
    assert main(["train", str(recipe), f"out={tmp_path / 'run'}", *settings]) == 2
    message = capsys.readouterr().err
    assert "correction.head_size: score-centering (changed) needs" in message
    assert "1000 likeliest" in message
    assert "set it to at most 32" in message


@pytest.mark.slow
@pytest.mark.parametrize("name", correction_presets())
def test_twenty_steps_of_every_preset(train, name):
    objective = "rloo" if preset(name).surrogate == "pg" else "grpo"
    settings = [f"correction.preset={name}", f"objective.preset={objective}", "replay.mode=off"]
    settings += ["steps=20", "eval.every=0", "objective.num_minibatches=2"]
    found = rows(train(name, *settings))
    assert len(found) == 20
    for row in found:
        assert row["train/loss"] is not None
        assert 0 <= row["correction/rejected"] <= 1


def test_engines_that_return_fewer_are_refused():
    tree = {"out": "x", "steps": 1, "model": {"path": "m"}, "task": {"kind": "chain"}}
    for most, centering, words in (
        (0, "head", "at most 0; choose one without centering"),
        (20, "support", r"all 64 tokens, .* at most 20; use head"),
    ):
        settings = [*CENTERED, f"correction.centering={centering}", "replay.mode=off"]
        config = resolve(tree, settings)
        caps = EngineCaps(returns_routes=False, max_len=9, top_logprobs=most)
        with pytest.raises(UsageError, match=words):
            check_engine_capabilities(config, caps, config.correction.top_logprobs(64))
