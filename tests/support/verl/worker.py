"""verl's TrainingWorker in this process, on a tiny MoE, and batches of a bf16 rollout for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from onepolicy.integrations.verl import engine
from onepolicy.replay.routers import bind_routers
from support.families import TABLE
from support.verl import platform  # noqa: F401 (makes the CPU verl's device)

PROMPT, RESPONSE = 6, 24  # columns
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def save_model(folder: Path, **changes) -> Path:
    """Save a Qwen3-MoE with 3 layers of 16 experts, the first of them dense."""
    config = Qwen3MoeConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"norm_topk_prob": True, "mlp_only_layers": [0], "decoder_sparse_step": 1},
        **{"max_position_embeddings": 256, "tie_word_embeddings": False},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        **changes,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(12)
    model.save_pretrained(folder)
    return folder


def save_family(folder: Path, name: str) -> Path:
    """Save the tiny model of another MoE family."""
    model = TABLE[name].model()
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    return folder


def open_process_group() -> None:
    """Open the group of this one process, and set what verl's Worker reads of its launcher."""
    if distributed.is_initialized():
        return
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


def make_worker(
    folder: Path,
    *,
    strategy: str = "fsdp2",
    packed: bool = True,
    checkpointing: bool = False,
    bucket: int = 0,
    loss_mode: str = "vanilla",
    **model_settings,
) -> TrainingWorker:
    """Return a worker whose engine verl chose itself."""
    open_process_group()
    engine.register(["cpu"])
    model = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        override_config={"attn_implementation": "eager"},
        use_remove_padding=packed,
        enable_gradient_checkpointing=checkpointing,
        **model_settings,
    )
    settings = FSDPEngineConfig(
        strategy=strategy,
        mixed_precision=FP32,
        use_torch_compile=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=2,
        use_orig_params=True,
        pad_to_length=bucket > 0,
        pad_to_length_bucket=max(bucket, 1),
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=settings,
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10, clip_grad=1e9),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=actor_config(strategy, loss_mode)))
    return worker


def actor_config(strategy: str, loss_mode: str = "vanilla") -> FSDPActorConfig:
    return FSDPActorConfig(
        strategy=strategy,
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        policy_loss={"loss_mode": loss_mode},
        use_torch_compile=False,
    )


@dataclass
class Rollout:
    """Samples of a bf16 copy of the policy, as verl's agent loop pads them."""

    tensors: dict[str, Tensor]
    logp: Tensor  # [B, RESPONSE]
    mask: Tensor  # [B, RESPONSE] bool

    def part(self, samples: slice) -> Rollout:
        tensors = {name: value[samples] for name, value in self.tensors.items()}
        return Rollout(tensors, self.logp[samples], self.mask[samples])

    def batch(self, **replaced) -> TensorDict:
        """Return the batch without padding, as verl's workers take it; None drops a field."""
        given = (self.tensors | replaced).items()
        tensors = {name: value.clone() for name, value in given if value is not None}
        return left_right_2_no_padding(TensorDict(tensors, batch_size=len(self.logp)))


@torch.no_grad()
def sample(folder: Path, *, samples: int = 8, seed: int = 0) -> Rollout:
    """Return random responses, scored and routed by a bf16 copy of the policy."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    routers = bind_routers(model)
    random = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.zeros(samples, PROMPT + RESPONSE, dtype=torch.int64)
    attention = torch.zeros_like(tokens)
    routes = torch.zeros(*tokens.shape, routers.depth, routers.top_k, dtype=torch.int16)
    logp = torch.zeros(samples, RESPONSE)
    for i in range(samples):
        prompt, response = 3 + i % 3, RESPONSE - 3 * (i % 3)
        path = torch.randint(3, vocabulary, (1, prompt + response), generator=random)
        with routers.record() as tape:
            logits = model(input_ids=path[:, :-1], use_cache=False).logits.float()
        scored = logits.log_softmax(-1).gather(-1, path[:, 1:, None])[0, :, 0]
        first = PROMPT - prompt
        tokens[i, first : PROMPT + response] = path[0]
        attention[i, first : PROMPT + response] = 1
        rows = routes[i, first : PROMPT + response - 1]
        rows[:, list(routers.layers)] = tape.trace().ids.to(torch.int16)
        logp[i, :response] = scored[prompt - 1 :]
    mask = attention[:, PROMPT:]
    tensors = {
        "input_ids": tokens,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "prompts": tokens[:, :PROMPT],
        "responses": tokens[:, PROMPT:],
        "response_mask": mask,
        "routed_experts": routes,
    }
    return Rollout(tensors, logp, mask.bool())


def score(worker: TrainingWorker, batch: TensorDict, **settings) -> Tensor:
    """Return the trainer's log-probabilities [B, RESPONSE] of the responses."""
    return no_padding_2_padding(scored(worker, batch, **settings)["log_probs"], batch)


def scored(worker: TrainingWorker, batch: TensorDict, **settings) -> TensorDict:
    """Return everything that the worker's scoring returns."""
    tu.assign_non_tensor(
        batch, temperature=1.0, calculate_entropy=False, compute_loss=False, **settings
    )
    return worker.infer_batch(batch)


def update(worker: TrainingWorker, batch: TensorDict, old: Tensor, advantages: Tensor, samples=0):
    """Take one optimiser step, and return its metrics.

    samples: of all ranks; 0 if this is the only one.
    """
    batch["old_log_probs"], batch["advantages"] = old.clone(), advantages.clone()
    samples = samples or len(old)
    tu.assign_non_tensor(
        batch,
        temperature=1.0,
        calculate_entropy=False,
        global_batch_size=samples,
        mini_batch_size=samples,
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
    )
    return tu.get(worker.train_mini_batch(batch), "metrics")
