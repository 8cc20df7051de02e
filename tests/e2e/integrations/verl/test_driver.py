"""The driver's part on real batches of verl: correction, dump, loss, and what it refuses."""

from __future__ import annotations

import copy
import functools
import types
from contextlib import ExitStack

import pytest
import torch
from pyarrow import parquet

from onepolicy.config import UsageError
from onepolicy.correct.presets import preset
from onepolicy.record.read import read_dump
from onepolicy.replay.checks import RoutingError

capability = pytest.mark.capability
pytestmark = pytest.mark.verl
B, R = 6, 9


def data_proto():
    """Return the DataProto of a scored step, padded on the right; sample 2 has a tool reply in the
    middle."""
    from verl.protocol import DataProto

    random = torch.Generator().manual_seed(0)
    mask = (torch.arange(R) < torch.tensor([9, 7, 9, 3, 1, 5])[:, None]).long()
    mask[2, 3:5] = 0
    old = -torch.rand(B, R, generator=random) * 2 - 4
    rollout = old + 0.8 * torch.randn(B, R, generator=random)
    return DataProto.from_dict(
        {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask}
    )


def verls(**settings):
    """Return the batch as verl's own correction leaves it."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    return compute_rollout_correction_and_add_to_batch(data_proto(), settings)[0]


@capability("verl", "fixed corrections", how="live")
@pytest.mark.parametrize(("name", "level"), [("tis", "token"), ("seq-tis", "sequence")])
def test_truncated_ratios_are_verls_own(name, level):
    from onepolicy.integrations.verl.correction import correct_batch

    theirs, ours = verls(rollout_is=level, rollout_is_threshold=2.0), data_proto()
    report = correct_batch(ours, preset(name))
    mask = ours.batch["response_mask"].bool()
    weights, wanted = (batch.batch["rollout_is_weights"][mask] for batch in (ours, theirs))
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0)
    assert weights.max() == 2.0
    assert report["correction/clipped"] > 0


def test_rejection_leaves_the_mask_alone():
    """verl shrinks response_mask instead, and with it every denominator."""
    from onepolicy.integrations.verl.correction import correct_batch

    theirs = verls(rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    ours, before = data_proto(), data_proto().batch["response_mask"]
    gate = {"statistic": "ratio", "low": 0.5, "high": 2.0}
    report = correct_batch(ours, preset("recompute", gates=[gate]))
    assert torch.equal(ours.batch["response_mask"], before)
    assert not torch.equal(theirs.batch["response_mask"], before)
    kept = ours.batch["rollout_is_weights"] != 0
    assert torch.equal(kept, theirs.batch["response_mask"].bool())
    assert report["correction/rejected"] == pytest.approx(1 - kept.sum().item() / before.sum())


@functools.cache
def default_config():
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer")


def config(changes=None):
    """Return the parts of verl's real default configuration that are looked at, with changes."""
    from omegaconf import OmegaConf, open_dict

    found = copy.deepcopy(default_config())
    with open_dict(found):
        for name, value in (GIVEN | (changes or {})).items():
            OmegaConf.update(found, name, value)
    return found


STRATEGY = "actor_rollout_ref.actor.strategy"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
LOGP = "actor_rollout_ref.rollout.calculate_log_probs"
ROUTING = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
SECTION = "algorithm.rollout_correction"
BYPASS, IS, RS = (f"{SECTION}.{name}" for name in ("bypass_mode", "rollout_is", "rollout_rs"))
ROLLOUT = "actor_rollout_ref.rollout"
HOT, RAW = {f"{ROLLOUT}.temperature": 0.5}, {f"{ROLLOUT}.logprobs_mode": "raw_logprobs"}
GIVEN = {STRATEGY: "fsdp2", LOGP: True, ROUTING: True}
LIVE = {LOSS: "onepolicy", BYPASS: True}
OURS = {"VERL_ENGINE_VENDOR": "onepolicy"}
TIS, PG_TIS = {"correction": "tis"}, {"correction": "pg-tis"}
OLD_GATE = {"statistic": "k1", "high": 0.1, "ratio": "new/rollout"}
SIGNED_GATE = {"statistic": "ratio", "high": 2.0, "when": "negative"}
GOOD = [
    ({}, {}, OURS),
    (TIS | {"dump": "d"}, {}, OURS),
    ({"correction": "mis"}, {ROUTING: False}, {}),
    (PG_TIS, LIVE, OURS),
    ({"correction": "opsm"}, LIVE, OURS),
    (TIS, {STRATEGY: "megatron"}, {}),
    ({}, {IS: "token"}, OURS),  # verl's own, measured
    (TIS, HOT, OURS),  # verl scores at the rollout's temperature
    (TIS, RAW, OURS),
    ({}, {f"{ROLLOUT}.top_k": 3}, OURS),
]
BAD = [
    ({}, {}, {}, "VERL_ENGINE_VENDOR=None"),
    ({}, {}, {"VERL_ENGINE_VENDOR": "nvidia"}, "export VERL_ENGINE_VENDOR=onepolicy"),
    ({}, {LOGP: False}, OURS, "calculate_log_probs"),
    (TIS, {IS: "token"}, OURS, "weigh every token twice"),
    (TIS, {RS: "token_k1"}, OURS, "rollout_rs=token_k1"),
    (TIS, {SECTION: None}, OURS, "rollout_correction=null"),
    (TIS, {BYPASS: True}, OURS, "bypass_mode=True; set it to false"),
    (TIS, {LOSS: "geo_mean"}, OURS, "GMPO"),
    (TIS, {LOSS: "bypass_mode"}, OURS, "bypass_mode ignores the weights"),
    (TIS, {LOSS: "onepolicy"}, OURS, "loss_mode=onepolicy"),
    (PG_TIS, {}, OURS, "loss_mode=onepolicy and"),
    (PG_TIS, {LOSS: "onepolicy"}, OURS, "bypass_mode=False; it needs"),
    ({"correction": "score-centering"}, LIVE, OURS, "likeliest tokens"),
    ({}, {LOSS: "onepolicy"}, OURS, "without trainer.onepolicy.correction"),
    ({"dump": "d"}, {BYPASS: True}, OURS, "no trainer side"),
    (
        {"correction": {"weight": {"level": "token"}, "gates": [OLD_GATE]}},
        LIVE,
        OURS,
        "there is no old policy",
    ),
    ({"correction": {"gates": [SIGNED_GATE]}}, {}, OURS, "leave `when` out"),
    (TIS, {f"{ROLLOUT}.top_p": 0.5}, OURS, "set actor_rollout_ref.rollout.top_p=1, or leave"),
    (TIS, {f"{ROLLOUT}.min_p": 0.1}, OURS, "actor_rollout_ref.rollout.min_p=0.1"),
    (TIS, {f"{ROLLOUT}.repetition_penalty": 1.3}, OURS, "rollout.repetition_penalty=1.3"),
    (TIS, HOT | RAW, OURS, "set actor_rollout_ref.rollout.logprobs_mode='processed_logprobs'"),
]


def checked(section, changes, environment):
    from onepolicy.integrations.verl.preflight import check_config
    from onepolicy.integrations.verl.settings import read_settings

    return check_config(config(changes), read_settings(section), environment)


def test_configurations_that_fit(subtests):
    for section, changes, environment in GOOD:
        with subtests.test(section=section, changes=changes):
            report = checked(section, changes, environment)
            report.finish()
            assert "onepolicy in verl" in str(report)


@capability("verl", "preflight", how="live")
def test_configurations_that_do_not(subtests):
    for section, changes, environment, said in BAD:
        with subtests.test(said=said), pytest.raises(UsageError, match=said):
            checked(section, changes, environment).finish()


def test_cut_sampling_that_is_only_measured_is_noted():
    (note,) = checked({}, {f"{ROLLOUT}.top_k": 3}, OURS).notes
    assert "actor_rollout_ref.rollout.top_k=3" in note


def test_the_first_scored_step_is_diagnosed(monkeypatch, caplog):
    """Log-probabilities of the next slot are named in verl's log, once."""
    from tensordict import TensorDict
    from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base

    from onepolicy.integrations.verl import trainer as module

    made = get_trainer_cls("onepolicy_sync")(config())
    old = -3 * torch.rand(8, 41, generator=torch.Generator().manual_seed(0))
    jagged = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    fields = {"old_log_probs": old[:, 1:], "rollout_log_probs": old[:, :-1]}
    fields |= {"response_mask": torch.ones(8, 40), "entropy": torch.full((8, 40), 0.7)}
    fields["responses"] = torch.zeros(8, 40, dtype=torch.int64)
    asked = []

    def fetch(batch, names):
        asked.append(sorted(names))
        return TensorDict({name: jagged(list(fields[name])) for name in names}, batch_size=8)

    monkeypatch.setattr(module, "_fetch", fetch)
    monkeypatch.setattr(
        trainer_base.PPOTrainer, "_compute_old_log_prob", lambda self, batch, metrics: batch
    )
    made.global_steps = 1
    for _ in range(2):
        made._compute_old_log_prob(None, {})
    assert caplog.text.count("the first scored step is not clean: shift") == 1
    assert asked == [sorted(fields), sorted(set(fields) - {"entropy", "responses"})]


def test_the_trainer_checks_before_it_builds_and_keeps_verls_mode():
    from omegaconf import open_dict
    from verl.trainer.ppo.v1 import get_trainer_cls

    for mode in ("sync", "colocate_async", "separate_async"):
        trainer = get_trainer_cls(f"onepolicy_{mode}")
        assert trainer.base_mode == mode
        assert issubclass(trainer, get_trainer_cls(mode))
    wrong = config({IS: "token"})
    with open_dict(wrong):
        wrong.trainer.onepolicy = TIS
    with pytest.raises(UsageError, match="weigh every token twice"):
        get_trainer_cls("onepolicy_sync")(wrong)
    right = config()
    with open_dict(right):
        right.trainer.v1.trainer_mode = "onepolicy_sync"
    built = get_trainer_cls("onepolicy_sync")(right)
    assert built.trainer_mode == "sync"
    assert type(built.replay_buffer).__name__ == "ReplayBuffer"  # others take verl's async one


def test_workers_with_another_engine_are_named():
    from onepolicy.integrations.core.preflight import Preflight
    from onepolicy.integrations.verl.preflight import check_workers
    from onepolicy.integrations.verl.workers import WorkerSettings, set_up

    foreign = types.SimpleNamespace(actor=types.SimpleNamespace(engine=object()))
    actor = types.SimpleNamespace(worker_dict={"actor_rollout": foreign})
    settings = WorkerSettings(routes=True, native_routes=False, correction=None)
    report = Preflight("verl")
    check_workers(report, [set_up(actor, settings)], routes=True)
    with pytest.raises(UsageError, match=r"engine in the workers: builtins\.object"):
        report.finish()


def test_the_loss_refuses_what_it_was_not_given():
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    from onepolicy.integrations.verl import policy_loss

    loss = get_policy_loss_fn("onepolicy")
    ones = torch.ones(2, 3)
    with pytest.raises(UsageError, match="was given no correction"):
        loss(ones, ones, ones, ones)
    policy_loss.configure(preset("pg-tis"))
    try:
        with pytest.raises(UsageError, match="correct it twice"):
            loss(ones, ones, ones, ones, rollout_is_weights=ones)
    finally:
        policy_loss.configure(None)


@capability("verl", "dump", how="live")
def test_samples_that_lack_routes_stop_a_run_only_if_none_ever_had_any():
    """A micro-batch of one such sample, as a dynamic batch may make."""
    from onepolicy.integrations.verl.engine import _Forward

    nothing = types.SimpleNamespace(valid=torch.zeros(3, dtype=torch.bool))
    routes = types.SimpleNamespace(missing=1, trained=[1], laid_out=lambda *_, **__: nothing)
    inputs, how = {"attention_mask": torch.ones(1, 3)}, {"rank": 0, "ranks": 1}
    with ExitStack() as stack:
        forward = _Forward(stack, keep_native=False)
        with pytest.raises(RoutingError, match="all zeros in all 1 trained samples"):
            forward.open(None, routes, inputs, 0, has_replayed=False, **how)
        forward.open(None, routes, inputs, 0, has_replayed=True, **how)
        assert not forward.replays


def test_a_step_as_a_dump(tmp_path):
    """Two samples of 2 + 3 and 1 + 2 tokens, one that verl made up to fill the batch, and one whose
    response is empty."""
    from tensordict import TensorDict

    from onepolicy.integrations.verl.dump import write_batch
    from onepolicy.integrations.verl.routes import NATIVE_ROUTES, ROUTES
    from onepolicy.integrations.verl.workers import ModelRouters

    def jagged(tensors):
        return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)

    def nested(*rows, dtype=torch.int64):
        return jagged(torch.tensor(row, dtype=dtype) for row in rows)

    def routes(*rows):
        return jagged(torch.tensor(row).view(-1, 2, 2).to(torch.int16) for row in rows)

    def filled(*rows):
        return jagged(torch.full((count, 1, 2), ids, dtype=torch.int16) for count, ids in rows)

    floats = torch.float32
    one, two = [0, 0, 1, 2], [0, 0, 3, 1]  # a dense layer, then one of experts
    data = TensorDict(
        {
            "prompts": nested([4, 5], [4], [0], [4]),
            "responses": nested([6, 7, 8], [9, 3], [2], []),
            "response_mask": nested([1, 0, 1], [1, 1], [0], []),
            "rollout_log_probs": nested([-1.0, 0, -2], [-0.5, -0.25], [0], [], dtype=floats),
            "old_log_probs": nested([-1.5, -3, -2], [-0.5, -0.75], [-9], [], dtype=floats),
            "entropy": nested([1.0, 1, 1], [2, 2], [3], [], dtype=floats),
            "rm_scores": nested([0.0, 0, 1], [0, 0.5], [0], [], dtype=floats),
            ROUTES: routes(
                [one, one, two, two, [0] * 4], [one, two, [0] * 4], [[0] * 4] * 2, [[0] * 4]
            ),
            NATIVE_ROUTES: filled((5, 1), (3, -1), (2, -1), (1, -1)),
        },
        batch_size=4,
    )
    old = {"min_global_steps": 6}
    tags = [{"min_global_steps": 7}, old, {"is_padding": True}, old]
    write_batch(data, tags, ModelRouters((1,), 2, 4, 2), tmp_path, 3)
    rows = parquet.read_table(tmp_path / "step_00003_0.parquet").to_pylist()
    assert [row["tokens"] for row in rows] == [[6, 7, 8], [9, 3]]
    assert [row["mask"] for row in rows] == [[True, False, True], [True, True]]
    assert [(row["version"], row["trained_version"]) for row in rows] == [(7, 7), (6, 7)]
    assert [row["reward"] for row in rows] == [1.0, 0.5]
    # Entry t is the route of the token before it.
    assert rows[0]["routes_rollout"] == [1, 2, 3, 1, 3, 1]
    assert rows[1]["routes_rollout"] == [1, 2, 3, 1]
    assert rows[0]["routes_trainer"] == [1] * 6
    assert rows[1]["routes_trainer"] == [-1] * 4
    assert [block.lengths.tolist() for block in read_dump(tmp_path, {})] == [[3, 2]]
    # verl trains in step 9 what 8 updates made, whether or not a sample of the batch is that young.
    write_batch(data, tags, ModelRouters((1,), 2, 4, 2), tmp_path, 9)
    rows = parquet.read_table(tmp_path / "step_00009_0.parquet").to_pylist()
    assert [(row["version"], row["trained_version"]) for row in rows] == [(7, 8), (6, 8)]
    made_up = [{"is_padding": True}] * 4
    assert write_batch(data, made_up, ModelRouters((1,), 2, 4, 2), tmp_path, 10) is None
