"""Whole runs through the command line: train, fork, eval, and the contents of the run folder."""

import dataclasses
import json
import math
import re
import shutil
import tomllib
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from onepolicy.cli import main
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.train.checkpoint import checkpoint_folder, verify
from onepolicy.train.learner import LocalLearner
from support.metrics import rows, timeless


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    settings = ["log.report=true", "log.tensorboard=true"]
    assert main(["train", str(recipe), f"out={out}", *settings]) == 0
    return out


def test_run_folder(finished):
    found = rows(finished)
    assert [row["step"] for row in found] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in found if "eval/greedy" in row] == [0, 2, 4]
    for probed in ("mismatch/k3", "routing/layer@0"):
        assert [r["step"] for r in found if f"counterfactual/{probed}" in r] == [1, 3, 4]
    assert [row["step"] for row in found if "routing/layer@0" in row] == [1, 3, 4]
    assert {"eval/avg@2", "eval/pass@2"} <= set(found[0])
    names = "train/reward mismatch/k3 routing/routers correction/weight_mean time/rollout train/lr"
    assert all(set(names.split()) <= set(row) for row in found[1:])
    samples = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 8
    assert samples[0]["prompt"].endswith("=")
    assert (finished / "report.html").stat().st_size > 1_000_000
    assert list((finished / "tensorboard").iterdir())
    probe = load_file(finished / "probes" / "step_00001.safetensors")
    assert len(probe["logp_rollout"]) == len(probe["logp_trainer_native"])
    summary = json.loads((finished / "summary.json").read_text())
    best = max(row["eval/greedy"] for row in found if "eval/greedy" in row)
    assert summary["eval_best"]["value"] == best


def test_checkpoint_is_a_plain_transformers_model(finished):
    folder = finished / "checkpoints" / "step_00004"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode("1+2=", add_special_tokens=False)])
    generated = model.generate(ids, min_new_tokens=3, max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 7)


def test_counterfactual_equals_a_run_without_replay(train):
    """With bf16 rollouts and fp32 training, one batch is measured with and without replay, in two
    runs and within one. Another seed is another run."""
    settings = ("steps=1", "eval.every=0")
    with_replay, without, other = (
        rows(train(None, *settings, *more))[0] for more in ([], ["replay.mode=off"], ["seed=1"])
    )
    assert with_replay["train/reward"] == without["train/reward"]  # the very same rollouts
    assert with_replay["counterfactual/mismatch/k3"] == without["mismatch/k3"]
    for name in ("routing/routers", "routing/layer@0"):
        assert with_replay[f"counterfactual/{name}"] == without[name]
    assert with_replay["mismatch/k3"] != without["mismatch/k3"]
    assert with_replay["correction/weight_max"] == 1
    assert without["correction/weight_max"] > 0
    assert timeless(with_replay) != timeless(other)


def test_a_fork_starts_at_the_parents_step_with_new_settings(finished, tmp_path):
    out = tmp_path / "fork"
    settings = ["steps=3", "replay.mode=off", "log.report=false", "objective.kl.coef=0.01"]
    assert main(["train", "--from", f"{finished}/2", f"out={out}", *settings]) == 0
    assert [row["step"] for row in rows(out)] == [2, 3]
    about = json.loads((out / "run.json").read_text())
    assert about["parent"] == {"run": str(finished), "step": 2}
    started = json.loads((finished / "config.json").read_text())["model"]["path"]
    assert about["kl_reference"] == started  # not the checkpoint the fork starts at:
    assert rows(out)[1]["train/kl"] > 0  # two steps away already
    config = json.loads((out / "config.json").read_text())
    assert config["replay"]["mode"] == "off"
    correction = config["correction"]  # follows replay.mode, as in a fresh run
    assert (correction["preset"], correction["weight"]["high"]) == ("tis", 2.0)
    assert (out / "checkpoints" / "step_00002").is_dir()  # its own start: the parent may go
    # evaluation before the fork's first step is that of the parent at the fork
    parent = next(row for row in rows(finished) if row["step"] == 2)
    assert rows(out)[0]["eval/greedy"] == parent["eval/greedy"]
    # same data as the parent's third step, so the same rollouts
    third = next(row for row in rows(finished) if row["step"] == 3)
    assert rows(out)[1]["train/reward"] == third["train/reward"]


def test_a_fork_keeps_the_start_that_its_learner_writes_in_the_background(
    finished, tmp_path, monkeypatch
):
    """A learner on ranks does; here everything is written as late as it may be."""
    pending, save, out = [], LocalLearner.save, tmp_path / "fork"

    def save_later(*arguments):
        pending.append(partial(save, *arguments))

    def finish_saving(_):
        while pending:
            pending.pop()()

    monkeypatch.setattr(LocalLearner, "save", save_later)
    monkeypatch.setattr(LocalLearner, "finish_saving", finish_saving)
    settings = ["steps=3", "log.report=false", "log.tensorboard=false", "eval.every=0"]
    assert main(["train", "--from", f"{finished}/2", f"out={out}", *settings]) == 0
    for step in (2, 3):
        assert "tokenizer.json" in verify(checkpoint_folder(out, step))["files"]


def test_eval_of_a_run_repeats_its_last_evaluation(finished, capsys):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert main(["eval", str(finished), f"train.threads={before}"]) == 0
    assert torch.get_num_threads() == before
    lines = capsys.readouterr().out.strip().splitlines()
    assert re.fullmatch(rf"\d+ held-out problems, {finished}/checkpoints/step_\d+", lines[0])
    printed = json.loads(lines[-1])
    last = rows(finished)[-1]
    evaluated = {k: v for k, v in last.items() if k.startswith("eval/")}
    assert {k: v for k, v in printed.items() if k != "model"} == evaluated


def test_eval_of_a_quantised_engine_keeps_its_scales_in_the_run(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    static = 'rollout.quant={format="int8", activations="static"}'
    assert main(["eval", str(run), static, "eval.quantised=true", "eval.problems=1"]) == 0
    scales = json.loads((run / "calibration.json").read_text())
    assert scales
    assert all(scale > 0 for scale in scales.values())


def test_an_engine_without_seeds_is_said_at_the_start(train, monkeypatch, capsys):
    original = HFEngine.__init__

    def without_seeds(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.caps = dataclasses.replace(self.caps, seeded=False)

    monkeypatch.setattr(HFEngine, "__init__", without_seeds)
    train("unseeded", "steps=1", "eval.every=0")
    assert "does not use the request's seed" in capsys.readouterr().out


def test_config_prints_effective_settings(recipe, capsys):
    assert main(["config", str(recipe), "replay.mode=off"]) == 0
    correction = tomllib.loads(capsys.readouterr().out)["correction"]
    assert (correction["preset"], correction["weight"]["high"]) == ("tis", 2.0)


def test_help_teaches(capsys):
    for arguments in (["--help"], ["train", "--help"], ["make-policy", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0
    assert "recipes/quickstart.toml" in capsys.readouterr().out


SMALL = ["layers=1", "hidden_size=32", "experts=4", "top_k=2", "tokens_per_step=256"]


@pytest.mark.full
def test_make_policy_repeats_its_weights(tmp_path, capsys):
    for name in ("one", "two"):
        command = ["make-policy", "--out", str(tmp_path / name), *SMALL, "steps=4", "max_len=220"]
        assert main(command) == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert "sampling accuracy" in capsys.readouterr().out


def test_make_policy_on_a_jsonl_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal, which has a bar
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, sums)))
    task = ["task.kind=jsonl", f"task.path={tmp_path / 'sums.jsonl'}", "task.held_out=8"]
    command = ["make-policy", "--out", str(tmp_path / "policy"), *task, *SMALL]
    assert main([*command, "steps=2", "max_len=64"]) == 0
    assert (tmp_path / "policy" / "policy.json").exists()
    assert "2/2" in capsys.readouterr().out


def test_a_score_that_is_not_finite_stops_the_run_before_the_update(
    recipe, tmp_path, monkeypatch, capsys
):
    """Whatever share of them the correction lets pass."""
    score = LocalLearner.score

    def scored(learner, batch):
        made = score(learner, batch)
        made.logp_old[batch.trainable.nonzero()[0]] = -math.inf
        return made

    monkeypatch.setattr(LocalLearner, "score", scored)
    monkeypatch.setattr(LocalLearner, "step", lambda *_: pytest.fail("it was trained on"))
    status = main(["train", str(recipe), f"out={tmp_path / 'run'}", "steps=1", "eval.every=0"])
    assert status == 1
    assert "of a token of sample 0 is -inf; its weights are broken" in capsys.readouterr().err
