"""A tiny Qwen3-MoE in a real GRPOTrainer, and a rollout_func that samples from a copy of it."""

from __future__ import annotations

import copy
import types

import torch
from datasets import Dataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import onepolicy as op
from support.oracle.export_peers import WORDS, tokenizer

LENGTH = 12
PROMPTS = ["w1 w2 w3", "w4 w5 w6 w7 w8", "w9 w10", "w11 w12 w13 w14"]
PAD, EOS = 0, 1
SETTINGS = {
    **{"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": LENGTH},
    **{"learning_rate": 1e-3, "beta": 0.0, "max_steps": 3, "shuffle_dataset": False, "seed": 0},
    **{"gradient_checkpointing": False, "use_cpu": True, "bf16": False, "report_to": []},
    **{"save_strategy": "no", "logging_steps": 1, "disable_tqdm": True},
}
"""2 prompts of 4 samples a step, three steps, on the CPU."""
ONE_STEP = {"max_steps": 1, "learning_rate": 1.0, "max_grad_norm": 1e9, "loss_type": "grpo"}
"""Of SGD: the parameters move by the gradient."""


def tiny_moe(seed: int = 0, **changes) -> Qwen3MoeForCausalLM:
    """Return a model of 4 layers, the first of them dense, with 16 experts, top 4."""
    torch.manual_seed(seed)
    sizes = {
        **{"vocab_size": len(WORDS) + 2, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 4, "mlp_only_layers": [0], "initializer_range": 0.2},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
        **{"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24},
        **{"norm_topk_prob": True, "router_aux_loss_coef": 0.01},
        **{"eos_token_id": EOS, "pad_token_id": PAD},
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **changes}))


def reward(completion_ids, **_):
    """Return the share of odd tokens of each completion."""
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


class CopySampler:
    """A rollout_func: samples from a copy of the trainer's model, as an engine would.

    Its routes are an int16 payload over all decoder layers with a row for each token but the last,
    as vLLM sends them.
    """

    def __init__(self, *, dtype=torch.bfloat16, router_noise=0.0, change=None):
        """
        router_noise: with it the copy computes under the routes of a router with noise on its
            weights, and with its own weights otherwise: only the routing differs.
        change: a function of a sample's payload [rows, layers, K] that spoils it.
        """
        self.dtype, self.router_noise, self.change = dtype, router_noise, change
        self.model = None
        self.calls = 0

    def __call__(self, prompts, trainer):
        self._load(trainer.accelerator.unwrap_model(trainer.model))
        ids, mask = self._padded([trainer.processing_class(p)["input_ids"] for p in prompts])
        width = ids.shape[1]
        with torch.no_grad():
            out = self.model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, max_new_tokens=LENGTH
            )
        completions = [completed(row[width:].tolist()) for row in out]
        for row, (completion, seen) in enumerate(zip(completions, mask, strict=True)):
            assert out[row, width : width + len(completion)].tolist() == completion, seen
        whole = torch.cat([mask, ended(completions, out.shape[1] - width)], 1)
        logps, traces = self._scored(out, whole)
        return {
            "prompt_ids": [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)],
            "completion_ids": completions,
            "logprobs": [
                logp[width - 1 : width - 1 + len(c)].tolist()
                for logp, c in zip(logps, completions, strict=True)
            ],
            "routed_experts": [self._payload(trace) for trace in traces],
        }

    def _load(self, model):
        if hasattr(model, "merge_adapter"):
            model = copy.deepcopy(model).merge_and_unload()
        if self.model is None:
            self.model = tiny_moe().eval()
        self.model.load_state_dict(model.state_dict())
        self.model.to(self.dtype)
        self.calls += 1

    def _padded(self, prompts):
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        return ids, mask

    @torch.no_grad()
    def _scored(self, ids, mask):
        """Return log-probabilities [B, S - 1] and each sample's trace."""
        routers = op.bind_routers(self.model)
        given = {"input_ids": ids, "attention_mask": mask}
        recorded = self.model
        if self.router_noise:
            recorded = copy.deepcopy(self.model)
            for name, parameter in recorded.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    parameter += self.router_noise * torch.randn_like(parameter)
        with op.bind_routers(recorded).record() as tape:
            logits = recorded(**given).logits
        trace = tape.trace()
        if self.router_noise:
            with routers.replay(trace, check=False):
                logits = self.model(**given).logits
        logp = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return logp, op.unpad_routes(trace, mask)

    def _payload(self, trace):
        depth = self.model.config.num_hidden_layers
        payload = torch.zeros(len(trace) - 1, depth, trace.top_k, dtype=torch.int16)
        payload[:, list(trace.layers)] = trace.ids[:-1].to(torch.int16)
        if self.change is not None:
            return self.change(payload.numpy())
        return payload.numpy()


def completed(ids):
    """Return a completion up to its end, included."""
    if EOS in ids:
        return ids[: ids.index(EOS) + 1]
    return ids


def ended(completions, width):
    """Return the mask [B, width] of completions."""
    return torch.tensor([[1] * len(c) + [0] * (width - len(c)) for c in completions])


def classes_of(kind):
    """Return the trainer and its config. All but RLOO take a rollout_func."""
    if kind == "gmpo":
        from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

        return GMPOTrainer, GMPOConfig
    return {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}[kind]


def make_trainer(folder, *, sampler=None, model=None, peft_config=None, kind="grpo", **changes):
    """Return a trainer with SETTINGS and these changes, without a router loss."""
    trainer_class, config_class = classes_of(kind)
    settings = {**SETTINGS, "output_dir": str(folder), "router_aux_loss_coef": 0.0, **changes}
    if model is None:
        model = tiny_moe()
    more = {} if kind == "rloo" else {"rollout_func": sampler}
    return trainer_class(
        model=model,
        reward_funcs=reward,
        args=config_class(**settings),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 8}),
        processing_class=tokenizer(),
        peft_config=peft_config,
        **more,
    )


def as_vllm(trainer):
    """Let TRL believe that its rollout_func is vLLM: only then it corrects by itself."""
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_mode = "colocate"
    trainer.vllm_generation = types.SimpleNamespace(sync_weights=lambda: None)
    return trainer


def train(trainer):
    """Train; return TRL's log, a dict for each step."""
    torch.manual_seed(1)
    trainer.train()
    return [row for row in trainer.state.log_history if "reward" in row]


def parameters(trainer) -> torch.Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def watched(trainer):
    """Return a list that gets TRL's micro-batches."""
    seen, loss = [], trainer._compute_loss

    def compute_loss(model, inputs):
        seen.append(dict(inputs))
        return loss(model, inputs)

    trainer._compute_loss = compute_loss
    return seen


def sgd_gradient(trainer) -> tuple[torch.Tensor, torch.Tensor]:
    """Train ONE_STEP of SGD. Return the gradient and the parameters before it."""
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    before = parameters(trainer)
    train(trainer)
    return before - parameters(trainer), before


def model_with(vector):
    """Return the tiny model with these parameters."""
    model = tiny_moe()
    torch.nn.utils.vector_to_parameters(vector.clone(), model.parameters())
    return model


def completion_logp(model, inputs) -> torch.Tensor:
    """Return log-probabilities [B, R] of a micro-batch by a plain forward."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return logp[:, -inputs["completion_ids"].shape[1] :]


def gradient_by_hand(loss, inputs, model) -> torch.Tensor:
    """Return the gradient of GRPO's mean of a loss [B, R]."""
    kept = inputs["completion_mask"].float()
    ((loss * kept).sum(1) / kept.sum(1)).mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])
