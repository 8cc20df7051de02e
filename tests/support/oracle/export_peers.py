"""A script of the oracle venv: `export_peers.py FOLDER` trains with TRL's GRPOTrainer under our
hook and exports verl's DataProto. FOLDER/peers.json has both sides' numbers of the same tokens."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy as np
import torch

WORDS = [f"w{i}" for i in range(40)]
LENGTH = 24


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def sampled(prompts: list[str], trainer, temperature: float) -> dict[str, list]:
    """Sample with an engine of our own: the trainer's model with noise on its logits, at a
    temperature that it does not report."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    g = torch.Generator().manual_seed(0)
    rows, logps = torch.tensor(ids), []
    for _ in range(LENGTH):
        with torch.no_grad():
            logits = trainer.model(rows).logits[:, -1].float()
        logits = logits + 0.02 * torch.randn(logits.shape, generator=g)
        logits[:, :2] = -1e4  # neither pad nor end
        logp = (logits / temperature).log_softmax(-1)
        drawn = torch.multinomial(logp.exp(), 1, generator=g)
        logps.append(logp.gather(1, drawn))
        rows = torch.cat([rows, drawn], 1)
    width, listed = len(ids[0]), torch.cat(logps, 1).tolist()
    listed[0][3] = None  # vLLM could not say: TRL takes its ratio as 1
    completions = rows[:, width:].tolist()
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": listed}


def trl(folder: Path, temperature: float, *, steps: int) -> list[dict[str, float]]:
    """Train with TRL and return its log of each step."""
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from onepolicy.record.export.trl import export

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(WORDS) + 2, num_key_value_heads=2, **sizes))
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.6)
        model.lm_head.weight[:2] = 0
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        vllm_importance_sampling_mode="token_truncate",
        **{"per_device_train_batch_size": 8, "num_generations": 4, "learning_rate": 1e-3},
        **{"max_completion_length": LENGTH, "report_to": [], "save_strategy": "no"},
        **{"use_cpu": True, "bf16": False, "disable_tqdm": True, "logging_steps": 1},
    )
    data = Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5 w6"] * 8})

    def reward(completion_ids, **_):
        return [float(sum(token % 2 for token in ids)) / len(ids) for ids in completion_ids]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer(),
        rollout_func=lambda prompts, trainer: sampled(prompts, trainer, temperature),
    )
    # TRL measures and corrects engines called vLLM only; ours stands in for one
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = types.SimpleNamespace(sync_weights=lambda: None)
    export(trainer, folder / f"trl-{temperature:g}")
    trainer.train()
    key = "sampling/sampling_logp_difference/mean"
    return [row for row in trainer.state.log_history if key in row]


def verl(folder: Path) -> dict[str, float]:
    """Return a DataProto as RayPPOTrainer holds it behind old_log_probs: prompts padded left,
    responses right. Also return its metrics."""
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import (
        compute_rollout_correction_and_rejection_mask as correct,
    )
    from verl.utils.debug.metrics import calculate_debug_metrics

    from onepolicy.record.export.verl import export

    g, found = torch.Generator().manual_seed(0), {}
    for step in range(2):
        lengths = torch.tensor([12, 5, 9, 12])
        inside = torch.arange(12) < lengths[:, None]
        rollout = torch.where(inside, -torch.rand(4, 12, generator=g) * 3 - 0.5, 0.0)
        near = rollout + 0.3 * torch.randn(4, 12, generator=g)
        old = torch.where(inside, near, 0.0).clamp(max=-0.01)
        tensors = {
            "prompts": torch.zeros(4, 3, dtype=torch.long),
            "responses": torch.randint(2, 40, (4, 12), generator=g),
            "attention_mask": torch.cat([torch.ones(4, 3, dtype=torch.long), inside.long()], 1),
            "response_mask": (inside & (torch.arange(12) != 2)).long(),  # a tool's token
            "rollout_log_probs": rollout,
            "old_log_probs": old,
            "entropys": torch.ones(4, 12),
            "token_level_scores": torch.eye(4, 12),
        }
        versions = np.array([step] * 4, dtype=object)
        batch = DataProto.from_dict(tensors=tensors, non_tensors={"min_global_steps": versions})
        export(batch, folder / "verl", step)
        if step == 0:
            found = calculate_debug_metrics(batch)
            for bound in (1.2, 100.0):
                mask = tensors["response_mask"].float()
                truncated = {"rollout_is": "token", "rollout_is_threshold": bound}
                metrics = correct(old, rollout, mask, **truncated)[2]
                found |= {f"{key} {bound:g}": float(value) for key, value in metrics.items()}
    return found


if __name__ == "__main__":
    out = Path(sys.argv[1])
    said = {"verl": verl(out), "trl": trl(out, 1.0, steps=3), "trl 1.4": trl(out, 1.4, steps=2)}
    (out / "peers.json").write_text(json.dumps(said))
