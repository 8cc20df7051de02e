"""Runs with train.lora: trained, saved, resumed to the bit, forked, evaluated and measured."""

import json

import pytest
import torch
from safetensors.torch import load_file

from onepolicy.cli import main
from onepolicy.config import ModelConfig
from onepolicy.models.load import load_model
from onepolicy.train import checkpoint
from support.metrics import rows, timeless

LORA = ("train.lora.rank=4", "optim.lr=5e-3")
NATIVE = "train.lora.sync=native"
FLOAT32 = "rollout.engine.dtype=float32"


def files(run, step):
    folder = checkpoint.checkpoint_folder(run, step)
    return {
        name: load_file(folder / name)
        for name in ("adapter_model.safetensors", "optimizer.safetensors")
    }


def assert_same_adapters(a, b, step):
    first, second = files(a, step), files(b, step)
    for name in first:
        assert first[name].keys() == second[name].keys()
        assert all(torch.equal(first[name][key], second[name][key]) for key in first[name])


def test_a_run_delivers_its_adapter_and_saves_nothing_else(train, policy, capsys):
    run = train("lora", *LORA, FLOAT32)
    trained = [row for row in rows(run) if "train/reward" in row]
    assert [row["adapter/delivered"] for row in trained] == pytest.approx([1] * 4, abs=1e-2)
    effects = [row["adapter/effect"] for row in trained]
    assert effects[0] == min(effects)
    assert all(row["adapter/gap"] < 1e-2 * row["adapter/effect"] for row in trained)
    assert all(row["mismatch/k3"] < 1e-7 for row in trained)
    out = " ".join(capsys.readouterr().out.split())
    assert "train.lora: an adapter of one update (B = +-0.005) moves the log-probabilities" in out
    folder = checkpoint.checkpoint_folder(run, 4)
    assert not (folder / "model.safetensors").exists()
    moments = load_file(folder / "optimizer.safetensors")
    assert all(".lora_" in name for name in moments if name != "rng")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    assert config["base_model_name_or_path"] == str(policy)


def test_resume_and_fork(train, tmp_path):
    """A fork begins at the parent's adapter, and its first steps are the parent's."""
    settings = (*LORA, "checkpoint.every=1", "eval.every=0")
    whole = train("whole", *settings, "steps=3")
    part = train("part", *settings, "steps=1")
    assert main(["train", "--resume", str(part), "steps=3"]) == 0
    assert list(map(timeless, rows(whole))) == list(map(timeless, rows(part)))
    assert_same_adapters(whole, part, 3)
    out = tmp_path / "fork"
    assert main(["train", "--from", f"{whole}/1", f"out={out}", "steps=3"]) == 0
    assert_same_adapters(whole, out, 3)


def test_forks_between_adapters_and_whole_models_are_refused(train, tmp_path, capsys):
    lora = train("lora", *LORA, "steps=1", "eval.every=0")
    whole = train("whole", "steps=1", "eval.every=0")
    capsys.readouterr()
    refused = {
        (lora, "train.lora=off"): "holds an adapter, but this run trains all weights",
        (lora, "train.lora.rank=8"): "use the rank that it was trained with",
        (lora, 'train.lora.targets=["attention"]'): "use the targets that it was trained with",
        (whole, "train.lora={rank=4}"): "holds a whole model",
    }
    for number, ((source, setting), message) in enumerate(refused.items()):
        out = tmp_path / f"fork{number}"
        command = ["train", "--from", str(source), f"out={out}", "steps=2", setting]
        assert main(command) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_checkpoint_is_evaluated_and_trained_on_as_base_and_adapter(train, recipe, capsys):
    run = train("lora", *LORA, FLOAT32)
    last = next(row for row in reversed(rows(run)) if "eval/greedy" in row)
    capsys.readouterr()
    assert main(["eval", str(run)]) == 0
    evaluated = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert evaluated["eval/greedy"] == last["eval/greedy"]
    assert main(["eval", str(run), "rollout.engine.kind=vllm"]) == 2
    assert "holds an adapter, but vllm loads whole models" in capsys.readouterr().err
    folder = checkpoint.checkpoint_folder(run, 4)
    found = load_model(ModelConfig(path=str(folder)), torch.float32, torch.device("cpu"))
    whole = train("whole", f"model.path={folder}", FLOAT32, "steps=1")
    first = rows(whole)[0]
    names = [name for name in first if name.startswith("eval/")]
    assert {name: first[name] for name in names} == {name: last[name] for name in names}
    path = checkpoint.checkpoint_folder(whole, 1)
    after = load_model(ModelConfig(path=str(path)), torch.float32, torch.device("cpu"))
    pairs = zip(found.parameters(), after.parameters(), strict=True)
    assert 0 < max(float((a - b).abs().max()) for a, b in pairs) < 0.1


def test_the_reference_is_the_model_without_its_adapter(train, policy):
    """It is the same KL as to a second model, which objective.kl.reference loads."""
    settings = (*LORA, FLOAT32, "objective.kl.coef=0.1", "steps=2", "eval.every=0")
    own = train("own", *settings)
    second = train("second", *settings, f"objective.kl.reference={policy}")
    for a, b in zip(rows(own), rows(second), strict=True):
        assert a["train/kl"] == pytest.approx(b["train/kl"], rel=1e-4, abs=1e-9)
    assert rows(own)[1]["train/kl"] > 1e-6


@pytest.mark.parametrize(
    "setting",
    [
        "train.activation_checkpointing=true",
        "train.reuse_scoring_forward=true",
        "train.tokens_per_micro_batch=64",
        "replay.mode=off",
        "replay.source=reprefill",
        "correction.preset=tis",
        "rollout.max_staleness=1",
        "train.lora.sync=native",
        "train.lora.sync=native rollout.max_staleness=1",
        "rollout.quant=int8",
        "model.dtype=bfloat16",
    ],
)
def test_options_beside_adapters(train, setting):
    run = train("lora", *LORA, "steps=2", "eval.every=0", *setting.split(" "))
    last = rows(run)[-1]
    assert last["adapter/effect"] > 0
    stale = "rollout.max_staleness=1" in setting  # k3 counts a step of learning too
    assert last["mismatch/k3"] < (1 if stale else 0.05)


def test_native_sync_trains_the_same_policy_in_float32(train):
    """Routers and experts included, up to the order of a sum."""
    settings = (*LORA, FLOAT32, "eval.every=0")
    merged, native = train("merged", *settings), train("native", *settings, NATIVE)
    for a, b in zip(rows(merged), rows(native), strict=True):
        assert a["train/reward"] == b["train/reward"]
        assert b["adapter/delivered"] == pytest.approx(1, abs=1e-2)
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-3)


def test_activation_checkpointing_computes_the_same(train):
    settings = (*LORA, FLOAT32, "steps=2", "eval.every=0")
    plain = train("plain", *settings)
    again = train("again", *settings, "train.activation_checkpointing=true")
    for a, b in zip(rows(plain), rows(again), strict=True):
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-5)


def test_every_target_is_trained(train):
    run = train(
        "lora", *LORA, FLOAT32, 'train.lora.targets=["attention", "experts", "routers"]', "steps=2"
    )
    tensors = files(run, 2)["adapter_model.safetensors"]
    for kind in ("self_attn.q_proj", "experts.lora_B", "experts.base_layer.lora_B", "gate.lora_B"):
        found = [t for name, t in tensors.items() if kind in name and "lora_B" in name]
        assert found, kind
        assert all(bool(tensor.any()) for tensor in found), kind


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("numerics=on-policy", "numerics = on-policy forbids"),
        ("objective.preset=ppo", "a critic is trained whole"),
        (
            NATIVE + " rollout.engine.kind=sglang rollout.engine.pause=in_place",
            "with rollout.engine.pause = in_place a request keeps the adapter that it began with",
        ),
        (
            NATIVE + " rollout.engine.kind=sglang",
            "adapters of experts are not sent to SGLang here (its CPU kernels of experts take "
            'none); use train.lora.sync = merged, or train.lora.targets=["attention"]',
        ),
        (
            NATIVE + " rollout.engine.kind=sglang train.ranks=2",
            "never run with train.ranks = 2; use train.lora.sync = merged",
        ),
        (
            NATIVE + ' rollout.engine.kind=sglang train.lora.targets=["routers"]',
            "rollout.engine.kind = sglang cannot compute with adapters of routers",
        ),
        (NATIVE + " cluster.kind=ray", "native is not sent to replicas of Ray; use train.lora.syn"),
        (
            "cluster.kind=ray rollout.engine.kind=vllm",
            "under cluster.kind = ray only rollout.engine.kind = hf was run with adapters, not vll",
        ),
        (
            NATIVE + " replay.source=reprefill",
            "replay.source = reprefill pushes whole weights to its copy; use train.lora.sync = m",
        ),
        ("optim.state=host", "optim.state: host is for the state of whole models"),
        ("optim.state=8bit", "optim.state: 8bit is for the state of whole models"),
        ("model.dtype=bfloat16 train.ranks=2", "train.fsdp_param_dtype"),
        (
            NATIVE + " rollout.engine.kind=vllm-server train.ranks=2",
            "never run with train.ranks = 2; use train.lora.sync = merged",
        ),
        (
            NATIVE + ' rollout.engine.kind=vllm-server train.lora.targets=["experts"]',
            "vllm-server cannot compute with adapters of experts; use train.lora.sync = merged",
        ),
        (
            NATIVE + " rollout.engine.kind=vllm-server",
            "adapters of experts are not what vLLM computes with here (its CPU kernels of experts "
            'take none); use train.lora.sync = merged, or train.lora.targets=["attention"]',
        ),
        (NATIVE + ' rollout.engine.kind=vllm train.lora.targets=["experts"]', "of experts"),
        (NATIVE + " rollout.quant=int8", "rollout.quant makes them anew"),
        ('train.lora.targets=["dense"]', "dense, but Qwen3MoeForCausalLM has no such weights"),
        ('train.lora.targets=["experts","experts"]', "name each kind of weight once"),
    ],
)
def test_refusals(recipe, tmp_path, capsys, setting, message):
    command = [
        "train",
        str(recipe),
        f"out={tmp_path}/run",
        "train.lora.rank=4",
        *setting.split(" "),
    ]
    assert main(command) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_of_a_merge_is_measured_every_so_many_steps(train, dtype, capsys):
    """Before the run, and at the steps that train.lora.loss_every divides."""
    options = (*LORA, f"rollout.engine.dtype={dtype}", "eval.every=0")
    measured = {}
    for every in (2, 0):
        run = train(f"every{every}", *options, f"train.lora.loss_every={every}")
        found = [row for row in rows(run) if "train/reward" in row]
        measured[every] = [row.get("adapter/merge_loss") for row in found]
        assert len(found) == 4
        out = " ".join(capsys.readouterr().out.split())
        assert f"nats; merged into {dtype} it moves them" in out
    assert measured[0] == [None] * 4
    assert [value is None for value in measured[2]] == [True, False, True, False]
    effect = [row["adapter/effect"] for row in found]
    for step in (1, 3):
        if dtype == "float32":
            assert 0 <= measured[2][step] < 1e-3 * effect[step]
        else:
            assert 1e-3 * effect[step] < measured[2][step] < effect[step]
