"""The planned memory of a micro-batch on a GPU is that of the learner's own forward, loss and
backward over all layers of real shapes, on fake tensors."""

import pytest
import torch
from gpu.shapes import QWEN3_06B, QWEN3_30B
from transformers import Qwen3Config, Qwen3MoeConfig

from onepolicy.config import resolve
from onepolicy.objective.loss import policy_loss
from onepolicy.plan.hardware import parse_cluster
from onepolicy.plan.planner import Planner
from onepolicy.train.activation_checkpointing import checkpoint_activations
from onepolicy.train.dry_run import MicroBatchShape, PeakMemory, _fake_batch, _slot_layout
from onepolicy.train.fake_kernels import kernel_stand_ins
from onepolicy.train.forward import forward

MARGIN = 0.03  # docs/measured.md: off by at most 2.3%
PROMPT, RESPONSE = 512, 1536
SHAPES = {
    "dense": (Qwen3Config(**QWEN3_06B), 8),
    "moe": (Qwen3MoeConfig(**{**QWEN3_30B, "num_hidden_layers": 24}), 4),
}
"""Config, and samples of a micro-batch."""


def whole_update(planner, config, samples):
    """Return the peak of one forward, loss and backward with every layer."""
    dry = planner._model(config)
    slots = PROMPT + RESPONSE - 1
    micro = MicroBatchShape((slots,) * samples, (RESPONSE,) * samples)
    layout = _slot_layout(micro, 1)
    parameters = list(dry.model.parameters())
    entropy = config.objective.entropy_coef > 0
    with dry.fake, kernel_stand_ins(cpu=False):
        batch = _fake_batch(micro)
        floats = torch.empty(batch.num_slots)
        names = ("advantage", "logp_old", "weight", "loss_weight")
        batch = batch.replace(keep=batch.trainable, **dict.fromkeys(names, floats))
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
        if config.train.activation_checkpointing:
            checkpoint_activations(dry.model)
        existing = [*parameters, *(p.grad for p in parameters)]
        with PeakMemory(existing) as memory:
            scored = forward(dry.model, batch, layout, entropy_graph=entropy)
            loss, _ = policy_loss(
                scored.logp,
                batch,
                config=config.objective,
                logp_behaviour=batch.logp_old,
                entropy=scored.entropy,
            )
            loss.backward()
        dry.model.gradient_checkpointing_disable()
    return memory.peak


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("dense", [], marks=pytest.mark.slow),
        ("dense", ["train.logits_chunk=0", "objective.entropy_coef=0.01"]),
        ("dense", ["train.activation_checkpointing=true", "objective.entropy_coef=0.01"]),
        ("moe", []),
        pytest.param("moe", ["train.activation_checkpointing=true"], marks=pytest.mark.slow),
    ],
)
def test_planned_memory_is_that_of_a_whole_update(kind, settings, tmp_path):
    hf_config, samples = SHAPES[kind]
    hf_config.save_pretrained(tmp_path)
    tree = {"out": "unused", "steps": 1, "task": {"kind": "chain"}}
    tree |= {"model": {"path": str(tmp_path), "dtype": "bfloat16"}, "replay": {"mode": "off"}}
    config = resolve(tree, [*settings, f"rollout.sampling.max_tokens={RESPONSE}"])
    planner = Planner(config, config.model, parse_cluster("1xH200"), prompt=PROMPT)
    planned = planner._micro_batch_memory(samples, config, exact=False)
    assert planned.peak == pytest.approx(whole_update(planner, config, samples), rel=MARGIN)
