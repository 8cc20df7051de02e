"""The hooks of slime and miles, called as the named versions call them.

Contract: slime 0.3.1 at 624b824 and miles at 31f1ca9 (August 2026), read and not run; the keyword
sets and signatures are in tests/support/contracts.json.
"""

import inspect
import json
import logging
import math
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pyarrow.parquet as parquet
import pytest
import torch

import onepolicy as op
from onepolicy.audit.run import audit
from onepolicy.config import UsageError
from onepolicy.integrations import miles, slime
from onepolicy.integrations.core.first_step import FirstStep
from onepolicy.integrations.slime import correction as hooks
from onepolicy.integrations.slime.correction import over_ranks
from support.contracts import value_of

capability = pytest.mark.capability
CUT = {"rollout_top_p": 0.5}


def args(correction=None, *, use_tis=False, dump=None, **more):
    """Return the attributes of slime's arguments that the hooks read."""
    own = {"correction": correction, "dump": dump}
    table = {name: value for name, value in own.items() if value is not None}
    return SimpleNamespace(onepolicy=table or None, use_tis=use_tis, **more)


def samples(seed=0, lengths=(5, 3, 4)):
    """Return two sides' log-probabilities and masks of some responses."""
    random = torch.Generator().manual_seed(seed)
    old = [-3 - torch.rand(n, generator=random) for n in lengths]
    rollout = [logp - 0.5 * torch.randn(len(logp), generator=random) for logp in old]
    masks = [torch.ones(n, dtype=torch.int) for n in lengths]
    masks[0][1:3] = 0
    return old, rollout, masks


def measured():
    """Return the library's measure of these samples, and their mask."""
    old, rollout, masks = samples()
    mask = torch.cat(masks).bool()
    return op.mismatch(torch.cat(old), torch.cat(rollout), mask), mask


def rollout_data(**more):
    old, rollout, masks = samples()
    return {
        "log_probs": old,
        "rollout_log_probs": rollout,
        "loss_masks": masks,
        "advantages": [torch.full_like(x, a) for x, a in zip(old, (1.0, -2, 0.5), strict=True)],
        "tokens": [torch.arange(len(logp) + 2) for logp in old],
        "rewards": [1.0, 0.0, 0.5],
        "total_lengths": [len(logp) + 2 for logp in old],
        "response_lengths": [len(logp) for logp in old],
    } | more


def stepped(*given, **settings):
    """Return the data of a step after the whole-step hook."""
    data = given[0] if given else rollout_data()
    slime.step(args(**settings), 7, data)
    return data


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
    before, (old, rollout, masks) = data["advantages"], samples()
    kept = data["loss_masks"]
    stepped(data, correction="tis")
    applied = op.reweight(old, rollout, [mask.bool() for mask in masks], op.preset("tis"))
    for found, advantage, weight in zip(data["advantages"], before, applied.weight, strict=True):
        torch.testing.assert_close(found, advantage * weight)
    assert data["loss_masks"] is kept
    assert data["correction/rejected"] == applied.report["correction/rejected"]


def test_self_normalised_weights_average_1_as_the_loss_does():
    """It is a sum of the samples' means, or of all tokens with --calculate-per-token-loss."""
    old, rollout, masks = samples()
    mask = [each.bool() for each in masks]
    before = rollout_data()["advantages"]
    for per_token, average in ((False, "sequences"), (True, "slots")):
        data = stepped(correction="mis", calculate_per_token_loss=per_token)
        applied = op.reweight(old, rollout, mask, op.preset("mis"), average=average)
        sides = zip(data["advantages"], before, applied.keep, applied.weight, strict=True)
        for found, advantage, keep, weight in sides:
            torch.testing.assert_close(found[keep], (advantage * weight)[keep])


@capability("slime", "measured", how="contract")
def test_a_step_without_a_correction_only_measures():
    data = rollout_data()
    before = list(data["advantages"])
    stepped(data)
    assert data["advantages"] == before
    assert float(data["mismatch/k3"]) == pytest.approx(measured()[0].k3)
    assert all(torch.is_tensor(data[name]) for name in data if name.startswith("mismatch/"))


def dumped(folder):
    return audit(folder, {}).accumulated.steps[7].statistics()


@capability("slime", "dump", how="contract")
def test_a_step_is_dumped_for_the_audit(tmp_path):
    """One that is trained again keeps the older dump."""
    for _ in range(3):  # a run that was resumed twice
        stepped(dump=str(tmp_path))
        assert dumped(tmp_path)["k3"] == pytest.approx(measured()[0].k3)
        assert dumped(tmp_path)["tokens"] == 10
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"step_00007_0.parquet{end}" for end in ("", ".1", ".2")]


def test_a_dump_has_the_entropy_that_slime_computed(tmp_path, caplog, monkeypatch):
    """With --use-rollout-entropy, and without it a note says what the audit then lacks."""
    entropy = [torch.full_like(logp, 0.5) for logp in samples()[0]]
    monkeypatch.setattr(hooks, "FIRST", FirstStep("miles"))
    stepped(rollout_data(entropy=entropy), dump=str(tmp_path / "with"))
    assert "--use-rollout-entropy" not in caplog.text
    (file,) = (tmp_path / "with").iterdir()
    rows = parquet.read_table(file).to_pylist()
    assert [row["entropy"] for row in rows] == [[0.5] * n for n in (5, 3, 4)]
    monkeypatch.setattr(hooks, "FIRST", FirstStep("miles"))
    stepped(dump=str(tmp_path / "without"))
    assert "the dump has no entropy" in caplog.text


def test_a_dump_has_the_rewards_before_the_groups_mean_is_taken_off(tmp_path):
    for number, (more, mean) in enumerate((({}, 0.5), ({"local_raw_reward": [3, 0, 0]}, 1.0))):
        stepped(rollout_data(**more), dump=str(tmp_path / str(number)))
        rewards = audit(tmp_path / str(number), {}).accumulated.rewards[7]
        assert rewards.mean == pytest.approx(mean)


def test_empty_responses_are_left_out_of_the_dump(tmp_path):
    data = rollout_data()
    for name in ("log_probs", "rollout_log_probs", "loss_masks", "advantages"):
        data[name][1] = data[name][1][:0]
    data["tokens"][1] = torch.arange(2)
    stepped(data, dump=str(tmp_path / "one"), correction="tis")
    assert [len(row) for row in data["advantages"]] == [5, 0, 4]
    assert dumped(tmp_path / "one")["tokens"] == 7
    for name in ("log_probs", "rollout_log_probs", "loss_masks", "advantages"):
        data[name] = [row[:0] for row in data[name]]
    stepped(data, dump=str(tmp_path / "all"))
    assert not list(tmp_path.glob("all/*"))


def test_an_earlier_pipeline_stage_has_nothing_to_do():
    assert list(stepped({"tokens": [torch.arange(3)]}, correction="tis")) == ["tokens"]


@capability("slime", "preflight", how="contract")
def test_a_step_that_cannot_be_is_refused_by_name(subtests):
    for given, changes, message in (
        (args("tis"), {"log_probs": None}, "--get-mismatch-metrics"),
        (args("tis"), {"rollout_log_probs": None}, "rollout_log_probs"),
        (args("tis", use_tis=True), {}, "leave --use-tis out"),
        (args("tis", use_rollout_logprobs=True), {}, "--use-rollout-logprobs"),
        (args("opsm"), {}, "--use-opsm"),
        (args("score-centering"), {}, "score-centering needs the ratio"),
        (args("mis", data_parallel_size=2), {}, "whole step"),
        (args("tsi"), {}, "tis"),
        (args("tis", rollout_top_k=5), {}, "set --rollout-top-k -1"),
    ):
        data = rollout_data(**changes)
        with subtests.test(message=message):
            with pytest.raises(UsageError, match=message):
                slime.step(given, 7, data)
            assert "mismatch/k3" not in data


TRAINERS = {"slime": slime, "miles": miles}


@capability("slime", "fixed corrections", how="contract")
@capability("miles", "fixed corrections", how="contract")
def test_the_loss_hook_weighs_as_the_library_does(subtests):
    for trainer, preset in product(TRAINERS, ["tis", "icepop", "seq-tis", "geo-rs", "veto"]):
        with subtests.test(trainer=trainer, preset=preset):
            batch = micro_batch(trainer)
            settings = args(preset, use_tis=True)
            loss, masks, metrics = TRAINERS[trainer].tis(args=settings, **batch)
            old, rollout, given = samples()
            applied = op.reweight(old, rollout, [mask.bool() for mask in given], op.preset(preset))
            torch.testing.assert_close(loss, batch["pg_loss"] * torch.cat(applied.weight))
            assert masks is batch["loss_masks"]
            rejected = torch.cat(given).bool() & ~torch.cat(applied.keep)
            assert metrics["correction/rejected"].bool().equal(rejected)
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
    torch.testing.assert_close(stepped(correction=TURNS)["advantages"][0], weight)


@capability("miles", "measured", how="contract")
def test_measuring_alone_hands_the_loss_back(subtests):
    """Both trainers take what the hook returns, also without --use-tis."""
    found, mask = measured()
    expected = {"k3": found.k3, "k1": found.k1, "f2": found.extreme(2)}
    for (trainer, module), settings in product(TRAINERS.items(), (args(), args("tis"))):
        with subtests.test(trainer=trainer, settings=settings):
            batch = micro_batch(trainer)
            loss, masks, metrics = module.tis(settings, **batch)
            assert loss is batch["pg_loss"]
            assert masks is batch["loss_masks"]
            means = {name: float(metrics[f"mismatch/{name}"][mask].mean()) for name in expected}
            assert means == pytest.approx(expected)


def test_slices_are_measured_by_the_whole_step_hook_alone():
    """slime wants a loss hook for --get-mismatch-metrics, and cuts what it hands it."""
    batch = micro_batch("slime") | {"train_log_probs": [logp[:2] for logp in samples()[0]]}
    sliced = args(context_parallel_size=2, rollout_data_postprocess_path="x.step")
    assert slime.tis(sliced, **batch) == (batch["pg_loss"], batch["loss_masks"], {})
    sliced.use_tis = True
    with pytest.raises(UsageError, match="context-parallel-size 1"):
        slime.tis(sliced, **batch)


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


def test_a_token_that_is_not_finite_is_left_out_of_the_means():
    """The trainers divide a sample's sum by all its tokens, whatever their values."""
    old, rollout, masks = samples()
    found = op.mismatch(old[0], rollout[0], torch.tensor([True, False, False, False, True]))
    expected = {"k1": found.k1, "k3": found.k3, "f2": found.extreme(2)}
    for module in (slime, miles):
        batch = micro_batch("slime")
        batch["rollout_log_probs"][0][3] = -torch.inf  # of the first sample's tokens 0, 3 and 4
        batch["rollout_log_probs"][2][:] = torch.nan
        _, _, metrics = module.tis(args(), **batch)
        for name, mean in expected.items():
            values = metrics[f"mismatch/{name}"]
            assert float(values[:5][masks[0].bool()].mean()) == pytest.approx(mean)
            assert values.isfinite().all()
            assert not values[8:].any()
        assert float(metrics["mismatch/nonfinite"].sum()) == 5


def test_too_many_tokens_of_a_step_that_are_not_finite():
    data = rollout_data()
    data["rollout_log_probs"][1][:] = torch.nan
    before = list(data["advantages"])
    with pytest.raises(UsageError, match=r"30.0% of the step.*max_nonfinite = 0.1"):
        stepped(data, correction="tis")
    assert data["advantages"] == before
    stepped(data, correction={"preset": "tis", "max_nonfinite": 0.5})
    assert float(data["mismatch/nonfinite"]) == pytest.approx(0.3)
    data["rollout_log_probs"][2][:2] = torch.nan  # of 10 tokens, half are left
    stepped(data, correction={"preset": "tis", "max_nonfinite": 0.5})
    with pytest.raises(UsageError, match=r"50.0% of the step.*max_nonfinite = 0.4"):
        stepped(data, correction={"preset": "tis", "max_nonfinite": 0.4})
    stepped(correction={"preset": "tis", "max_nonfinite": 0.0})


@capability("miles", "preflight", how="contract")
def test_a_loss_hook_that_cannot_be_is_refused_by_name(subtests):
    part = [logp[:2] for logp in samples()[0]]
    for correction, changes, message in (
        ("m2po", {}, "one micro-batch for m2po"),
        ("mis", {}, "one micro-batch for mis"),
        ("ppo-is", {}, "--use-rollout-logprobs"),
        (None, {}, "name one"),
        ("tis", {"train_log_probs": None}, "one side's log-probabilities"),
        ("tis", {"rollout_log_probs": None}, "one side's log-probabilities"),
        ("tis", {"train_log_probs": part}, "context-parallel-size 1"),
        ("tis", CUT, "set --rollout-top-p 1"),
    ):
        with subtests.test(correction=correction, changed=list(changes)):
            batch, own = micro_batch("miles") | changes, {}
            if changes is CUT:
                batch, own = micro_batch("miles"), CUT
            with pytest.raises(UsageError, match=message):
                miles.tis(args(correction, use_tis=True, **own), **batch)


def test_slime_scores_what_top_p_kept():
    """Its trainer gets the kept tokens from SGLang; that of miles does not."""
    slime.tis(args("tis", use_tis=True, **CUT), **micro_batch("slime"))
    slime.step(args("tis", **CUT), 7, rollout_data())


def test_cut_sampling_that_is_only_measured_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(hooks, "FIRST", FirstStep("miles"))
    miles.tis(args(**CUT), **micro_batch("miles"))
    assert "sampling is cut or changed (--rollout-top-p 0.5)" in caplog.text


def test_a_rollout_without_the_log_probabilities_of_a_tools_reply_is_named():
    short = [row[:-1] for row in samples()[1]]
    message = "sample 0 of this rank has 5 .* of the trainer, 4 of the rollout.*status is aborted"
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
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "slime.backends.megatron_utils.cp_utils", functions)
    stepped(data, correction="tis", context_parallel_size=2)
    stepped(other, correction="tis")
    assert float(data["mismatch/k3"]) == float(other["mismatch/k3"])
    for part, whole in zip(data["advantages"], other["advantages"], strict=True):
        assert part.equal(whole[:1])


RANKS = """
import json, multiprocessing, sys
import torch, torch.distributed as dist
import onepolicy as op
from onepolicy.integrations.slime.correction import over_ranks
folder = sys.argv[1]
def run(rank, metrics, tokens):
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=3)
    found = over_ranks(metrics, tokens, op.preset("icepop"), dist.group.WORLD)
    json.dump({name: float(value) for name, value in found.items()}, open(f"{folder}/{rank}", "w"))
    dist.destroy_process_group()  # gloo aborts 1 process in 60 that ends with its threads alive
given = json.load(open(f"{folder}/given.json"))
fork = multiprocessing.get_context("fork")
runs = [fork.Process(target=run, args=(rank, *each)) for rank, each in enumerate(given)]
for each in runs:
    each.start()
for each in runs:
    each.join()
sys.exit(any(each.exitcode for each in runs))
"""


@pytest.mark.full
@pytest.mark.process
def test_ranks_with_other_metrics_agree_on_their_names(tmp_path):
    """One rank has tokens, one none, and one has only tokens whose values are not finite."""
    data, ours = stepped(correction="icepop"), ("mismatch/", "correction/")
    known = {name: float(value) for name, value in data.items() if name.startswith(ours)}
    some = known | {"mismatch/pearson": math.nan, "mismatch/max_dp": 0.25, "mismatch/k3": 1.0}
    given = [(some, 30), ({}, 0), ({"mismatch/nonfinite": 1.0, "correction/slots": 10.0}, 10)]
    (tmp_path / "given.json").write_text(json.dumps(given))
    subprocess.run([sys.executable, "-c", RANKS, str(tmp_path)], check=True)
    first, *others = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert others == [first, first]
    assert first["mismatch/nonfinite"] == pytest.approx(10 / 40)
    assert (first["mismatch/k3"], first["mismatch/max_dp"]) == (1.0, 0.25)
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
    missing, short, uncaptured = finished(rollout_routed_experts=None), finished(), finished()
    short.tokens.append(9)
    uncaptured.rollout_routed_experts[:, 2] = 0
    for module, groups, message in (
        (slime, [[finished()], [missing]], "sample 1 of the rollout: has no routes"),
        (slime, [[short]], "6 slots"),
        (miles, [[uncaptured]], "layer 2"),
    ):
        with pytest.raises(UsageError, match=message):
            module.check_samples(ROUTED, groups, None)
    off = SimpleNamespace(use_rollout_routing_replay=False)
    slime.check_samples(off, [[missing]], None)


def test_an_aborted_sample_does_not_blame_the_server(subtests):
    """Its routes are missing or cut. Masked out they may be anything of the right length."""
    aborted = SimpleNamespace(value="aborted")
    cut = finished(status=aborted)
    cut.tokens += [9, 9]
    message = "sample 1 of the rollout: its status is aborted.*Leave the sample out"
    for name, sample in {
        "none": finished(status=aborted, rollout_routed_experts=None),
        "none, masked out": finished(
            status=aborted, rollout_routed_experts=None, remove_sample=True
        ),
        "cut": cut,
    }.items():
        for module in (slime, miles):
            with subtests.test(name), pytest.raises(UsageError, match=message) as refused:
                module.check_samples(ROUTED, [[finished(), sample]], None)
            assert "SGLang" not in str(refused.value)
    zeros = torch.zeros(5, 3, 2, dtype=torch.int32).numpy()
    masked = finished(status=aborted, rollout_routed_experts=zeros, remove_sample=True)
    slime.check_samples(ROUTED, [[finished(), masked]], None)
    masked.remove_sample = False
    with pytest.raises(UsageError, match="layer"):
        slime.check_samples(ROUTED, [[finished(), masked]], None)


def test_samples_of_several_versions_are_counted(caplog):
    mixed = finished(weight_versions=["4", "5"])
    with caplog.at_level(logging.WARNING):
        slime.check_samples(ROUTED, [[mixed, finished()]], None)
    assert "1 of 2 samples" in caplog.text


def test_the_last_stage_speaks_for_all(monkeypatch):
    """With pipelines it has the loss, and rank 0 is of the first stage."""
    ranks = {"tensor": 0, "data": 0}
    mpu = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_rank=lambda: ranks["tensor"],
        get_data_parallel_rank=lambda with_context_parallel: ranks["data"],
    )
    assert hooks.is_first_rank()
    monkeypatch.setattr(hooks.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(hooks.dist, "get_rank", lambda: 8)
    assert not hooks.is_first_rank()  # FSDP
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", mpu)
    assert hooks.is_first_rank()
    for name in ranks:
        ranks |= {"tensor": 0, "data": 0, name: 1}
        assert not hooks.is_first_rank()
