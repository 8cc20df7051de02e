"""Each thing that is wrong is named before the first update."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import onepolicy as op
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


def dropped(made):
    del made["routed_experts"]


SPOILED = [
    (lambda made: made["routed_experts"].reverse(), UsageError, r"has 15 rows, but 6 tokens have"),
    (dropped, UsageError, "none of the 8 samples.*return them from the rollout_func"),
    (lambda made: made["routed_experts"].pop(), UsageError, "7 entries for 8 completions"),
]


@pytest.mark.parametrize(("spoil", "error", "match"), SPOILED, ids=["swapped", "none", "one less"])
def test_routes_of_something_else(tmp_path, spoil, error, match):
    sampler = CopySampler()

    def spoiled(prompts, trainer):
        made = sampler(prompts, trainer)
        spoil(made)
        return made

    trainer = make_trainer(tmp_path, sampler=spoiled)
    op_trl.attach(trainer)
    stops_untrained(trainer, error, match)


def test_router_loss_switched_on_after_attach(tmp_path):
    """TRL then asks every training forward for the routers' logits."""
    trainer = make_trainer(tmp_path, sampler=CopySampler())
    op_trl.attach(trainer)
    trainer.aux_loss_enabled = True
    stops_untrained(trainer, UsageError, "output_router_logits")


FORWARD, TIS = {"scoring": "training-forward"}, {"correction": "tis"}
REFUSED = [
    ({"router_aux_loss_coef": None}, {}, r"router loss off: router_aux_loss_coef = 0\.01"),
    ({"torch_compile": True}, {}, "model not compiled"),
    (
        {"generation_kwargs": {"typical_p": 0.9}},
        TIS,
        r'whole distribution sampled: generation_kwargs\["typical_p"\]=0\.9',
    ),
    (
        {"generation_kwargs": {"num_beams": 2}},
        {},
        r'one by one: .*"num_beams"\]=2',
    ),
    ({"loss_type": "vespo"}, {"correction": "tis"}, "tis in loss vespo"),
    ({"loss_type": "cispo"}, {"correction": "pg-tis"}, "pg-tis in loss cispo"),
    ({"off_policy_mask_threshold": 0.1}, {"correction": "opsm"}, "one off-policy mask"),
    ({}, {"correction": "mis"} | FORWARD, "weights of a micro-batch"),
    ({}, {"dump": "dump"} | FORWARD, "dump of whole generations"),
    ({}, {"correction": "tiss"}, "tis"),
    ({}, {"replay": "r4"}, "replay is 'r4'; there are r3, off"),
    ({}, {"native_every": True}, "native_every is True"),
    ({}, {"form": "numpy"}, "form is 'numpy'"),
    ({}, {"dump": 3}, "attach: dump is 3; give a folder's path"),
]


def test_settings(tmp_path, subtests):
    for changes, settings, match in REFUSED:
        with subtests.test(changes=changes, settings=settings):
            trainer = make_trainer(tmp_path, sampler=CopySampler(), **changes)
            with pytest.raises(UsageError, match=match):
                op_trl.attach(trainer, **settings)
            assert trainer._compute_loss.__self__ is trainer  # nothing was changed


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_what_the_trainers_own_model_will_generate_with(tmp_path, kind):
    """TRL's GenerationConfig leaves open what neither it nor generation_kwargs set."""
    given = {"correction": op.preset("seq-tis")}
    config = {"grpo": "GRPOConfig", "rloo": "RLOOConfig"}[kind]
    for changes, match in (
        ({"generation_kwargs": {"typical_p": 0.5}}, r'generation_kwargs\["typical_p"\]=0\.5'),
        ({"generation_kwargs": {"num_beams": 2}}, r'one by one: generation_kwargs\["num_beams"\]'),
        ({"repetition_penalty": 1.3}, rf"{config}\(repetition_penalty=1\.3\)"),
    ):
        trainer = make_trainer(tmp_path, kind=kind, **changes)
        with pytest.raises(UsageError, match=match):
            op_trl.attach(trainer, **given)
    model = tiny_moe()
    model.generation_config.eta_cutoff, model.generation_config.top_k = 0.1, 7
    trainer = make_trainer(tmp_path, kind=kind, model=model)
    with pytest.raises(UsageError, match=r"sampled: model\.generation_config\.eta_cutoff = 0\.1;"):
        op_trl.attach(trainer, **given)
    op_trl.attach(make_trainer(tmp_path, kind=kind), **given)


def test_a_generate_that_ignores_logits_processors(tmp_path):
    trainer = make_trainer(tmp_path)
    theirs = trainer.model.generate
    trainer.model.generate = lambda logits_processor=None, **given: theirs(**given)
    op_trl.attach(trainer, replay="off")
    stops_untrained(trainer, UsageError, "called its logits_processor 0 times")


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
    trainer = make_trainer(tmp_path, sampler=CopySampler(), kind="gmpo", max_steps=1)
    with pytest.raises(UsageError, match="tis in loss"):
        op_trl.attach(trainer, correction="tis")
    op_trl.attach(trainer, native_every=1)
    (row,) = train(trainer)
    assert row["mismatch/k3"] < row["mismatch_native/k3"]
