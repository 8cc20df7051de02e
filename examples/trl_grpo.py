"""GRPO in TRL with rollout routing replay: a tiny MoE, on a CPU, in seconds.

    pip install onepolicy trl==1.16.0   # until the first release: the path of a clone
    python examples/trl_grpo.py

The sampler is a bfloat16 copy of the trainer's model behind a `rollout_func`, in the place of an
engine: same weights, other arithmetic, so some tokens go to other experts. The table shows k3, the
divergence of sampler and trainer, of the same tokens without replay and with it.
"""

import os
import tempfile

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental in TRL

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

import onepolicy as op
import onepolicy.integrations.trl as op_trl

LENGTH = 16
SETTINGS = {
    **{"per_device_train_batch_size": 32, "num_generations": 8, "max_steps": 10, "bf16": False},
    **{"learning_rate": 1e-3, "logging_steps": 1, "disable_tqdm": True, "use_cpu": True},
    **{"report_to": [], "save_strategy": "no"},
    "router_aux_loss_coef": 0.0,  # it would pull the routers away from what is replayed
}
WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(62))]


def make_model() -> Qwen3MoeForCausalLM:
    shape = {"vocab_size": len(WORDS), "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**shape, **heads, **experts, initializer_range=0.2, pad_token_id=0)
    return Qwen3MoeForCausalLM(config)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"pad_token": "<pad>", "eos_token": "<eos>", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **marks)


class Sampler:
    """An engine of ours: samples in bfloat16 and returns the experts that it used."""

    def __init__(self) -> None:
        self.model = make_model().bfloat16().eval()
        self.routers = op.bind_routers(self.model)

    @torch.no_grad()
    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        self.model.load_state_dict(trainer.model.state_dict())
        ids = trainer.processing_class(prompts, return_tensors="pt").input_ids
        lengths = {"min_new_tokens": LENGTH, "max_new_tokens": LENGTH}
        options = {"do_sample": True, "top_k": 0, "output_logits": True, **lengths}
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options}
        with self.routers.record() as tape:
            out = self.model.generate(**given, return_dict_in_generate=True)
        logp = torch.stack(out.logits, 1).float().log_softmax(-1)
        completions = out.sequences[:, ids.shape[1] :]
        return {
            "prompt_ids": ids.tolist(),
            "completion_ids": completions.tolist(),
            "logprobs": logp.gather(-1, completions[..., None])[..., 0].tolist(),
            "routed_experts": op.routes_of_generate(tape, out.sequences, torch.ones_like(ids)),
        }


def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Return the share of odd tokens."""
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(output_dir=folder, max_completion_length=LENGTH, **SETTINGS)
        prompts = Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5 w6"] * 20})
        given = {"train_dataset": prompts, "processing_class": make_tokenizer()}
        trainer = GRPOTrainer(make_model(), reward, args, rollout_func=Sampler(), **given)
        op_trl.attach(trainer, replay="r3", native_every=1)
        trainer.train()
    print("step  reward  k3 without  k3 with replay  routes that differ")
    for row in trainer.state.log_history:
        if "mismatch/k3" in row:
            k3 = f"{row['mismatch_native/k3']:10.1e}  {row['mismatch/k3']:14.1e}"
            print(f"{row['step']:4}  {row['reward']:6.3f}  {k3}  {row['routing/routers']:18.2%}")


if __name__ == "__main__":
    main()
