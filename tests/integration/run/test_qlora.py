"""Runs with train.lora.base = nf4: the policy is the dequantised base + adapter everywhere."""

import asyncio
import json
import shutil
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from onepolicy.build.components import build_components
from onepolicy.cli import main
from onepolicy.config import ModelConfig, TrainingError
from onepolicy.models import lora, nf4
from onepolicy.models.load import load_model
from onepolicy.run.adapter_check import AdapterCheck
from onepolicy.run.loop import start_adapter
from onepolicy.run.step import push_and_check
from onepolicy.sync.adapters import Targets
from onepolicy.sync.push import push_weights
from onepolicy.sync.truth import share
from onepolicy.train import checkpoint
from support.adapter_faults import first_seen, settings, update
from support.adapter_runs import (
    adapter_files,
    assert_same_adapters,
    last_evaluation,
    trained,
)
from support.metrics import rows, timeless
from support.paths import ROOT

QLORA = ("train.lora.rank=4", "train.lora.base=nf4", "optim.lr=5e-3")
TREE_POLICY = ROOT / "benchmarks" / "evidence" / "policies" / "one-of-8"
FLOAT32 = "rollout.engine.dtype=float32"


def opened(folder, dtype=torch.float32):
    return load_model(ModelConfig(path=str(folder)), dtype, torch.device("cpu"))


def dequantised(policy, dtype=torch.float32):
    """Return the policy with its linear layers and experts rounded to nf4."""
    model = opened(policy, dtype)
    for name in Targets(model).matrices:
        weight = model.get_parameter(name)
        weight.data = nf4.rounded(weight.data)
    return model


@pytest.fixture(scope="module")
def rounded(policy, tmp_path_factory):
    """Save the policy with the weights that nf4 dequantises to, as a plain checkpoint."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("rounded")
    dequantised(policy).save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def nf4_run(recipe, tmp_path_factory):
    """Train 4 steps in float32. Return the run's folder and what it printed."""
    out = tmp_path_factory.mktemp("nf4") / "run"
    return out, trained(recipe, out, *QLORA, FLOAT32)


@pytest.mark.full
def test_a_run_is_the_lora_run_on_the_dequantised_base(nf4_run, train, rounded):
    """Its evaluations, rewards and gradients; and the adapter arrives."""
    run, said = nf4_run
    assert "train.lora.base = nf4: the frozen linear layers and experts take" in said
    same = train("same", *QLORA, FLOAT32, "train.lora.base=same", f"model.path={rounded}")
    assert len(rows(run)) == len(rows(same)) > 4
    for a, b in zip(rows(run), rows(same), strict=True):
        for name in ("train/reward", "eval/greedy"):
            assert a.get(name) == b.get(name)
        if "train/reward" in a:
            assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-3)
            assert a["adapter/effect"] > 0  # of 64 prompts, and of 32
            assert a["adapter/delivered"] == pytest.approx(1, abs=1e-2)
            assert a["mismatch/k3"] < 1e-7
    own, other = (adapter_files(each, 4)["adapter_model.safetensors"] for each in (run, same))
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_holds_the_dequantised_base_and_the_adapter(policy, dtype):
    """To the bit, after the first sync and after an update."""
    components, _ = build_components(settings(policy, dtype=dtype, base="nf4"))
    learner, engine = components.learner, components.engine
    asyncio.run(start_adapter(components, lambda _: None))
    base = dequantised(policy).state_dict()
    own = opened(policy).state_dict()
    for updated in (False, True):
        if updated:
            update(learner)
            asyncio.run(push_and_check(components))
        held = engine.held_weights()
        layers = lora.adapted_layers(learner.model)
        assert held.keys() == base.keys() > layers.keys()
        for name, tensor in held.items():
            expected = base[name]
            if name in layers:
                expected = expected + lora.delta(layers[name])
            assert torch.equal(tensor, expected.to(tensor.dtype)), name
    assert not torch.equal(held["lm_head.weight"], torch.zeros(()))
    assert all(not torch.equal(own[name], base[name]) for name in layers)


@pytest.mark.full
def test_resume_and_fork(nf4_run, tmp_path):
    whole = nf4_run[0]
    part, fork = shutil.copytree(whole, tmp_path / "part"), tmp_path / "fork"
    shutil.rmtree(checkpoint.checkpoint_folder(part, 4))
    assert main(["train", "--resume", str(part)]) == 0
    assert list(map(timeless, rows(whole))) == list(map(timeless, rows(part)))
    assert_same_adapters(whole, part, 4)
    assert main(["train", "--from", f"{whole}/2", f"out={fork}", "eval.every=0"]) == 0
    assert_same_adapters(whole, fork, 4)


@pytest.mark.full
@pytest.mark.parametrize("base", ["nf4", "same"])
def test_a_fork_on_a_base_of_another_format_is_refused(nf4_run, train, tmp_path, capsys, base):
    other, run, step = "same", nf4_run[0], 4
    if base == "same":
        other, step = "nf4", 1
        run = train("run", *QLORA, "train.lora.base=same", "steps=1", "eval.every=0")
    folder = checkpoint.checkpoint_folder(run, step)
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        header = file.metadata()
    assert ("nf4" in header) == (base == "nf4")
    capsys.readouterr()
    fork = ["train", "--from", str(run), f"out={tmp_path}/fork", "steps=5"]
    assert main([*fork, f"train.lora.base={other}"]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert f"train.lora.base: {other}, but the adapter in" in words
    assert f"set train.lora.base = {base}" in words


@pytest.mark.full
def test_a_base_that_was_changed_is_refused(train, policy, tmp_path, capsys):
    """By more than nf4 rounds away: a weight that rounds to the same codes is the same base."""
    base = shutil.copytree(policy, tmp_path / "base")
    run = train("run", *QLORA, "steps=1", "eval.every=0", f"model.path={base}")
    model = opened(base)
    model.get_parameter("model.layers.0.mlp.experts.down_proj").data *= 1.5
    model.save_pretrained(base)
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "steps=2"]) == 2
    assert "its weights are not those that the adapter" in " ".join(capsys.readouterr().err.split())


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_dequantised_base_and_adapter(
    nf4_run, train, policy, tmp_path, dtype, capsys
):
    """For eval, model.path and export."""
    run, steps = nf4_run[0], 4
    if dtype == "bfloat16":
        run, steps = train("run", *QLORA, FLOAT32, "model.dtype=bfloat16", "steps=2"), 2
    folder = checkpoint.checkpoint_folder(run, steps)
    last = last_evaluation(run)
    capsys.readouterr()
    assert main(["eval", str(run)]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    if dtype == "float32":  # eval rounds base + adapter to model.dtype
        assert found["eval/greedy"] == last["eval/greedy"]
    command = ["export", str(run), "--out", str(tmp_path / "whole"), "--dtype", "float32"]
    assert main(command) == 0
    assert "what that dequantises to" in " ".join(capsys.readouterr().err.split())
    merged, exported = opened(folder).state_dict(), opened(tmp_path / "whole").state_dict()
    base = dequantised(policy, getattr(torch, dtype)).float().state_dict()
    adapted = dict.fromkeys(merged, 0.0)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if "self_attn" in name and ".lora_A." in name:
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            plain = name.removeprefix(lora.PREFIX).replace(".lora_A.weight", ".weight")
            adapted[plain] = 2.0 * b @ tensor
    checked = [name for name in merged if "experts" not in name]
    assert sum(torch.is_tensor(adapted[name]) for name in checked) == 12
    for name in checked:
        torch.testing.assert_close(exported[name], base[name] + adapted[name], rtol=0, atol=1e-6)
    for name, tensor in merged.items():
        assert torch.equal(exported[name], tensor), name
    experts = "model.layers.1.mlp.experts.gate_up_proj"
    assert 0 < float((merged[experts] - base[experts]).abs().max()) < 0.1
    assert main(["export", str(run), "--out", str(tmp_path / "adapter"), "--adapter"]) == 0
    assert "on its base in nf4" in " ".join(capsys.readouterr().err.split())


@pytest.mark.full
def test_the_reference_is_the_dequantised_base(train, rounded):
    """It is the same KL as to the second model that objective.kl.reference loads."""
    options = (*QLORA, FLOAT32, "objective.kl.coef=0.1", "steps=2", "eval.every=0")
    own = train("own", *options)
    second = train("second", *options, f"objective.kl.reference={rounded}")
    own, second = ([row["train/kl"] for row in rows(run)] for run in (own, second))
    assert own == pytest.approx(second, rel=1e-4, abs=1e-9)
    assert own[1] > 1e-6


OPTIONS = [
    "train.autocast=bfloat16 rollout.quant=int8",
    'train.reuse_scoring_forward=true train.lora.targets=["attention","experts","routers"]',
    "train.tokens_per_micro_batch=64 replay.mode=off",
    'replay.source=reprefill train.lora.targets=["attention"]',
    "rollout.max_staleness=1",
]


@pytest.mark.full
@pytest.mark.parametrize("setting", OPTIONS)
def test_options_beside_nf4(train, setting):
    run = train("run", *QLORA, "steps=2", "eval.every=0", *setting.split(" "))
    last = rows(run)[-1]
    assert last["adapter/effect"] > 0
    stale = setting == "rollout.max_staleness=1"  # k3 counts a step of learning too
    assert last["mismatch/k3"] < (1 if stale else 0.05)


def test_without_bitsandbytes_it_says_what_to_install(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    monkeypatch.delitem(sys.modules, "onepolicy.models.nf4")
    assert main(["train", str(recipe), f"out={tmp_path}/run", *QLORA]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "train.lora.base: nf4 needs bitsandbytes" in words
    assert "pip install 'onepolicy[qlora]'" in words


# --- adapter truth --------------------------------------------------------------------------------


def keep_unquantised(components, policy, *, adapter):
    """From now on give the engine the unquantised base, with the adapter or without."""
    engine, learner = components.engine, components.learner
    real, base = engine.load_weights, opened(policy).state_dict()

    def wrong():
        layers = lora.adapted_layers(learner.model)
        for name, tensor in base.items():
            if adapter and name in layers:
                tensor = tensor + lora.delta(layers[name])
            yield name, tensor

    async def load(_, version):
        await real(wrong(), version)

    engine.load_weights = load


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_never_gets_the_dequantised_base_is_named_at_the_start(policy, dtype):
    components, _ = build_components(settings(policy, dtype=dtype, base="nf4"))
    engine = components.engine

    async def load(_, version):
        engine.version = version

    engine.load_weights = load
    step, message = asyncio.run(first_seen(components, None, by_weights=False))
    assert step == 0
    assert "samples with the unquantised base" in message


@pytest.mark.full
@pytest.mark.parametrize("by_weights", [True, False])
@pytest.mark.parametrize("adapter", [True, False])
def test_an_engine_that_goes_back_to_the_unquantised_base_is_named(adapter, by_weights):
    """On a policy of the tree: another CPU would warm up one with another quantisation error."""
    policy = TREE_POLICY
    components, _ = build_components(settings(policy, base="nf4"))
    checks = AdapterCheck._wrong_weights

    async def run():
        await start_adapter(components, lambda _: None)
        if not by_weights:
            AdapterCheck._wrong_weights = lambda _: None
        keep_unquantised(components, policy, adapter=adapter)
        update(components.learner)
        await push_and_check(components)

    words = {True: r"\.weight' of HFEngine is", False: "samples with"}[by_weights]
    try:
        with pytest.raises(TrainingError, match=f"{words} the unquantised base"):
            asyncio.run(run())
    finally:
        AdapterCheck._wrong_weights = checks


@pytest.mark.full
def test_routes_are_no_part_of_what_the_two_bases_differ_by():
    """Top-1 of 8 routers: the bases route otherwise, and `_moved` has that already.

    With it counted twice the share of an engine that has the unquantised base and the adapter was
    0.7 on this policy, where it is 0.
    """
    components, _ = build_components(settings(TREE_POLICY, dtype="float32", base="nf4"))
    asyncio.run(start_adapter(components, lambda _: None))
    check = components.learner.adapter.check
    keep_unquantised(components, TREE_POLICY, adapter=True)
    update(components.learner)
    asyncio.run(push_weights(components.learner, components.engine))
    canary = asyncio.run(check._ask_engine())
    base = check._engine_base
    same = canary.ids[:, :, None] == base.ids[:, None, :]
    moved = canary.logp - base.logp.gather(1, same.int().argmax(2))
    unquantised = check._hypotheses(canary)["unquantised"]
    found = share(moved, check._moved(canary), unquantised, same.any(2))
    assert abs(found.value) < 0.3
    assert found.excludes_now


@pytest.mark.full
def test_the_faults_of_lora_are_named_beside_it(policy):
    for fault in ("never delivered", "merged twice", "stale by one"):
        components, _ = build_components(settings(policy, base="nf4"))
        step, message = asyncio.run(first_seen(components, fault))
        assert step == 1, fault
        assert "was pushed, 'model." in message
