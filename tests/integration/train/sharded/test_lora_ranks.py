"""Adapters (train.lora) on two ranks: their gradients, merged weights, checkpoints and checks."""

import asyncio
import contextlib
import itertools
import shutil

import pytest
import torch
from safetensors.torch import load_file

from onepolicy.build.components import build_components
from onepolicy.cli import main
from onepolicy.models import lora
from onepolicy.run.adapter_check import AdapterCheck
from onepolicy.tiny.model import make_tokenizer
from onepolicy.train import checkpoint
from support import adapter_faults
from support.adapter_faults import first_seen, seen_by, settings
from support.metrics import rows, timeless
from support.rank_cases import (
    QWEN,
    assert_close,
    assert_equal_gradients,
    assert_equal_steps,
    batch_for,
    learner_on,
    one_step,
)

pytestmark = pytest.mark.process
ALL = 'train.lora.targets=["attention", "experts", "routers"]'
LORA = [*QWEN, "train.lora.rank=4", ALL]
CASES = {
    "plain": LORA,
    "idle": [*LORA, "train.tokens_per_micro_batch=15"],
    "recompute": [*LORA, "train.activation_checkpointing=true"],
    "kl_entropy": [*LORA, "objective.kl.coef=0.1", "objective.entropy_coef=0.01"],
    "r2": ["train.lora.rank=4", ALL, "replay.mode=r2", "objective.num_minibatches=2"],
    "weights": ["train.lora.rank=4", "replay.mode=weights", *QWEN],
    "bypass": [*LORA, "correction.preset=ppo-is", "objective.num_minibatches=2"],
}


@pytest.fixture
def folder(folders):
    return folders["qwen3_moe"]


@pytest.fixture
def pair(two, folder):
    """Return learners of one process and of two ranks."""
    return [learner_on(others, folder, LORA) for others in (None, two)]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(case, two, folder):
    assert_equal_steps(CASES[case], two, folder)


@pytest.mark.parametrize("case", [pytest.param("plain", marks=pytest.mark.full), "idle"])
def test_gradients_of_two_ranks_are_those_of_one_process(case, two, folder, monkeypatch):
    assert_equal_gradients(CASES[case], two, folder, monkeypatch)


@pytest.mark.full
def test_every_rank_updates_the_same_adapter(two, folder):
    """The same sample on either rank gets the same scores, which updates have moved."""
    learner = learner_on(two, folder, ["train.lora.rank=4", ALL, "replay.mode=off"])
    batch = batch_for(learner)
    pair = batch.select([3, 3])
    before = learner.score(pair).logp_old
    for _ in range(3):
        one_step(learner, batch)
    after = learner.score(pair).logp_old
    on_rank_0, on_rank_1 = after.chunk(2)
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(on_rank_1, on_rank_0, rtol=0, atol=1e-5)


def equal_tensors(found, known):
    assert found.keys() == known.keys()
    for name, tensor in known.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_merged_weights_are_those_of_one_process(pair):
    """To the bit, with the adapter and without it, whatever the other rank's adapter does."""
    one, ranked = pair
    one_step(ranked, batch_for(ranked))
    lora.set_adapter(one.model, ranked.adapter.tensors(), "")
    assert ranked.adapter.base_checksum == one.adapter.base_checksum
    for dtype in (None, "bfloat16"):
        merged = dict(ranked.named_weights(dtype))
        equal_tensors(merged, dict(one.named_weights(dtype)))
        with ranked.adapter.off(), one.adapter.off():
            frozen = dict(ranked.named_weights(dtype))
            equal_tensors(frozen, dict(one.named_weights(dtype)))
        assert any(not torch.equal(merged[name], frozen[name]) for name in frozen)


@pytest.mark.full
def test_a_trial_merge_leaves_the_shards_alone(pair):
    """Its logits are those of one process, whose weights are replaced meanwhile."""
    one, ranked = pair
    start = {name: tensor.clone() for name, tensor in ranked.named_weights()}
    micro = batch_for(one).replace(routing=None)
    slots = micro.trainable.nonzero()[:, 0]
    found, kinds = [], (("float32", True), ("bfloat16", True), ("bfloat16", False))
    for dtype, adapter in kinds:
        logits = []
        for learner in pair:
            merged = lora.merged_in(learner.model, getattr(torch, dtype), adapter=adapter)
            with lora.trial_adapter(learner.model, 0.05, seed=0), merged:
                logits.append(learner.scorer.logits(micro, slots))
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=2e-4)
        found.append(logits[1])
    assert min(float((a - b).abs().max()) for a, b in itertools.pairwise(found)) > 2e-3
    assert all(torch.equal(tensor, start[name]) for name, tensor in ranked.named_weights())


def saved(learner, run):
    path = checkpoint.save(run, learner, make_tokenizer("abc"), step=1, extra={})
    learner.finish_saving()
    return path


def test_checkpoints_have_one_layout_and_resume_on_either(pair, two, folder, tmp_path):
    learners = dict(zip((0, 2), pair, strict=True))
    paths, tensors, expected = {}, {}, {}
    for ranks, learner in learners.items():
        one_step(learner, batch_for(learner))
        paths[ranks] = saved(learner, tmp_path / str(ranks))
        names = (lora.WEIGHTS, checkpoint.OPTIMIZER)
        tensors[ranks] = {name: load_file(paths[ranks] / name) for name in names}
        _, expected[ranks], _ = one_step(learner, batch_for(learner))
    files = [sorted(path.name for path in paths[ranks].iterdir()) for ranks in (0, 2)]
    assert files[0] == files[1]
    assert (paths[0] / lora.CONFIG).read_text() == (paths[2] / lora.CONFIG).read_text()
    for name in names:
        shapes = [{k: (t.shape, t.dtype) for k, t in tensors[n][name].items()} for n in (0, 2)]
        assert shapes[0] == shapes[1]
    assert all(".lora_" in name for name in tensors[2][checkpoint.OPTIMIZER] if name != "rng")
    for source, others in ((2, two), (2, None), (0, two)):
        again = learner_on(others, folder, LORA)
        again.restore(paths[source])
        assert (again.version, again.updates) == (1, 1)
        _, found, _ = one_step(again, batch_for(again))
        if (source, others) == (2, two):
            assert timeless(found) == timeless(expected[2])
            equal_tensors(again.adapter.tensors(), learners[2].adapter.tensors())
        else:
            assert_close(found, expected[source])


@pytest.mark.full
@pytest.mark.parametrize("sync", ["merged", "native"])
@pytest.mark.parametrize("fault", [None, "base weights sampled", "merged twice", "stale by one"])
def test_a_planted_failure_is_named(fault, sync, two, policy, monkeypatch):
    monkeypatch.setattr(AdapterCheck, "prompts", 8)
    monkeypatch.setattr(adapter_faults, "LAST", 1)
    components, _ = build_components(settings(policy, "hf", sync, ranks=2), ranks=two)
    step, message = asyncio.run(first_seen(components, fault, since=0))
    if fault is None:
        assert (step, message) == (None, "")
    else:
        assert step == 0, message
        assert seen_by(message) != message


RUN = ("train.ranks=2", "train.device=cpu", "train.lora.rank=4", "optim.lr=5e-3", "eval.every=0")


def adapter_and_optimizer(run, step):
    folder = checkpoint.checkpoint_folder(run, step)
    names = (lora.WEIGHTS, checkpoint.OPTIMIZER)
    return {f"{name} {k}": t for name in names for k, t in load_file(folder / name).items()}


@pytest.mark.full
def test_a_run_on_two_ranks_resumes_to_the_bit(train, two, tmp_path, monkeypatch):
    """Both runs have the ranks of all these tests, as torchrun's."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for module in ("train", "resume"):
        name = f"onepolicy.run.{module}.started_ranks"
        monkeypatch.setattr(name, lambda *_: contextlib.nullcontext(two))
    settings = (*RUN, "rollout.engine.dtype=float32", "checkpoint={every=1,keep=2}")
    whole = train("whole", *settings, "steps=2")
    part = tmp_path / "part"  # as if it had been killed after its first checkpoint
    shutil.copytree(whole, part)
    shutil.rmtree(checkpoint.checkpoint_folder(part, 2))
    (part / "summary.json").unlink()
    assert main(["train", "--resume", str(part), "steps=2"]) == 0
    assert list(map(timeless, rows(whole))) == list(map(timeless, rows(part)))
    assert rows(whole)[-1] != rows(part)[-1]  # times: its steps were played again
    equal_tensors(adapter_and_optimizer(part, 2), adapter_and_optimizer(whole, 2))
    for row in rows(whole):
        assert row["adapter/delivered"] == pytest.approx(1, abs=1e-2)
        assert row["mismatch/k3"] < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        "train.lora.sync=native",
        "train.lora.sync=native rollout.max_staleness=1",
        "rollout.max_staleness=1",
        "train.activation_checkpointing=true",
        "train.fsdp_param_dtype=bfloat16",
        "model.dtype=bfloat16",
        "objective.kl.coef=0.1",
        "rollout.quant=int8",
        "eval.every=1",
    ],
)
def test_options_beside_adapters_on_two_ranks(train, setting):
    run = train("lora", *RUN, "steps=2", *setting.split(" "))
    last = [row for row in rows(run) if "adapter/effect" in row][-1]
    assert last["adapter/effect"] > 0
    stale = "rollout.max_staleness=1" in setting  # k3 counts a step of learning too
    assert last["mismatch/k3"] < (1 if stale else 0.05)
