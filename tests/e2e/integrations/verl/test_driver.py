"""The driver's part on real batches of verl: correction, dump, loss, and what it refuses."""

from __future__ import annotations

import types

import pytest
import torch

from onepolicy.audit.read import read_dump
from onepolicy.config import UsageError
from onepolicy.correct.presets import preset

capability = pytest.mark.capability

pytestmark = pytest.mark.verl
B, R = 6, 9


@pytest.fixture(scope="module")
def data_proto():
    """Return make() -> DataProto of a scored step, padded on the right; sample 2 has a tool reply
    in the middle."""
    from verl.protocol import DataProto

    def make():
        random = torch.Generator().manual_seed(0)
        mask = (torch.arange(R) < torch.tensor([9, 7, 9, 3, 1, 5])[:, None]).long()
        mask[2, 3:5] = 0
        old = -torch.rand(B, R, generator=random) * 2
        return DataProto.from_dict(
            {
                "old_log_probs": old,
                "rollout_log_probs": old + 0.8 * torch.randn(B, R, generator=random),
                "response_mask": mask,
            }
        )

    return make


@pytest.fixture(scope="module")
def verls_correction():
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    return compute_rollout_correction_and_add_to_batch


@capability("verl", "fixed corrections", how="live")
@pytest.mark.parametrize(("name", "level"), [("tis", "token"), ("seq-tis", "sequence")])
def test_truncated_ratios_are_verls_own(data_proto, verls_correction, name, level):
    from onepolicy.integrations.verl.correction import correct_batch

    theirs, _ = verls_correction(data_proto(), {"rollout_is": level, "rollout_is_threshold": 2.0})
    ours = data_proto()
    report = correct_batch(ours, preset(name))
    mask = ours.batch["response_mask"].bool()
    weights = ours.batch["rollout_is_weights"]
    torch.testing.assert_close(
        weights[mask], theirs.batch["rollout_is_weights"][mask], rtol=1e-6, atol=0
    )
    assert weights[mask].max() == 2.0
    assert report["correction/clipped"] > 0


def test_rejection_leaves_the_mask_alone(data_proto, verls_correction):
    """verl shrinks response_mask instead, and with it every denominator."""
    from onepolicy.integrations.verl.correction import correct_batch

    theirs, _ = verls_correction(
        data_proto(), {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    )
    ours, before = data_proto(), data_proto().batch["response_mask"]
    report = correct_batch(
        ours, preset("recompute", gates=[{"statistic": "ratio", "low": 0.5, "high": 2.0}])
    )
    assert torch.equal(ours.batch["response_mask"], before)
    assert not torch.equal(theirs.batch["response_mask"], before)
    kept = ours.batch["rollout_is_weights"] != 0
    assert torch.equal(kept, theirs.batch["response_mask"].bool())
    assert report["correction/rejected"] == pytest.approx(1 - kept.sum().item() / before.sum())


def config(**changes):
    """Return the parts of verl's real default configuration that are looked at, with changes."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf, open_dict

    with initialize_config_module("verl.trainer.config", version_base=None):
        found = compose("ppo_trainer")
    with open_dict(found):
        found.actor_rollout_ref.actor.strategy = "fsdp2"
        found.actor_rollout_ref.rollout.calculate_log_probs = True
        found.actor_rollout_ref.rollout.enable_rollout_routing_replay = True
        for name, value in changes.items():
            OmegaConf.update(found, name.replace("__", "."), value)
    return found


LOSS = "actor_rollout_ref__actor__policy_loss__loss_mode"
SECTION = "algorithm__rollout_correction"
ROUTING = "actor_rollout_ref__rollout__enable_rollout_routing_replay"
BYPASS = "algorithm__rollout_correction__bypass_mode"
LIVE = {LOSS: "onepolicy", BYPASS: True}
OURS = {"VERL_ENGINE_VENDOR": "onepolicy"}
GOOD = [
    ({}, {}, OURS),
    ({"correction": "tis", "dump": "d"}, {}, OURS),
    (
        {"correction": "mis"},
        {"actor_rollout_ref__rollout__enable_rollout_routing_replay": False},
        {},
    ),
    ({"correction": "pg-tis"}, LIVE, OURS),
    ({"correction": "opsm"}, LIVE, OURS),
    ({"correction": "tis"}, {"actor_rollout_ref__actor__strategy": "megatron"}, {}),
    ({}, {"algorithm__rollout_correction__rollout_is": "token"}, OURS),  # verl's own, measured
]
BAD = [
    ({}, {}, {}, "VERL_ENGINE_VENDOR=None"),
    ({}, {}, {"VERL_ENGINE_VENDOR": "nvidia"}, "export VERL_ENGINE_VENDOR=onepolicy"),
    ({}, {"actor_rollout_ref__rollout__calculate_log_probs": False}, OURS, "calculate_log_probs"),
    (
        {"correction": "tis"},
        {"algorithm__rollout_correction__rollout_is": "token"},
        OURS,
        "weigh every token twice",
    ),
    (
        {"correction": "tis"},
        {"algorithm__rollout_correction__rollout_rs": "token_k1"},
        OURS,
        "rollout_rs=token_k1",
    ),
    (
        {"correction": "tis"},
        {"algorithm__rollout_correction": None},
        OURS,
        "rollout_correction=null",
    ),
    ({"correction": "tis"}, {BYPASS: True}, OURS, "bypass_mode=True; set it to false"),
    ({"correction": "tis"}, {LOSS: "geo_mean"}, OURS, "GMPO"),
    ({"correction": "tis"}, {LOSS: "bypass_mode"}, OURS, "bypass_mode ignores the weights"),
    ({"correction": "tis"}, {LOSS: "onepolicy"}, OURS, "loss_mode=onepolicy"),
    ({"correction": "pg-tis"}, {}, OURS, "loss_mode=onepolicy and"),
    ({"correction": "pg-tis"}, {LOSS: "onepolicy"}, OURS, "bypass_mode=False; it needs"),
    (
        {"correction": "score-centering"},
        {LOSS: "onepolicy", BYPASS: True},
        OURS,
        "likeliest tokens",
    ),
    ({}, {LOSS: "onepolicy"}, OURS, "without trainer.onepolicy.correction"),
    ({"dump": "d"}, {BYPASS: True}, OURS, "no trainer side"),
    (
        {
            "correction": {
                "weight": {"level": "token"},
                "gates": [{"statistic": "k1", "high": 0.1, "ratio": "new/rollout"}],
            }
        },
        {LOSS: "onepolicy", BYPASS: True},
        OURS,
        "there is no old policy",
    ),
    (
        {"correction": {"gates": [{"statistic": "ratio", "high": 2.0, "when": "negative"}]}},
        {},
        OURS,
        "leave `when` out",
    ),
]


@pytest.mark.parametrize(("section", "changes", "environment"), GOOD)
def test_a_configuration_that_fits(section, changes, environment):
    from onepolicy.integrations.verl.preflight import check_config
    from onepolicy.integrations.verl.settings import read_settings

    report = check_config(config(**changes), read_settings(section), environment)
    report.finish()
    assert "onepolicy in verl" in str(report)


@capability("verl", "preflight", how="live")
@pytest.mark.parametrize(("section", "changes", "environment", "said"), BAD)
def test_a_configuration_that_does_not(section, changes, environment, said):
    from onepolicy.integrations.verl.preflight import check_config
    from onepolicy.integrations.verl.settings import read_settings

    report = check_config(config(**changes), read_settings(section), environment)
    with pytest.raises(UsageError, match=said):
        report.finish()


def test_the_trainer_checks_before_it_builds_and_keeps_verls_mode():
    from omegaconf import open_dict
    from verl.trainer.ppo.v1 import get_trainer_cls

    for mode in ("sync", "colocate_async", "separate_async"):
        trainer = get_trainer_cls(f"onepolicy_{mode}")
        assert trainer.base_mode == mode
        assert issubclass(trainer, get_trainer_cls(mode))
    wrong = config(algorithm__rollout_correction__rollout_is="token")
    with open_dict(wrong):
        wrong.trainer.onepolicy = {"correction": "tis"}
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
def test_a_step_as_a_dump(tmp_path):
    """Two samples of 2 + 3 and 1 + 2 tokens, and one that verl made up to fill the batch."""
    from tensordict import TensorDict

    from onepolicy.integrations.verl.dump import write_batch
    from onepolicy.integrations.verl.routes import NATIVE_ROUTES, ROUTES
    from onepolicy.integrations.verl.workers import ModelRouters

    def nested(*rows, dtype=torch.int64):
        tensors = [torch.tensor(row, dtype=dtype) for row in rows]
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    def routes(*rows):
        tensors = [torch.tensor(row).view(-1, 2, 2).to(torch.int16) for row in rows]
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    def filled(*rows):
        tensors = [torch.full((count, 1, 2), ids, dtype=torch.int16) for count, ids in rows]
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    one, two = [0, 0, 1, 2], [0, 0, 3, 1]  # a dense layer, then one of experts
    data = TensorDict(
        {
            "prompts": nested([4, 5], [4], [0]),
            "responses": nested([6, 7, 8], [9, 3], [2]),
            "response_mask": nested([1, 0, 1], [1, 1], [0]),
            "rollout_log_probs": nested([-1.0, 0, -2], [-0.5, -0.25], [0], dtype=torch.float32),
            "old_log_probs": nested([-1.5, -3, -2], [-0.5, -0.75], [-9], dtype=torch.float32),
            "entropy": nested([1.0, 1, 1], [2, 2], [3], dtype=torch.float32),
            "rm_scores": nested([0.0, 0, 1], [0, 0.5], [0], dtype=torch.float32),
            ROUTES: routes([one, one, two, two, [0] * 4], [one, two, [0] * 4], [[0] * 4] * 2),
            NATIVE_ROUTES: torch.nested.as_nested_tensor(
                [
                    torch.full((n, 1, 2), k, dtype=torch.int16)
                    for n, k in ((5, 1), (3, -1), (2, -1))
                ],
                layout=torch.jagged,
            ),
        },
        batch_size=3,
    )
    tags = [{"min_global_steps": 7}, {"min_global_steps": 6}, {"is_padding": True}]
    write_batch(data, tags, ModelRouters((1,), 2, 4, 2), tmp_path, 3)
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(tmp_path / "step_00003_0.parquet").to_pylist()
    assert [row["tokens"] for row in rows] == [[6, 7, 8], [9, 3]]
    assert [row["mask"] for row in rows] == [[True, False, True], [True, True]]
    assert [row["version"] for row in rows] == [7, 6]
    assert [row["reward"] for row in rows] == [1.0, 0.5]
    # Entry t is the route of the token before it.
    assert rows[0]["routes_rollout"] == [1, 2, 3, 1, 3, 1]
    assert rows[1]["routes_rollout"] == [1, 2, 3, 1]
    assert rows[0]["routes_trainer"] == [1] * 6
    assert rows[1]["routes_trainer"] == [-1] * 4
    assert [block.lengths.tolist() for block in read_dump(tmp_path, {})] == [[3, 2]]
