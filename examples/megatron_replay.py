"""Megatron-core: a trainer in float32 replays the experts of the same model in bfloat16.

    python examples/megatron_replay.py  # beside megatron-core 0.16 or newer, on a machine with CUDA

The bfloat16 copy stands for a rollout engine: it has the same weights and other arithmetic, so some
of its routers choose other experts. Replay removes that part of the gap. (`make test-megatron` runs
this file on a CPU.)
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import onepolicy as op
import onepolicy.integrations.megatron as op_megatron

BATCH, LENGTH, VOCABULARY = 8, 48, 128


def one_process() -> None:
    """Start the process group and the parallel groups that Megatron's modules look up."""
    store = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)


def make(dtype: torch.dtype) -> GPTModel:
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=16,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        moe_layer_freq=[0, 1, 1, 1],
        moe_ffn_hidden_size=64,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(
        config, spec, VOCABULARY, LENGTH, position_embedding_type="rope", parallel_output=False
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.data = drawn.bfloat16().to(dtype)  # both models have the same weights
    return model.to(torch.cuda.current_device())


def logp_of(model: GPTModel, tokens: Tensor) -> Tensor:  # [B, S] -> [B, S - 1] float32
    positions = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
    logits = model(tokens, positions, future[None, None])[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def main() -> None:
    if not parallel_state.model_parallel_is_initialized():
        one_process()
    engine, trainer = make(torch.bfloat16), make(torch.float32)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(torch.cuda.current_device())
    with torch.no_grad(), op_megatron.record(engine) as tape:
        logp_rollout = logp_of(engine, tokens)
    without = logp_of(trainer, tokens)
    with op_megatron.replay(trainer, tape.trace(), batch=BATCH, native=True) as handle:
        replayed = logp_of(trainer, tokens)
    replayed.mean().backward()  # gradients of the forward with the engine's experts
    differ = (handle.native().ids.sort(-1)[0] != handle.trace.ids.sort(-1)[0]).any(-1)
    mask = torch.ones_like(without, dtype=torch.bool)
    for name, logp in (("without replay", without), ("with replay", replayed)):
        found = op.mismatch(logp.detach(), logp_rollout, mask)
        print(f"{name:<15} k3 {found.k3:.2e}  largest difference of log p {found.max_dlogp:.3f}")
    print(f"routers that choose other experts than the engine's: {differ.float().mean():.1%}")


if __name__ == "__main__":
    main()
