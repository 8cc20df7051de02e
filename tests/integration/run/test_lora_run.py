"""Runs with train.lora: trained, saved, resumed to the bit, forked, evaluated and measured."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from onepolicy.cli import main
from onepolicy.config import ModelConfig
from onepolicy.models.load import load_model
from onepolicy.run.adapter_check import AdapterCheck
from onepolicy.train import checkpoint
from support.adapter_runs import (
    adapter_files,
    assert_same_adapters,
    last_evaluation,
    trained,
    updates,
)
from support.metrics import rows, timeless

LORA = ("train.lora.rank=4", "optim.lr=5e-3")
NATIVE = "train.lora.sync=native"
FLOAT32 = "rollout.engine.dtype=float32"


@pytest.fixture(scope="module")
def lora(recipe, tmp_path_factory):
    """Train 4 steps in float32. Return the run's folder and what it printed."""
    out = tmp_path_factory.mktemp("lora") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdapterCheck, "prompts", 8)
        return out, trained(recipe, out, *LORA, FLOAT32, "eval.every=4")


def test_a_run_delivers_its_adapter_and_saves_nothing_else(lora, policy):
    run, said = lora
    found = updates(run)
    assert [row["adapter/delivered"] for row in found] == pytest.approx([1] * 4, abs=1e-2)
    effects = [row["adapter/effect"] for row in found]
    assert effects[0] == min(effects)
    assert all(row["adapter/gap"] < 1e-2 * row["adapter/effect"] for row in found)
    assert all(row["mismatch/k3"] < 1e-7 for row in found)
    assert "train.lora: an adapter of one update (B = +-0.005) moves the log-probabilities" in said
    folder = checkpoint.checkpoint_folder(run, 4)
    assert not (folder / "model.safetensors").exists()
    moments = load_file(folder / "optimizer.safetensors")
    assert all(".lora_" in name for name in moments if name != "rng")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    assert config["base_model_name_or_path"] == str(policy)


def test_the_check_of_an_adapter_goes_without_the_routes_that_r2_replays(
    recipe, tmp_path, monkeypatch
):
    """They are of the trainer's own scoring, which the check's answers have not seen."""
    monkeypatch.setattr(AdapterCheck, "prompts", 8)
    r2 = ("replay.mode=r2", "objective.num_minibatches=2", "steps=1", "eval.every=0")
    trained(recipe, tmp_path / "run", *LORA, FLOAT32, *r2)
    (row,) = updates(tmp_path / "run")
    assert row["adapter/delivered"] == pytest.approx(1, abs=1e-2)


@pytest.mark.full
def test_resume_and_fork(lora, tmp_path, monkeypatch):
    """A fork begins at the parent's adapter, and its first steps are the parent's."""
    monkeypatch.setattr(AdapterCheck, "prompts", 8)
    part, fork = shutil.copytree(lora[0], tmp_path / "part"), tmp_path / "fork"
    shutil.rmtree(checkpoint.checkpoint_folder(part, 4))
    assert main(["train", "--resume", str(part)]) == 0
    assert list(map(timeless, rows(lora[0]))) == list(map(timeless, rows(part)))
    assert_same_adapters(lora[0], part, 4)
    assert main(["train", "--from", f"{lora[0]}/2", f"out={fork}", "eval.every=0"]) == 0
    assert_same_adapters(lora[0], fork, 4)


@pytest.mark.full
def test_forks_between_adapters_and_whole_models_are_refused(lora, train, tmp_path, capsys):
    whole = train("whole", "steps=1", "eval.every=0")
    capsys.readouterr()
    refused = [
        (lora[0], "train.lora=off", "holds an adapter, but this run trains all weights"),
        (lora[0], "train.lora.rank=8", "use the rank that it was trained with"),
        (lora[0], 'train.lora.targets=["attention"]', "use the targets that it was trained with"),
        (whole, "train.lora={rank=4}", "holds a whole model"),
    ]
    for number, (source, setting, message) in enumerate(refused):
        out = tmp_path / f"fork{number}"
        command = ["train", "--from", str(source), f"out={out}", "steps=5", setting]
        assert main(command) == 2
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.full
def test_a_checkpoint_is_evaluated_and_trained_on_as_base_and_adapter(lora, train, capsys):
    run, last = lora[0], last_evaluation(lora[0])
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


@pytest.mark.full
def test_the_reference_is_the_model_without_its_adapter(train, policy):
    """It is the same KL as to a second model, which objective.kl.reference loads."""
    settings = (*LORA, FLOAT32, "objective.kl.coef=0.1", "steps=2", "eval.every=0")
    own = train("own", *settings)
    second = train("second", *settings, f"objective.kl.reference={policy}")
    for a, b in zip(rows(own), rows(second), strict=True):
        assert a["train/kl"] == pytest.approx(b["train/kl"], rel=1e-4, abs=1e-9)
    assert rows(own)[1]["train/kl"] > 1e-6


OPTIONS = [
    "train.reuse_scoring_forward=true rollout.quant=int8",
    "train.tokens_per_micro_batch=64 correction.preset=tis",
    "replay.mode=off model.dtype=bfloat16",
    "replay.source=reprefill",
    "rollout.max_staleness=1",
    "train.lora.sync=native rollout.max_staleness=1",
]


@pytest.mark.full
@pytest.mark.parametrize("setting", OPTIONS)
def test_options_beside_adapters(train, setting):
    run = train("lora", *LORA, "steps=2", "eval.every=0", *setting.split(" "))
    last = rows(run)[-1]
    assert last["adapter/effect"] > 0
    stale = "rollout.max_staleness=1" in setting  # k3 counts a step of learning too
    assert last["mismatch/k3"] < (1 if stale else 0.05)


@pytest.mark.full
def test_native_sync_trains_the_same_policy_in_float32(lora, train):
    """Routers and experts included, up to the order of a sum."""
    native = train("native", *LORA, FLOAT32, "eval.every=0", NATIVE)
    for a, b in zip(updates(lora[0]), rows(native), strict=True):
        assert a["train/reward"] == b["train/reward"]
        assert b["adapter/delivered"] == pytest.approx(1, abs=1e-2)
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-3)


@pytest.mark.full
def test_every_target_is_trained(train):
    targets = 'train.lora.targets=["attention", "experts", "routers"]'
    run = train("lora", *LORA, FLOAT32, targets, "steps=2")
    tensors = adapter_files(run, 2)["adapter_model.safetensors"]
    for kind in ("self_attn.q_proj", "experts.lora_B", "experts.base_layer.lora_B", "gate.lora_B"):
        found = [t for name, t in tensors.items() if kind in name and "lora_B" in name]
        assert found, kind
        assert all(bool(tensor.any()) for tensor in found), kind


SGLANG, SERVER = (f"{NATIVE} rollout.engine.kind={kind}" for kind in ("sglang", "vllm-server"))
REFUSED = [  # what no rule between settings knows
    (SGLANG, "adapters of experts are not sent to SGLang here (its CPU kernels of experts take"),
    (SERVER, "adapters of experts are not what vLLM computes with here (its CPU kernels of"),
    ('train.lora.targets=["dense"]', "dense, but Qwen3MoeForCausalLM has no such weights"),
]


def test_refusals(recipe, tmp_path, capsys, subtests):
    for settings, message in REFUSED:
        command = ["train", str(recipe), f"out={tmp_path}/run", "train.lora.rank=4"]
        with subtests.test(settings):
            assert main([*command, *settings.split(" ")]) == 2
            assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_of_a_merge_is_measured_every_so_many_steps(train, dtype, capsys):
    """Before the run, and at the steps that train.lora.loss_every divides."""
    options = (*LORA, f"rollout.engine.dtype={dtype}", "eval.every=0")
    measured = {}
    for every in (2, 0):
        run = train(f"every{every}", *options, f"train.lora.loss_every={every}")
        found = updates(run)
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
