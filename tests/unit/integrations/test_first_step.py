"""Every adapter diagnoses the first scored step, in one line of the trainer's log."""

import importlib
import json
import logging
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

import onepolicy as op
from onepolicy.integrations import miles, prime_rl, skyrl, slime
from onepolicy.integrations.core import first_step
from onepolicy.integrations.core.first_step import FirstStep
from onepolicy.integrations.openrlhf.experience import extend
from onepolicy.integrations.slime import correction
from onepolicy.integrations.trl.adapter import TrlAdapter
from onepolicy.integrations.trl.settings import TrlSettings

NOT_CLEAN = "the first scored step is not clean"


def sides(late=False, gap=1e-3, rows=40):
    """Return log-probabilities [B, 60] of trainer and rollout: with noise, or one slot apart."""
    g = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(rows, 61, generator=g) - 1
    if late:
        return old[:, 1:], old[:, :-1]
    return old[:, 1:], old[:, 1:] + gap * torch.randn(rows, 60, generator=g)


def in_trl(old, rollout):
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(num_processes=1, is_main_process=True),
        args=SimpleNamespace(steps_per_generation=1, gradient_accumulation_steps=1),
        num_iterations=2,
        _metrics={"train": defaultdict(list)},
    )
    adapter = TrlAdapter(trainer, TrlSettings(replay="off"), None)
    adapter._dump = None
    ones = torch.ones(old.shape, dtype=torch.int64)
    made = {"sampling_per_token_logps": rollout, "completion_ids": ones, "completion_mask": ones}

    def step():
        generation = SimpleNamespace(
            traces=[], native=[], dropped=0, logp=old, entropy=torch.full(old.shape, 2.5)
        )
        adapter._finish(made, generation, 0)

    return step


def in_skyrl(old, rollout):
    algorithm = SimpleNamespace(policy_loss_type="regular", off_policy_correction=None)
    cfg = SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm))
    trainer = SimpleNamespace(cfg=cfg, all_metrics={}, global_step=1)
    trainer.compute_advantages_and_returns = lambda data: data
    skyrl.attach(trainer)

    class Batch(dict):
        metadata = None

    data = Batch(
        action_log_probs=old,
        rollout_logprobs=rollout,
        loss_mask=torch.ones(old.shape),
        sequences=torch.arange(old.numel()).view(old.shape),
        advantages=torch.ones(old.shape),
    )
    return lambda: trainer.compute_advantages_and_returns(data)


def in_openrlhf(old, rollout):
    class RemoteExperienceMaker:
        args = SimpleNamespace(
            algo=SimpleNamespace(advantage=SimpleNamespace(is_correction_level="token")),
            actor=SimpleNamespace(policy_loss_type="ppo"),
        )

        def compute_advantages_and_returns(self, experiences):
            return experiences

    extend(SimpleNamespace(RemoteExperienceMaker=RemoteExperienceMaker))
    ones = torch.ones(old.shape)
    fields = {"action_log_probs": old, "rollout_log_probs": rollout, "action_mask": ones}
    one = SimpleNamespace(**fields, advantages=ones, info={})
    maker = RemoteExperienceMaker()
    return lambda: maker.compute_advantages_and_returns([one])


def in_slime(old, rollout):
    masks = list(torch.ones(old.shape))
    fields = {"log_probs": list(old), "rollout_log_probs": list(rollout), "loss_masks": masks}
    given = SimpleNamespace(onepolicy=None)
    return lambda: slime.step(given, 0, fields | {"advantages": masks})


def in_miles(old, rollout):
    masks = list(torch.ones(old.shape))
    fields = {"train_log_probs": list(old), "rollout_log_probs": list(rollout)}
    given = SimpleNamespace(onepolicy=None, use_tis=False)
    loss = torch.ones(old.numel())
    return lambda: miles.tis(given, pg_loss=loss, loss_masks=masks, **fields)


def in_prime_rl(old, rollout):
    def step():
        for new, sampled in zip(old, rollout, strict=True):
            mask = torch.ones(60, dtype=torch.bool)
            fields = {"trainer_logprobs": new, "inference_logprobs": sampled, "loss_mask": mask}
            prime_rl.loss(SimpleNamespace(**fields, advantages=torch.ones(60), loss_weights=None))

    return step


ADAPTERS = [in_trl, in_skyrl, in_openrlhf, in_slime, in_miles, in_prime_rl]


@pytest.fixture(autouse=True)
def first(monkeypatch):
    """Let every test be a process's first."""
    monkeypatch.setattr(correction, "FIRST", FirstStep("miles"))
    prime_loss = importlib.import_module("onepolicy.integrations.prime_rl.loss")
    monkeypatch.setattr(prime_loss, "FIRST", FirstStep("prime-rl"))
    monkeypatch.setenv("ONEPOLICY", json.dumps({}))


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)
def test_a_step_with_a_bug_is_one_line(adapter, caplog):
    step = adapter(*sides(late=True))
    for _ in range(2):
        step()
    (record,) = [record for record in caplog.records if NOT_CLEAN in record.getMessage()]
    assert (record.levelno, record.name) == (logging.WARNING, "onepolicy")
    assert f"{NOT_CLEAN}: shift: " in record.getMessage()
    assert "against the engine's value of the next token" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)
def test_a_clean_step_has_no_line(adapter, caplog):
    adapter(*sides())()
    assert NOT_CLEAN not in caplog.text


def test_the_line_is_the_verdict_of_diagnose(caplog):
    """A gap that needs something is unclear without the entropy, and so is the line."""
    old, rollout = sides(gap=0.2)
    mask = torch.ones(old.shape, dtype=torch.bool)
    FirstStep("trl").look(old, rollout, mask)
    said = op.diagnose(old, rollout, mask).text().replace("\n", "; ")
    (line,) = caplog.messages
    assert line.startswith(f"{NOT_CLEAN}: {said}; against mismatch: In TRL 1.16: ")
    assert "unclear" in said


@pytest.mark.parametrize(
    ("adapter", "settings"),
    [
        (in_skyrl, ['tis_ratio_type=token, cap 2, or op_skyrl.attach(trainer, correction="tis")']),
        (
            in_openrlhf,
            ["is_correction_threshold 0 2, or ONEPOLICY=", "replay is not there, because"],
        ),
        (in_slime, ["--use-tis --tis-clip 2.0, or onepolicy: {correction: tis} in the file of"]),
        (
            in_miles,
            ["replay is --use-rollout-routing-replay, in miles on FSDP with the setup hook"],
        ),
        (in_prime_rl, ["enable_router_replay=true; tis is [trainer.loss] with import_path ="]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_gap_is_answered_in_the_settings_of_the_trainer(adapter, settings, caplog):
    adapter(*sides(gap=0.2))()
    for words in settings:
        assert words in caplog.text


def test_a_trainer_that_replays_is_not_told_to(caplog):
    old, rollout = sides(gap=0.2)
    FirstStep("trl", replays=True).look(old, rollout, torch.ones(old.shape, dtype=torch.bool))
    assert "In TRL 1.16: tis is GRPOConfig(" in caplog.text
    assert "replay is" not in caplog.text


@pytest.mark.parametrize("framework", ["trl", "verl"])
def test_a_line_on_sampling_names_only_the_setting_that_the_trainer_has(framework, caplog):
    """The sampled tokens are likelier than draws from an entropy of 3.2 nats."""
    old, rollout = sides()
    mask, entropy = torch.ones(old.shape, dtype=torch.bool), torch.full(old.shape, 3.2)
    FirstStep(framework).look(old, rollout, mask, entropy=entropy)
    (line,) = caplog.messages
    assert "support: " in line
    assert "the log-probabilities are not: they are raw" in line
    assert ("logprobs_mode" in line) == (framework == "verl")


def test_a_step_is_judged_once_it_has_tokens_and_by_its_first_rows(monkeypatch, caplog):
    monkeypatch.setattr(first_step, "ENOUGH", 500)
    old, rollout = sides(late=True)
    rollout[12:] = old[12:]
    first = FirstStep("trl")
    nothing, mask = torch.zeros(old.shape), torch.ones(old.shape)
    first.look(old, rollout, nothing)
    first.look(old.log(), rollout, mask)  # none is finite
    assert first.due
    first.look(old, rollout, mask)
    assert "shift" in caplog.text
    assert not first.due
