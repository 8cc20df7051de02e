"""The hooks of slime and miles, called as the named versions call them.

Contract: slime 0.3.1 at 624b824 and miles at 31f1ca9 (August 2026), read and not run; the keyword
sets and signatures are in tests/support/contracts.json.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import onepolicy as op
from onepolicy.audit.run import audit
from onepolicy.config import UsageError
from onepolicy.integrations import miles, slime
from onepolicy.integrations.slime.metrics import over_ranks
from support.contracts import value_of

capability = pytest.mark.capability


def args(correction=None, *, use_tis=False, **more):
    """Return the attributes of slime's arguments that the hooks read."""
    table = None
    if correction is not None:
        table = {"correction": correction}
    return SimpleNamespace(onepolicy=table, use_tis=use_tis, **more)


def samples(seed=0, lengths=(5, 3, 4)):
    """Return two sides' log-probabilities and masks of some responses."""
    random = torch.Generator().manual_seed(seed)
    old = [-3 - torch.rand(n, generator=random) for n in lengths]
    rollout = [logp - 0.5 * torch.randn(len(logp), generator=random) for logp in old]
    masks = [torch.ones(n, dtype=torch.int) for n in lengths]
    masks[0][1:3] = 0
    return old, rollout, masks


def rollout_data(**more):
    old, rollout, masks = samples()
    return {
        "log_probs": old,
        "rollout_log_probs": rollout,
        "loss_masks": masks,
        "advantages": [
            torch.full_like(logp, a) for logp, a in zip(old, (1.0, -2.0, 0.5), strict=True)
        ],
        "tokens": [torch.arange(len(logp) + 2) for logp in old],
        "rewards": [1.0, 0.0, 0.5],
        "total_lengths": [len(logp) + 2 for logp in old],
        "response_lengths": [len(logp) for logp in old],
    } | more


def micro_batch(trainer):
    """Return the keywords with which the named version calls a TIS hook."""
    old, rollout, masks = samples()
    known = {
        "pg_loss": torch.arange(12.0) - 4,
        "train_log_probs": old,
        "rollout_log_probs": rollout,
        "loss_masks": masks,
    }
    names = value_of(trainer, "TIS hook")
    return {name: known.get(name) for name in names if name != "args"}


def test_the_hooks_take_what_the_trainers_call_them_with():
    for trainer, module in (("slime", slime), ("miles", miles)):
        inspect.signature(module.tis).bind(**dict.fromkeys(value_of(trainer, "TIS hook")))
        for call in value_of(trainer, "finished samples hook"):
            inspect.signature(module.check_samples).bind(*call)
    for call in value_of("slime", "whole-step hook"):
        inspect.signature(slime.step).bind(*call)


@capability("slime", "fixed corrections", how="contract")
def test_a_step_weighs_the_advantages_as_the_library_does():
    data = rollout_data()
    before = data["advantages"]
    old, rollout, masks = data["log_probs"], data["rollout_log_probs"], data["loss_masks"]
    slime.step(args("tis"), 7, data)
    applied = op.reweight(old, rollout, [mask.bool() for mask in masks], op.preset("tis"))
    for found, advantage, weight in zip(data["advantages"], before, applied.weight, strict=True):
        torch.testing.assert_close(found, advantage * weight)
    assert data["loss_masks"] is masks
    assert data["correction/rejected"] == applied.report["correction/rejected"]


@capability("slime", "measured", how="contract")
def test_a_step_without_a_correction_only_measures():
    data = rollout_data()
    before = list(data["advantages"])
    slime.step(args(), 7, data)
    assert data["advantages"] == before
    old, rollout, masks = samples()
    mask = torch.cat(masks).bool()
    found = op.mismatch(torch.cat(old), torch.cat(rollout), mask)
    assert float(data["mismatch/k3"]) == pytest.approx(found.k3)
    assert all(torch.is_tensor(data[name]) for name in data if name.startswith("mismatch/"))


@capability("slime", "dump", how="contract")
def test_a_step_is_dumped_for_the_audit(tmp_path):
    data = rollout_data()
    settings = SimpleNamespace(onepolicy={"dump": str(tmp_path)}, use_tis=False)
    slime.step(settings, 7, data)
    found = audit(tmp_path, {})
    old, rollout, masks = samples()
    gap = op.mismatch(torch.cat(old), torch.cat(rollout), torch.cat(masks).bool())
    statistics = found.accumulated.steps[7].statistics()
    assert statistics["k3"] == pytest.approx(gap.k3)


def test_an_empty_response_is_left_out_of_the_dump(tmp_path):
    data = rollout_data()
    for name in ("log_probs", "rollout_log_probs", "loss_masks", "advantages"):
        data[name][1] = data[name][1][:0]
    data["tokens"][1] = torch.arange(2)
    settings = SimpleNamespace(
        onepolicy={"dump": str(tmp_path), "correction": "tis"}, use_tis=False
    )
    slime.step(settings, 7, data)
    assert [len(row) for row in data["advantages"]] == [5, 0, 4]
    assert audit(tmp_path, {}).accumulated.steps[7].statistics()["tokens"] == 7


def test_a_rank_of_empty_responses_writes_no_dump(tmp_path):
    data = rollout_data()
    for name in ("log_probs", "rollout_log_probs", "loss_masks", "advantages"):
        data[name] = [row[:0] for row in data[name]]
    slime.step(SimpleNamespace(onepolicy={"dump": str(tmp_path)}, use_tis=False), 7, data)
    assert not list(tmp_path.iterdir())


def test_a_step_that_is_trained_again_keeps_the_older_dump(tmp_path):
    settings = SimpleNamespace(onepolicy={"dump": str(tmp_path)}, use_tis=False)
    for _ in range(3):  # a run that was resumed twice
        slime.step(settings, 7, rollout_data())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"step_00007_0.parquet{end}" for end in ("", ".1", ".2")]
    assert audit(tmp_path, {}).accumulated.steps[7].statistics()["tokens"] == 10


def test_an_earlier_pipeline_stage_has_nothing_to_do():
    data = {"tokens": [torch.arange(3)]}
    slime.step(args("tis"), 7, data)
    assert list(data) == ["tokens"]


@capability("slime", "preflight", how="contract")
@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        (args("tis"), {"log_probs": None}, "--get-mismatch-metrics"),
        (args("tis"), {"rollout_log_probs": None}, "rollout_log_probs"),
        (args("tis", use_tis=True), {}, "leave --use-tis out"),
        (args("tis", use_rollout_logprobs=True), {}, "--use-rollout-logprobs"),
        (args("opsm"), {}, "--use-opsm"),
        (args("score-centering"), {}, "score-centering needs the ratio"),
        (args("mis", data_parallel_size=2), {}, "whole step"),
        (args("tsi"), {}, "tis"),
    ],
)
def test_a_step_that_cannot_be_is_refused_by_name(given, changes, message):
    data = rollout_data(**changes)
    with pytest.raises(UsageError, match=message):
        slime.step(given, 7, data)
    assert "mismatch/k3" not in data


@capability("slime", "fixed corrections", how="contract")
@capability("miles", "fixed corrections", how="contract")
@pytest.mark.parametrize("trainer", ["slime", "miles"])
@pytest.mark.parametrize("preset", ["tis", "icepop", "seq-tis", "geo-rs", "veto"])
def test_the_loss_hook_weighs_as_the_library_does(trainer, preset):
    module = {"slime": slime, "miles": miles}[trainer]
    batch = micro_batch(trainer)
    loss, masks, metrics = module.tis(args=args(preset, use_tis=True), **batch)
    old, rollout, given = samples()
    applied = op.reweight(old, rollout, [mask.bool() for mask in given], op.preset(preset))
    torch.testing.assert_close(loss, batch["pg_loss"] * torch.cat(applied.weight))
    assert masks is batch["loss_masks"]
    mask = torch.cat(given).bool()
    kept = torch.cat(applied.keep)
    assert metrics["correction/rejected"].bool().equal(~kept & mask)
    assert all(value.shape == loss.shape for value in metrics.values())


TURNS = {"weight": {"level": "turn", "high": 2.0}}


def test_turns_are_the_runs_of_sampled_tokens():
    """Sample 0 has a token, a tool's reply of two tokens, and two tokens."""
    old, rollout, _ = samples()
    batch = micro_batch("slime")
    loss, _, _ = slime.tis(args(TURNS, use_tis=True), **batch)
    log_ratio = old[0] - rollout[0]
    first, second = log_ratio[0].exp().clamp(max=2), log_ratio[3:].sum().exp().clamp(max=2)
    weight = torch.stack([first, first * 0, first * 0, second, second])
    torch.testing.assert_close(loss[:5], batch["pg_loss"][:5] * weight)
    data = rollout_data()
    slime.step(args(TURNS), 7, data)
    torch.testing.assert_close(data["advantages"][0], weight)


@capability("miles", "measured", how="contract")
@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_measuring_alone_hands_the_loss_back(trainer):
    """Both trainers take what the hook returns, also without --use-tis."""
    module = {"slime": slime, "miles": miles}[trainer]
    batch = micro_batch(trainer)
    for settings in (args(), args("tis")):
        loss, masks, metrics = module.tis(settings, **batch)
        assert loss is batch["pg_loss"]
        assert masks is batch["loss_masks"]
        old, rollout, given = samples()
        mask = torch.cat(given).bool()
        found = op.mismatch(torch.cat(old), torch.cat(rollout), mask)
        assert float(metrics["mismatch/k3"][mask].mean()) == pytest.approx(found.k3)
        assert float(metrics["mismatch/k1"][mask].mean()) == pytest.approx(found.k1)
        assert float(metrics["mismatch/f2"][mask].mean()) == pytest.approx(found.extreme(2))


def test_metrics_have_the_same_names_in_every_micro_batch():
    """slime adds micro-batches up by position."""
    batch = micro_batch("slime")
    whole = slime.tis(args("icepop", use_tis=True), **batch)[2]
    batch["loss_masks"] = [torch.zeros_like(mask) for mask in batch["loss_masks"]]
    loss, _, empty = slime.tis(args("icepop", use_tis=True), **batch)
    assert list(empty) == list(whole)
    assert not loss.any()


def test_a_log_probability_that_is_not_finite_weighs_nothing():
    """A micro-batch is no whole batch, so the share in it is not compared with max_nonfinite."""
    batch = micro_batch("slime")
    batch["rollout_log_probs"][1][1:] = torch.nan
    batch["pg_loss"][6:8] = torch.nan
    settings = args({"preset": "tis", "max_nonfinite": 0.05}, use_tis=True)
    loss, _, metrics = slime.tis(settings, **batch)
    assert not loss[6:8].any()
    assert loss.isfinite().all()
    assert metrics["mismatch/nonfinite"].nonzero().flatten().tolist() == [6, 7]


@pytest.mark.parametrize("module", [slime, miles])
def test_a_token_that_is_not_finite_is_left_out_of_the_means(module):
    """The trainers divide a sample's sum by all its tokens, whatever their values."""
    batch = micro_batch("slime")
    old, rollout, masks = samples()
    batch["rollout_log_probs"][0][3] = -torch.inf  # of the first sample's tokens 0, 3 and 4
    batch["rollout_log_probs"][2][:] = torch.nan
    _, _, metrics = module.tis(args(), **batch)
    mask = torch.tensor([True, False, False, False, True])
    found = op.mismatch(old[0], rollout[0], mask)
    sampled = masks[0].bool()
    for name, expected in (("k1", found.k1), ("k3", found.k3), ("f2", found.extreme(2))):
        values = metrics[f"mismatch/{name}"]
        assert float(values[:5][sampled].mean()) == pytest.approx(expected)
        assert values.isfinite().all()
        assert not values[8:].any()
    assert float(metrics["mismatch/nonfinite"].sum()) == 5


def test_too_many_tokens_of_a_step_that_are_not_finite():
    data = rollout_data()
    data["rollout_log_probs"][1][:] = torch.nan
    before = list(data["advantages"])
    with pytest.raises(UsageError, match=r"30.0% of the step.*max_nonfinite = 0.1"):
        slime.step(args("tis"), 7, data)
    assert data["advantages"] == before
    slime.step(args({"preset": "tis", "max_nonfinite": 0.5}), 7, data)
    assert float(data["mismatch/nonfinite"]) == pytest.approx(0.3)


@capability("miles", "preflight", how="contract")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (args("m2po", use_tis=True), "one micro-batch for m2po"),
        (args("mis", use_tis=True), "one micro-batch for mis"),
        (args("ppo-is", use_tis=True), "--use-rollout-logprobs"),
        (args(use_tis=True), "name one"),
    ],
)
def test_a_loss_hook_that_cannot_be_is_refused_by_name(given, message):
    with pytest.raises(UsageError, match=message):
        miles.tis(given, **micro_batch("miles"))


@pytest.mark.parametrize("missing", ["train_log_probs", "rollout_log_probs"])
def test_a_side_that_is_missing_is_named(missing):
    batch = micro_batch("miles") | {missing: None}
    with pytest.raises(UsageError, match="one side's log-probabilities"):
        miles.tis(args("tis", use_tis=True), **batch)


def test_slices_of_context_parallelism_are_refused_in_the_loss():
    batch = micro_batch("miles")
    batch["train_log_probs"] = [logp[:2] for logp in batch["train_log_probs"]]
    with pytest.raises(UsageError, match="context-parallel-size 1"):
        miles.tis(args("tis", use_tis=True), **batch)


def test_a_rollout_without_the_log_probabilities_of_a_tools_reply_is_named():
    short = [row[:-1] for row in samples()[1]]
    message = "sample 0 of this rank has 5 log-probabilities of the trainer, 4 of the rollout"
    with pytest.raises(UsageError, match=message):
        slime.step(args("tis"), 7, rollout_data(rollout_log_probs=short))
    with pytest.raises(UsageError, match=message):
        miles.tis(args(), **(micro_batch("miles") | {"rollout_log_probs": short}))


def test_miles_hands_its_whole_step_hook_nothing():
    assert value_of("miles", "whole-step hook") == [["self.args"]]
    with pytest.raises(UsageError, match="custom-tis-function-path"):
        slime.step(args("tis"))


def test_context_parallel_slices_are_gathered_and_cut_again(monkeypatch):
    """By slime's own functions, whose signatures are in the contract."""
    assert value_of("slime", "gather over context parallelism")[0] == "tensor"
    assert value_of("slime", "slice for context parallelism")[0] == "log_prob"
    other = rollout_data()
    data = rollout_data()
    for name in ("log_probs", "rollout_log_probs", "advantages"):
        data[name] = [(name, i) for i in range(3)]  # a slice

    def gather(part, total_length, response_length):
        name, i = part
        assert total_length == response_length + 2
        return other[name][i]

    functions = SimpleNamespace(
        all_gather_with_cp=gather,
        slice_log_prob_with_cp=lambda row, total_length, response_length: row[:1],
    )
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(__import__("sys").modules, name, SimpleNamespace(__path__=[]))
    path = "slime.backends.megatron_utils.cp_utils"
    monkeypatch.setitem(__import__("sys").modules, path, functions)
    slime.step(args("tis", context_parallel_size=2), 7, data)
    slime.step(args("tis"), 7, other)
    assert float(data["mismatch/k3"]) == float(other["mismatch/k3"])
    for part, whole in zip(data["advantages"], other["advantages"], strict=True):
        assert part.equal(whole[:1])


RANKS = """
import json, sys
import torch, torch.distributed as dist
import onepolicy as op
from onepolicy.integrations.slime.metrics import over_ranks
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3)
metrics, tokens = json.load(open(f"{folder}/given.json"))[rank]
found = over_ranks(metrics, tokens, op.preset("icepop"), dist.group.WORLD)
json.dump({name: float(value) for name, value in found.items()}, open(f"{folder}/{rank}", "w"))
dist.destroy_process_group()  # gloo aborts about 1 process in 60 that ends with its threads alive
"""


def test_ranks_with_other_metrics_agree_on_their_names(tmp_path):
    """One rank has tokens, one none, and one has only tokens whose values are not finite."""
    data = rollout_data()
    slime.step(args("icepop"), 7, data)
    known = {n: float(v) for n, v in data.items() if n.startswith(("mismatch/", "correction/"))}
    some = known | {"mismatch/pearson": math.nan, "mismatch/max_dp": 0.25, "mismatch/k3": 1.0}
    given = [(some, 30), ({}, 0), ({"mismatch/nonfinite": 1.0, "correction/slots": 10.0}, 10)]
    (tmp_path / "given.json").write_text(json.dumps(given))
    runs = [
        subprocess.Popen([sys.executable, "-c", RANKS, str(rank), str(tmp_path)])
        for rank in range(3)
    ]
    assert [run.wait() for run in runs] == [0, 0, 0]
    first, *others = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert others == [first, first]
    assert first["mismatch/nonfinite"] == pytest.approx(10 / 40)
    assert first["mismatch/k3"] == 1.0
    assert first["mismatch/max_dp"] == 0.25
    assert first["correction/slots"] == known["correction/slots"] + 10
    assert set(first) == set(known) - {"mismatch/pearson"}


def test_a_step_without_tokens_on_any_rank_has_no_metrics():
    assert over_ranks({}, 0, op.preset("icepop"), None) == {}


ROUTED = SimpleNamespace(
    use_rollout_routing_replay=True,
    num_layers=3,
    moe_layer_freq=[0, 1, 1],
    num_experts=32,
    moe_router_topk=2,
)


def finished(rows=5, seed=0, **more):
    """Return a finished sample of slime with the routes of three layers, the first one dense."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, 3, 32, generator=random).topk(2).indices.int()
    ids[:, 0] = 0
    routes = {"rollout_routed_experts": ids.numpy(), "weight_versions": ["4"]}
    return SimpleNamespace(tokens=list(range(3, rows + 4)), **(routes | more))


def test_routes_are_checked_when_they_arrive():
    """Without a model: rows, ids, layers. It is no detector of other tokens' routes."""
    slime.check_samples(ROUTED, [[finished()], [finished(seed=1)]], None)
    missing = finished(rollout_routed_experts=None)
    with pytest.raises(UsageError, match="sample 1 of the rollout: has no routes"):
        slime.check_samples(ROUTED, [[finished()], [missing]], None)
    short = finished()
    short.tokens.append(9)
    with pytest.raises(UsageError, match="6 slots"):
        slime.check_samples(ROUTED, [[short]], None)
    uncaptured = finished()
    uncaptured.rollout_routed_experts[:, 2] = 0
    with pytest.raises(UsageError, match="layer 2"):
        miles.check_samples(ROUTED, [[uncaptured]], None)
    off = SimpleNamespace(use_rollout_routing_replay=False)
    slime.check_samples(off, [[missing]], None)


def test_samples_of_several_versions_are_counted(caplog):
    mixed = finished(weight_versions=["4", "5"])
    with caplog.at_level(logging.WARNING):
        slime.check_samples(ROUTED, [[mixed, finished()]], None)
    assert "1 of 2 samples" in caplog.text
