"""SkyRL's hooks, called with its batches and configuration.

Contract: the files of SkyRL's wheel 0.4.0, which wants Python 3.12 and a GPU. With the path of an
unpacked wheel in SKYRL_CHECKOUT (and loguru, omegaconf, jaxtyping) its own losses are compared too.
"""

import importlib
import math
import os
import sys
from types import ModuleType, SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

import onepolicy as op
from onepolicy.audit.run import audit
from onepolicy.config import UsageError
from onepolicy.integrations import skyrl as op_skyrl
from onepolicy.integrations.skyrl.loss import policy_loss_of
from onepolicy.support.checks import SupportError
from support.contracts import value_of

capability = pytest.mark.capability
CHECKOUT = os.environ.get("SKYRL_CHECKOUT")
PENALTY = {"repetition_penalty": 1.3}


class Batch(dict):
    """The part of SkyRL's TrainingInputBatch that our hooks use."""

    metadata = None


def config(
    loss="regular", anchor=None, normalise=False, sampling=None, reduction="token_mean", **own
):
    """Return SkyRL's configuration. anchor: of CISPO's ratio, the old policy or the rollout."""
    correction = dict.fromkeys(("tis_ratio_type", "sequence_mask_metric"))
    algorithm = SimpleNamespace(
        policy_loss_type=loss,
        loss_reduction=reduction,
        off_policy_correction=SimpleNamespace(**(correction | own)),
        advantage_batch_normalize=normalise,
        eps_clip_low=0.2,
        eps_clip_high=0.2,
        cispo=SimpleNamespace(cispo_anchor=anchor),
        temperature=1.0,
    )
    whole = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "temperature": 1.0, "additional_kwargs": None}
    parameters = SimpleNamespace(**whole | (sampling or {}))
    generator = SimpleNamespace(sampling_params=parameters)
    return SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm), generator=generator)


def batch(seed=0):
    """Return four samples of up to six response tokens, the last one a filler."""
    random = torch.Generator().manual_seed(seed)
    old = -3 - torch.rand(4, 6, generator=random)
    mask = torch.ones(4, 6)
    mask[0, 4:] = mask[2, :2] = mask[1, 2] = 0
    made = Batch(
        sequences=torch.randint(1, 60, (4, 10), generator=random),
        action_log_probs=old,
        rollout_logprobs=old - 0.4 * torch.randn(4, 6, generator=random),
        loss_mask=mask,
        advantages=torch.randn(4, 1, generator=random).expand(4, 6).clone(),
    )
    made.metadata = {"pad_size": 1}
    return made


def trainer(cfg=None):
    made = SimpleNamespace(cfg=cfg or config(), all_metrics={}, global_step=3)
    made.compute_advantages_and_returns = lambda data: data
    return made


def step(data=None, cfg=None, **settings):
    made = trainer(cfg)
    op_skyrl.attach(made, **settings)
    return made.compute_advantages_and_returns(data or batch()), made


def real():
    given = batch()
    mask = given["loss_mask"] > 0
    mask[3] = False
    return given["action_log_probs"], given["rollout_logprobs"], mask


def test_the_wrapped_method_and_the_loss_are_called_so():
    assert value_of("SkyRL", "advantages") == ["self", "data"]
    (call,) = value_of("SkyRL", "policy loss is called")
    assert call[3:] == ["config=", "loss_mask=", "rollout_logprobs="]


@capability("SkyRL", "measured", how="contract")
def test_a_step_is_measured_into_the_trainers_metrics():
    data, made = step()
    assert made.all_metrics["mismatch/k3"] == pytest.approx(op.mismatch(*real()).k3)
    assert data["advantages"].equal(batch()["advantages"])


@capability("SkyRL", "fixed corrections", how="contract")
def test_the_advantages_are_weighed_as_the_library_does(subtests):
    old, rollout, mask = real()
    for preset in ("tis", "icepop", "geo-rs", "mis", "m2po"):
        with subtests.test(preset=preset):
            data, made = step(correction=preset)
            given = batch()
            advantage = given["advantages"]
            applied = op.reweight(old, rollout, mask, op.preset(preset), advantage=advantage)
            expected = advantage * applied.weight
            torch.testing.assert_close(data["advantages"][mask], expected[mask])
            assert data["loss_mask"].equal(given["loss_mask"])
            rejected = made.all_metrics["correction/rejected"]
            assert rejected == pytest.approx(applied.report["correction/rejected"])


def test_self_normalised_weights_average_1_as_the_loss_does():
    old, rollout, mask = real()
    data, _ = step(correction="mis", cfg=config(reduction="sequence_mean"))
    applied = op.reweight(old, rollout, mask, op.preset("mis"), average="sequences")
    assert not applied.weight.equal(op.reweight(old, rollout, mask, op.preset("mis")).weight)
    expected = batch()["advantages"] * applied.weight
    torch.testing.assert_close(data["advantages"][applied.keep], expected[applied.keep])


@capability("SkyRL", "dump", how="contract")
def test_a_step_is_dumped_for_the_audit(tmp_path):
    step(dump=tmp_path)
    found = audit(tmp_path, {}).accumulated.steps
    assert found[3].statistics()["k3"] == pytest.approx(op.mismatch(*real()).k3, rel=1e-5)


@capability("SkyRL", "preflight", how="contract")
def test_settings_that_do_not_fit_are_named(subtests):
    for cfg, correction, message in (
        (config(tis_ratio_type="token"), "tis", "leave SkyRL's out"),
        (config("dppo"), "tis", "compares with the rollout itself"),
        (config("cispo", anchor="rollout"), "tis", "cispo_anchor=rollout.*compares with"),
        (config(normalise=True), "tis", "advantage_batch_normalize"),
        (config(reduction="prompt_mean"), "mis", "use token_mean or sequence_mean"),
        (config("onepolicy"), None, "register_loss got"),
        (config("onepolicy"), "tis", "fixed ones with SkyRL's losses"),
        (config(), "pg-tis", "policy_loss_type=onepolicy"),
        (config("onepolicy"), "score-centering", "likeliest tokens"),
        (config(), "tsi", "tis"),
        (config(sampling={"top_p": 0.5}), "tis", r"set generator.sampling_params.top_p=1"),
        (config(sampling={"min_p": 0.1}), "tis", r"sampling_params.min_p=0.1; .*=0, or leave"),
        (config(sampling={"temperature": 0.5}), "tis", r"sampling_params.temperature=1, or"),
        (config(sampling={"additional_kwargs": PENALTY}), "tis", "kwargs.repetition_penalty=1.3"),
    ):
        made = trainer(cfg)
        theirs = made.compute_advantages_and_returns
        with subtests.test(message=message):
            with pytest.raises(UsageError, match=message):
                op_skyrl.attach(made, correction=correction)
            assert made.compute_advantages_and_returns is theirs
    step(cfg=config("cispo", anchor="old"), correction="tis")


def test_cut_sampling_is_right_where_skyrl_replays_the_support(subtests):
    flags = ("enable_sample_support_replay", "enable_return_sample_support_set")
    for on in ((True, True), (True, False), (False, True)):
        cfg = config(sampling={"top_p": 0.5, "top_k": 20})
        setattr(cfg.trainer.algorithm, flags[0], on[0])
        cfg.generator.inference_engine = SimpleNamespace(**{flags[1]: on[1]})
        with subtests.test(on=on):
            if all(on):
                op_skyrl.attach(trainer(cfg), correction="tis")
                cfg.generator.sampling_params.additional_kwargs = PENALTY
                with pytest.raises(UsageError, match="repetition_penalty"):
                    op_skyrl.attach(trainer(cfg), correction="tis")
            else:
                with pytest.raises(UsageError, match=r"enable_sample_support_replay=true and"):
                    op_skyrl.attach(trainer(cfg), correction="tis")


def test_cut_sampling_that_is_only_measured_is_noted():
    report = op_skyrl.attach(trainer(config(sampling={"top_k": 3})))
    (note,) = report.notes
    assert "sampling_params.top_k=3" in note


def test_a_dump_that_is_no_folder():
    with pytest.raises(UsageError, match="attach: dump is 3; give a folder's path"):
        op_skyrl.attach(trainer(), dump=3)


def test_a_second_attach_is_refused():
    """It would weigh every step twice."""
    made = trainer()
    op_skyrl.attach(made, correction="tis")
    with pytest.raises(UsageError, match="one attach"):
        op_skyrl.attach(made, correction="tis")


class Registry:
    """The part of SkyRL's PolicyLossRegistry that our hooks use."""

    def __init__(self, loss):
        self.losses = {"onepolicy": loss}

    def list_available(self):
        return list(self.losses)

    def get(self, name):
        return self.losses[name]


def test_the_loss_has_the_correction_of_attach(monkeypatch):
    """One part of a live correction is applied by attach, the other in the loss."""
    registry = Registry(policy_loss_of("opsm"))
    module = SimpleNamespace(PolicyLossRegistry=registry)
    monkeypatch.setitem(sys.modules, "skyrl.backends.skyrl_train.utils.ppo_utils", module)
    step(cfg=config("onepolicy"), correction="opsm")
    with pytest.raises(UsageError, match="register_loss got opsm"):
        step(cfg=config("onepolicy"), correction="pg-tis")


def test_a_step_without_a_sampled_token(tmp_path):
    data = batch()
    data["loss_mask"] = torch.zeros(4, 6)
    data["advantages"] = data["advantages"] * torch.nan  # of a group without rewards
    found, made = step(data, correction="tis", dump=tmp_path)
    assert not found["advantages"].any()
    assert made.all_metrics == {}
    assert not list(tmp_path.iterdir())


def test_a_side_that_is_missing():
    for missing, words in (("action_log_probs", "scoring"), ("rollout_logprobs", "sampling_par")):
        data = batch()
        data[missing] = None
        _, made = step(data)  # nothing to measure
        assert made.all_metrics == {}
        with pytest.raises(UsageError, match=words):
            step(data, correction="tis")


def loss_inputs():
    given = batch()
    new = (given["action_log_probs"] * 0.95).requires_grad_()
    known = {"loss_mask": given["loss_mask"], "rollout_logprobs": given["rollout_logprobs"]}
    cfg = config("onepolicy").trainer.algorithm
    return (new, given["action_log_probs"], given["advantages"]), {"config": cfg} | known


@capability("SkyRL", "live corrections", how="contract")
def test_live_corrections_by_hand(subtests):
    (new, old, a), more = loss_inputs()
    ratio = (new - more["rollout_logprobs"]).exp()
    weight, mask = ratio.detach(), more["loss_mask"]
    for name, by_hand in (
        ("pg-tis", -weight.clamp(max=2.0) * a * new),
        ("ppo-is", -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)),
        ("dppo-tv", -ratio * a),  # probabilities of e^-3 do not move by 0.2
    ):
        with subtests.test(name=name):
            loss, metrics = policy_loss_of(name)(new, old, a, **more)
            (found,) = torch.autograd.grad(loss, new)
            (expected,) = torch.autograd.grad((by_hand * mask).sum(), new, retain_graph=True)
            torch.testing.assert_close(found, expected)
            nothing = more | {"loss_mask": torch.zeros_like(mask)}
            empty, names = policy_loss_of(name)(new, old, a, **nothing)
            assert empty == 0
            assert list(names) == list(metrics)


def test_metrics_of_the_loss_are_finite_on_every_rank():
    """SkyRL averages them over ranks: one value that is not would be all ranks'."""
    (new, old, a), more = loss_inputs()
    more["rollout_logprobs"] = more["rollout_logprobs"] * torch.nan
    loss, metrics = policy_loss_of("pg-tis")(new, old, a, **more)
    assert loss == 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_what_a_loss_cannot_be():
    with pytest.raises(UsageError, match="leave SkyRL's loss"):
        policy_loss_of("tis")
    given, more = loss_inputs()
    with pytest.raises(UsageError, match="rollout_logprobs"):
        policy_loss_of("pg-tis")(*given, **more | {"rollout_logprobs": None})


def compare_with_skyrls_own_losses(monkeypatch):
    """tis in the advantages against SkyRL's token TIS, and dppo-tv against its DPPO."""
    inner = "skyrl.backends.skyrl_train"
    for name in ("skyrl", "skyrl.backends", inner, f"{inner}.utils", "skyrl.train"):
        package = ModuleType(name)
        package.__path__ = [f"{CHECKOUT}/{name.replace('.', '/')}"]
        monkeypatch.setitem(sys.modules, name, package)
    settings = ModuleType("skyrl.train.config")
    settings.AlgorithmConfig = object
    monkeypatch.setitem(sys.modules, "skyrl.train.config", settings)
    module = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")

    (new, old, a), more = loss_inputs()
    own = config(tis_ratio_type="token", token_tis_ratio_clip_high=2.0, **dict.fromkeys(OFF))
    own.trainer.algorithm.off_policy_correction.tis_ratio_type = "token"
    with_tis, off = own.trainer.algorithm, config(**dict.fromkeys(OFF)).trainer.algorithm
    loss, _ = module.ppo_policy_loss(new, old, a, **(more | {"config": with_tis}))
    (theirs,) = torch.autograd.grad(loss, new)
    data, _ = step(correction="tis")
    loss, _ = module.ppo_policy_loss(new, old, data["advantages"], **(more | {"config": off}))
    (ours,) = torch.autograd.grad(loss, new)
    assert ours[:3].equal(theirs[:3])  # the last one is a filler

    bound = op.preset("dppo-tv").gates[0].high
    off.dppo = SimpleNamespace(dppo_type="binary_tv", delta_low=bound, delta_high=bound)
    off.policy_loss_type = "dppo"
    loss, _ = module.dppo_policy_loss(new, old, a, **(more | {"config": off}))
    (theirs,) = torch.autograd.grad(loss, new)
    loss, _ = policy_loss_of("dppo-tv")(new, old, a, **more)
    (ours,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    op_skyrl.register_loss("dppo-tv")
    registered = module.PolicyLossRegistry.get("onepolicy")
    assert registered(new, old, a, **more)[0] == loss


OFF = (
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
)
if CHECKOUT:
    test_skyrls_own_losses = compare_with_skyrls_own_losses


def supported(planted=lambda rows: rows, width=3):
    """Return a batch with supports: SkyRL's PackedTensor, a row for every token of a response.

    planted: rows [tokens, K] of one sample -> the same.
    """
    made = batch()
    mask = made["loss_mask"] > 0
    attention = torch.ones(4, 10, dtype=torch.int64)
    attention[0, 8:] = 0  # its response is shorter
    rows, lengths = [], (4, 6, 6, 6)
    for i, length in enumerate(lengths):
        tokens = made["sequences"][i, 4 : 4 + length, None]
        own = torch.cat([tokens, (tokens + 7) % 100, torch.full_like(tokens, -1)], 1)[:, :width]
        own[~mask[i, :length]] = -1  # a tool's tokens
        rows.append(planted(own).int())
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    packed = SimpleNamespace(values=torch.cat(rows), cu_seqlens=bounds)
    made |= {"attention_mask": attention, "rollout_sample_support": packed}
    made.metadata = {"pad_size": 1}
    return made


def test_supports_of_a_batch_are_dumped(tmp_path):
    """Contract: the field of SkyRL's Experience; its rows are those of the last tokens fed."""
    assert "rollout_sample_support" in value_of("SkyRL", "experience")
    assert value_of("SkyRL", "routes of a batch") == ["self", "values", "cu_seqlens"]
    step(supported(), dump=tmp_path)
    (file,) = tmp_path.iterdir()
    rows = pq.read_table(file).to_pylist()
    assert [len(row["tokens"]) for row in rows] == [4, 6, 4]
    for row in rows:
        assert row["support_counts"] == [2 * sampled for sampled in row["mask"]]
        sampled = [t for t, one in zip(row["tokens"], row["mask"], strict=True) if one]
        sets = list(zip(row["support_ids"][::2], row["support_ids"][1::2], strict=True))
        assert sets == [tuple(sorted((t, (t + 7) % 100))) for t in sampled]


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (lambda rows: rows.roll(1, 0), "not in their own support|have no support"),
        (lambda rows: rows.masked_fill(rows >= 0, -1), "sampled tokens have no support"),
        (lambda rows: torch.where(rows >= 0, 99, -1)[:, :1], "not in their own support"),
    ],
    ids=["late", "missing", "without the token"],
)
def test_wrong_supports_stop_the_step(planted, words):
    with pytest.raises(SupportError, match=words):
        step(supported(planted))


def test_supports_of_other_samples_are_refused():
    data = supported()
    data["rollout_sample_support"].cu_seqlens = torch.tensor([0, 22])
    with pytest.raises(UsageError, match=r"expected rows \[tokens, top_k\] of 4"):
        step(data)
