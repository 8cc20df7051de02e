"""Whole runs of verl: Ray, TransferQueue, agent loop, its V1 trainer and our engine. Minutes."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
import torch

import onepolicy as op
from support.paths import ROOT

pytestmark = [
    pytest.mark.verl,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.timeout(3600),
]
STEPS, PROMPTS, SAMPLES, LENGTH = 2, 2, 4, 24
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
SETTINGS = f"""
trainer.device=cpu trainer.nnodes=1 trainer.n_gpus_per_node=1 trainer.logger=[console,file]
trainer.val_before_train=false trainer.total_training_steps={STEPS} trainer.total_epochs=1
trainer.resume_mode=disable trainer.v1.trainer_mode=onepolicy_sync
data.train_batch_size={PROMPTS} data.max_prompt_length=16 data.max_response_length={LENGTH}
data.dataloader_num_workers=0 data.shuffle=false data.filter_overlong_prompts=false
algorithm.adv_estimator=grpo reward.num_workers=1
actor_rollout_ref.model.use_remove_padding=true
actor_rollout_ref.model.enable_gradient_checkpointing=true
+actor_rollout_ref.model.override_config.attn_implementation=eager
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.use_torch_compile=false
actor_rollout_ref.actor.fsdp_config.use_torch_compile=false
+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32
+actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32
actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
actor_rollout_ref.actor.optim.lr=1e-3
actor_rollout_ref.rollout.name=bf16 actor_rollout_ref.rollout.n={SAMPLES}
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.enable_rollout_routing_replay=true
actor_rollout_ref.rollout.calculate_log_probs=true
actor_rollout_ref.rollout.agent.num_workers=1
ray_kwargs.ray_init.num_cpus=32 +ray_kwargs.ray_init.num_gpus=1
+ray_kwargs.ray_init.include_dashboard=false
+ray_kwargs.ray_init.object_store_memory=200000000
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Return a folder with a tiny MoE and a tokenizer with a chat template."""
    from onepolicy.tiny.model import make_tokenizer
    from support.verl.worker import save_model

    folder = save_model(tmp_path_factory.mktemp("policy"))
    tokenizer = make_tokenizer("abcdefghijklmnopqrstuvwxyz \n")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    assert len(tokenizer) <= 64
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.parquet"
    usual = {"data_source": "letters", "reward_model": {"style": "rule", "ground_truth": ""}}
    rows = [
        usual | {"prompt": [{"role": "user", "content": text}], "extra_info": {"index": i}}
        for i, text in enumerate(["abc", "hello", "x y", "good day"])
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def run(policy, prompts, tmp_path):
    """Return run(*settings, **environment) -> WholeRun."""
    from support.verl.rollout import RECORD
    from support.verl.whole_run import run_main_ppo

    reward = ROOT / "tests" / "support" / "verl" / "reward.py"
    paths = [
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        f"actor_rollout_ref.model.path={policy}",
        f"reward.custom_reward_function.path={reward}",
    ]

    def run(*settings, **environment):
        own = {
            "VERL_USE_EXTERNAL_MODULES": "support.verl.rollout,onepolicy.integrations.verl",
            "VERL_ENGINE_VENDOR": "onepolicy",
            "VERL_ENGINE_DEVICE": "cuda",  # what the engine is registered for
            RECORD: str(tmp_path),
        }
        return run_main_ppo(tmp_path, [*SETTINGS.split(), *paths, *settings], own | environment)

    return run


def k3_of(folder, version):
    """Return k3 without and with replay of the samples that these weights drew, scored in float32
    by transformers alone."""
    from transformers import AutoModelForCausalLM

    from support.verl.rollout import read_answers

    weights = folder / f"weights_{version}"
    model = AutoModelForCausalLM.from_pretrained(
        weights, dtype=torch.float32, attn_implementation="eager"
    )
    routers = op.bind_routers(model.eval())
    native, replayed = [], []
    answers = [answer for answer in read_answers(folder) if answer.version == version]
    assert len(answers) == PROMPTS * SAMPLES
    for answer in answers:
        rollout = torch.tensor(answer.logp)
        native.append(log_ratio(model, answer, rollout))
        with routers.replay(routers.trace_from(torch.tensor(answer.routes))):
            replayed.append(log_ratio(model, answer, rollout))
    return k3(torch.cat(native)), k3(torch.cat(replayed))


@torch.no_grad()
def log_ratio(model, answer, rollout):
    path = torch.tensor([answer.prompt + answer.response])
    logits = model(input_ids=path[:, :-1], use_cache=False).logits.float()
    logp = logits.log_softmax(-1).gather(-1, path[:, 1:, None])[0, -len(rollout) :, 0]
    return (logp - rollout).double()


def k3(log_rho):
    return (log_rho.expm1() - log_rho).mean().item()


def test_two_steps(run, tmp_path):
    """verl's log has the k3 of its samples with replay, and it is below the k3 without."""
    dump = tmp_path / "dump"
    done = run("+trainer.onepolicy.correction=tis", f"+trainer.onepolicy.dump={dump}")
    assert done.status == 0, done.output[-6000:]
    assert "onepolicy in verl" in done.output  # the report of the checks
    assert len(done.steps) == STEPS
    for step, logged in enumerate(done.steps):
        without, replayed = k3_of(tmp_path, version=step)
        assert logged["mismatch/k3"] == pytest.approx(replayed, rel=1e-3)
        assert logged["mismatch/k3"] < without / 2
        assert f"mismatch/k3:{logged['mismatch/k3']}" in done.output  # the console
        assert logged["actor/ppo_kl"] == 0  # the update replays the routes of scoring
        assert logged["actor/grad_norm"] > 0
        assert 0.5 < logged["routing/agreement"] < 1
        assert logged["replay/missing_samples"] == logged["replay/native_rows"] == 0
        assert logged["correction/kept"] == PROMPTS * SAMPLES * LENGTH
        print(f"step {step + 1}: k3 {without:.2e} without, {logged['mismatch/k3']:.2e} with replay")
    found = audited(dump, tmp_path / "audited")
    assert found["verdict"]["action"] == "nothing"
    assert [row["tokens"] for row in found["steps"]] == [PROMPTS * SAMPLES * LENGTH] * STEPS
    for row, logged in zip(found["steps"], done.steps, strict=True):
        assert row["k3"] == pytest.approx(logged["mismatch/k3"], rel=1e-3)
    assert 0 < found["overall"]["routers"] < 0.5  # from the routes of both sides


def audited(dump, out):
    """Return the results of `onepolicy audit`."""
    command = [sys.executable, "-m", "onepolicy", "audit", str(dump), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "audit.json").read_text())


def test_without_the_vendor_nothing_starts(run):
    done = run(VERL_ENGINE_VENDOR="")
    assert done.status != 0
    assert "export VERL_ENGINE_VENDOR=onepolicy" in done.output
    assert done.steps == []


def test_a_run_that_takes_too_long_is_ended(run, tmp_path, monkeypatch):
    from support.verl import whole_run
    from support.verl.rollout import RECORD

    monkeypatch.setattr(whole_run, "LIMIT_S", 20)
    with pytest.raises(AssertionError, match="has not ended after 20 s"):
        run()
    assert whole_run.processes_with(f"{RECORD}={tmp_path}") == []
