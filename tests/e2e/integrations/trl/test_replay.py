"""Replay in a real GRPOTrainer and RLOOTrainer: what changes, and what must not."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

import onepolicy as op
import onepolicy.integrations.trl as op_trl
from onepolicy.integrations.trl.adapter import ROUTES, sampled
from support.trl.tiny import (
    LENGTH,
    ONE_STEP,
    CopySampler,
    completion_logp,
    gradient_by_hand,
    make_trainer,
    model_with,
    parameters,
    sgd_gradient,
    train,
    watched,
)

capability = pytest.mark.capability
pytestmark = pytest.mark.trl


@capability("TRL", "measured", how="live")
@capability("TRL", "R3", how="live")
@pytest.mark.smoke
def test_k3_falls_on_every_step(tmp_path, capsys):
    trainer = make_trainer(tmp_path, sampler=CopySampler())
    op_trl.attach(trainer, replay="r3", correction="tis", native_every=1)
    before = parameters(trainer)
    log = train(trainer)
    assert len(log) == 3
    assert not torch.equal(before, parameters(trainer))
    for row in log:
        assert row["mismatch/k3"] < min(row["mismatch_native/k3"] / 2, 1e-3)
        assert row["correction/weight_mean"] == pytest.approx(1, abs=0.05)
        assert row["replay/rows"] > 50
        assert row["replay/missing_samples"] == row["replay/native_rows"] == 0
        assert 0.9 < row["routing/agreement"] < 1
    assert "ok  router loss off" in capsys.readouterr().err


def test_only_float32_noise_is_left_if_only_the_routing_differs(tmp_path):
    sampler = CopySampler(dtype=torch.float32, router_noise=0.05)
    trainer = make_trainer(tmp_path, sampler=sampler)
    op_trl.attach(trainer, native_every=1)
    for row in train(trainer):
        assert row["mismatch_native/k3"] > 1e-5
        assert row["mismatch/k3"] < 1e-10
        assert row["mismatch/max_dlogp"] < 1e-4


def hand_made_gradient(before, inputs) -> torch.Tensor:
    """Return the gradient of GRPO's loss on a micro-batch, in a loop over op.* alone."""
    model = model_with(before)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with op.bind_routers(model).replay(op.pad_routes(inputs[ROUTES], mask)):
        logp = completion_logp(model, inputs)
    loss = -inputs["advantages"][:, None] * (logp - logp.detach()).exp()
    return gradient_by_hand(loss, inputs, model)


def test_gradients_are_those_of_a_hand_made_loop(tmp_path):
    sampler = CopySampler(dtype=torch.float32, router_noise=0.05)
    trainer = make_trainer(tmp_path, sampler=sampler, **ONE_STEP)
    op_trl.attach(trainer)
    seen = watched(trainer)
    gradient, before = sgd_gradient(trainer)
    expected = hand_made_gradient(before, seen[0])
    assert expected.norm() > 0.1
    assert (gradient - expected).norm() < 1e-5 * expected.norm()
    natively = make_trainer(tmp_path, sampler=CopySampler(router_noise=0.05), **ONE_STEP)
    op_trl.attach(natively, replay="off")
    other, _ = sgd_gradient(natively)
    assert (other - expected).norm() > 1e-3 * expected.norm()  # so the test can fail


def trained(tmp_path, **changes):
    """Return parameters after three steps on routes that are not the model's own."""
    sampler = CopySampler(dtype=torch.float32, router_noise=0.05)
    trainer = make_trainer(tmp_path, sampler=sampler, **changes)
    op_trl.attach(trainer)
    train(trainer)
    return parameters(trainer)


def test_gradient_checkpointing_changes_nothing(tmp_path, subtests):
    plain = trained(tmp_path)
    for reentrant in (False, True):
        kwargs = {"use_reentrant": reentrant}
        on = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
        with subtests.test(reentrant=reentrant):
            assert torch.equal(plain, trained(tmp_path, **on))


def test_accumulation_and_chunked_scoring_change_nothing(tmp_path):
    """Sums over slots are taken in another order: n float32 addends move by n 2^-24 of their size.

    AdamW would divide gradients of the size of this rounding by themselves, so SGD trains.
    """

    def gradient(**sizes):
        sampler = CopySampler(dtype=torch.float32, router_noise=0.05)
        trainer = make_trainer(tmp_path, sampler=sampler, **ONE_STEP, **sizes)
        op_trl.attach(trainer)
        return sgd_gradient(trainer)[0]

    whole = gradient()
    in_parts = gradient(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    slots = 8 * (5 + LENGTH)  # at most
    assert whole.norm() > 0.1
    assert (whole - in_parts).norm() < slots * 2**-24 * whole.norm()


def forwards(trainer):
    """Return a list that gets, for each forward of the model, whether it had a gradient."""
    seen = []
    trainer.model.register_forward_pre_hook(
        lambda *_: seen.append(torch.is_grad_enabled()), prepend=True
    )
    return seen


@pytest.mark.parametrize(
    ("settings", "changes", "scored"),
    [
        ({}, {}, 1),
        ({"scoring": "training-forward"}, {}, 0),
        ({}, {"per_device_train_batch_size": 4, "steps_per_generation": 2}, 2),
    ],
    ids=["added", "left-out", "trl-scores-in-chunks"],
)
def test_forwards_of_a_step(tmp_path, settings, changes, scored):
    trainer = make_trainer(tmp_path, sampler=CopySampler(), max_steps=1, **changes)
    op_trl.attach(trainer, **settings)
    seen = forwards(trainer)
    (row,) = train(trainer)
    assert seen == [False] * scored + [True]
    assert row["mismatch/k3"] < 1e-3
    assert row["routing/agreement"] < 1


def test_misaligned_generations_are_replayed_with_their_own_old_policy(tmp_path):
    changes = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2}
    trainer = make_trainer(tmp_path, sampler=CopySampler(), max_steps=4, **changes)
    op_trl.attach(trainer)
    seen = watched(trainer)
    train(trainer)
    assert [len(inputs[ROUTES]) for inputs in seen] == [4] * 4
    for inputs in seen:  # each trace went with its sample through shuffling and splitting
        tokens = (inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1)).tolist()
        assert [len(trace) + 1 for trace in inputs[ROUTES]] == tokens
    old = seen[0]["old_per_token_logps"]
    kept = seen[0]["completion_mask"].bool()
    assert (old - sampled(seen[0]))[kept].abs().max() < 0.2


def test_lora_replays_the_policy_and_never_the_reference(tmp_path):
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM")
    sampler = CopySampler(dtype=torch.float32, router_noise=0.05)
    trainer = make_trainer(tmp_path, sampler=sampler, peft_config=lora, beta=0.1)
    op_trl.attach(trainer, native_every=1)
    seen = watched(trainer)
    log = train(trainer)
    for row in log:
        assert row["mismatch/k3"] < 1e-10 < row["mismatch_native/k3"]
    inputs = seen[0]
    with torch.no_grad(), trainer.model.disable_adapter():
        native = completion_logp(trainer.model, inputs)
    kept = inputs["completion_mask"].bool()
    reference = inputs["ref_per_token_logps"]
    torch.testing.assert_close(reference[kept], native[kept], rtol=1e-5, atol=1e-5)
    assert (reference - sampled(inputs))[kept].abs().max() > 1e-4  # replayed it would be equal


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_own_model_is_recorded_while_it_samples(tmp_path, kind):
    trainer = make_trainer(tmp_path, kind=kind)
    op_trl.attach(trainer, native_every=1)
    for row in train(trainer):
        assert row["replay/missing_samples"] == row["replay/native_rows"] == 0
        assert row["mismatch/k3"] < 1e-9  # its own arithmetic, but for the cache
        assert row["routing/agreement"] > 0.99


def test_truncated_completions_are_left_out(tmp_path):
    trainer = make_trainer(tmp_path, sampler=CopySampler(), mask_truncated_completions=True)
    op_trl.attach(trainer, dump=tmp_path / "dump")
    for row in train(trainer):
        assert row["mismatch/k3"] < 1e-3


def test_evaluations_route_natively(tmp_path):
    trainer = make_trainer(tmp_path, sampler=CopySampler(), per_device_eval_batch_size=8)
    op_trl.attach(trainer)
    trainer.eval_dataset = trainer.train_dataset.select(range(2))
    metrics = trainer.evaluate()
    assert "eval_reward" in metrics
    assert not any("mismatch" in name for name in metrics)
