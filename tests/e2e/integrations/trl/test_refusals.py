"""Each thing that is wrong is named before the first update."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import onepolicy.integrations.trl as op_trl
from onepolicy.config import UsageError
from onepolicy.replay.checks import MisalignedRoutesError
from support.trl.tiny import CopySampler, as_vllm, make_trainer, parameters, tiny_moe, train

capability = pytest.mark.capability

pytestmark = pytest.mark.trl


def one_row_late(payload):
    return np.concatenate([payload[:1], payload[:-1]])


def stops_untrained(trainer, error, match):
    before = parameters(trainer)
    with pytest.raises(error, match=match):
        train(trainer)
    assert torch.equal(before, parameters(trainer))


@capability("TRL", "detector", how="live")
@pytest.mark.parametrize("scoring", ["always", "training-forward"])
def test_routes_one_row_late(tmp_path, scoring):
    trainer = make_trainer(tmp_path, sampler=CopySampler(change=one_row_late))
    op_trl.attach(trainer, scoring=scoring)
    stops_untrained(trainer, MisalignedRoutesError, "late")


def test_routes_of_another_sample(tmp_path):
    def mixed(prompts, trainer):
        made = CopySampler()(prompts, trainer)
        made["routed_experts"] = made["routed_experts"][::-1]
        return made

    trainer = make_trainer(tmp_path, sampler=mixed)
    op_trl.attach(trainer)
    stops_untrained(trainer, MisalignedRoutesError, "another sample")


def test_router_loss_switched_on_after_attach(tmp_path):
    """TRL then asks every training forward for the routers' logits."""
    trainer = make_trainer(tmp_path, sampler=CopySampler())
    op_trl.attach(trainer)
    trainer.aux_loss_enabled = True
    stops_untrained(trainer, UsageError, "output_router_logits")


def test_field_dropped(tmp_path):
    def forgetful(prompts, trainer):
        made = CopySampler()(prompts, trainer)
        del made["routed_experts"]
        return made

    trainer = make_trainer(tmp_path, sampler=forgetful)
    op_trl.attach(trainer)
    stops_untrained(trainer, UsageError, "none of the 8 samples.*return them from the rollout_func")


def test_routes_of_another_number_of_samples(tmp_path):
    def short(prompts, trainer):
        made = CopySampler()(prompts, trainer)
        made["routed_experts"].pop()
        return made

    trainer = make_trainer(tmp_path, sampler=short)
    op_trl.attach(trainer)
    stops_untrained(trainer, UsageError, "7 entries for 8 completions")


@pytest.mark.parametrize(
    ("changes", "settings", "match"),
    [
        ({"router_aux_loss_coef": None}, {}, r"router loss off: router_aux_loss_coef = 0\.01"),
        ({"torch_compile": True}, {}, "model not compiled"),
        ({"top_p": 0.9}, {"correction": "tis"}, "whole distribution sampled: top_p 0.9"),
        ({"loss_type": "vespo"}, {"correction": "tis"}, "tis in loss vespo"),
        ({"loss_type": "cispo"}, {"correction": "pg-tis"}, "pg-tis in loss cispo"),
        ({"off_policy_mask_threshold": 0.1}, {"correction": "opsm"}, "one off-policy mask"),
        ({}, {"correction": "mis", "scoring": "training-forward"}, "weights of a micro-batch"),
        ({}, {"dump": "dump", "scoring": "training-forward"}, "dump of whole generations"),
        ({}, {"correction": "tiss"}, "tis"),
        ({}, {"replay": "r4"}, "replay is 'r4'; there are r3, off"),
        ({}, {"native_every": True}, "native_every is True"),
        ({}, {"form": "numpy"}, "form is 'numpy'"),
    ],
    ids=lambda value: None,
)
def test_settings(tmp_path, changes, settings, match):
    trainer = make_trainer(tmp_path, sampler=CopySampler(), **changes)
    with pytest.raises(UsageError, match=match):
        op_trl.attach(trainer, **settings)
    assert trainer._compute_loss.__self__ is trainer  # nothing was changed


@capability("TRL", "preflight", how="live")
def test_all_mistakes_are_named_at_once(tmp_path):
    trainer = make_trainer(
        tmp_path, sampler=CopySampler(), router_aux_loss_coef=0.1, loss_type="vespo"
    )
    with pytest.raises(UsageError) as refused:
        op_trl.attach(trainer, correction="tis")
    assert "router loss off" in str(refused.value)
    assert "tis in loss vespo" in str(refused.value)


def test_double_correction(tmp_path):
    chosen = {"vllm_importance_sampling_mode": "token_truncate"}
    trainer = as_vllm(make_trainer(tmp_path, sampler=CopySampler(), **chosen))
    with pytest.raises(UsageError, match=r"one correction: TRL's token_truncate.* beside tis"):
        op_trl.attach(trainer, correction="tis")
    default = as_vllm(make_trainer(tmp_path, sampler=CopySampler()))
    assert "tis replaces TRL's own correction" in str(op_trl.attach(default, correction="tis"))
    own = as_vllm(make_trainer(tmp_path, sampler=CopySampler(), **chosen))
    op_trl.attach(own)  # TRL's own stays
    assert all("sampling/importance_sampling_ratio/mean" in row for row in train(own))


def test_attached_after_compile(tmp_path):
    trainer = make_trainer(tmp_path, sampler=CopySampler())
    trainer.model.compile()
    with pytest.raises(UsageError, match="the model is compiled"):
        op_trl.attach(trainer)


def test_compiled_after_attach(tmp_path):
    trainer = make_trainer(tmp_path, sampler=CopySampler())
    op_trl.attach(trainer)
    trainer.model.compile(backend="eager")
    stops_untrained(trainer, UsageError, "the model is compiled")


def test_attached_twice(tmp_path):
    trainer = make_trainer(tmp_path, sampler=CopySampler())
    op_trl.attach(trainer)
    with pytest.raises(UsageError, match="attached already"):
        op_trl.attach(trainer)


def test_continuous_batching_shows_no_routes(tmp_path):
    trainer = make_trainer(tmp_path, use_transformers_continuous_batching=True)
    with pytest.raises(UsageError, match=r"model\.generate: continuous batching True"):
        op_trl.attach(trainer)


def test_other_trainers():
    asynchronous = pytest.importorskip("trl.experimental.async_grpo")
    with pytest.raises(UsageError, match=r"AsyncGRPOTrainer.*as a tree"):
        op_trl.attach(object.__new__(asynchronous.AsyncGRPOTrainer))
    with pytest.raises(UsageError, match="object; use GRPOTrainer or RLOOTrainer"):
        op_trl.attach(object())


def test_gmpo_is_replayed_and_not_corrected(tmp_path):
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    given = make_trainer(tmp_path)
    settings = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 1,
        "router_aux_loss_coef": 0.0,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
    }
    trainer = GMPOTrainer(
        model=tiny_moe(),
        reward_funcs=given.reward_funcs,
        args=GMPOConfig(**settings),
        train_dataset=given.train_dataset,
        processing_class=given.processing_class,
        rollout_func=CopySampler(),
    )
    with pytest.raises(UsageError, match="tis in loss"):
        op_trl.attach(trainer, correction="tis")
    op_trl.attach(trainer, native_every=1)
    (row,) = train(trainer)
    assert row["mismatch/k3"] < row["mismatch_native/k3"]
