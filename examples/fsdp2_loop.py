"""The GRPO loop under FSDP2: every rank samples, replays and trains its own prompts. Runs as is.

    torchrun --nproc-per-node 2 examples/fsdp2_loop.py

Routers are bound before or after `fully_shard`; a rank replays the routes of its own samples. The
correction's sums and the loss's denominator are those of the whole step, whatever the number of
ranks. On GPUs the same file uses NCCL.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import onepolicy as op

STEPS, PROMPTS, SIBLINGS, NEW, WANTED = 8, 2, 8, 12, 7  # prompts of each rank
kind, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
if kind == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(backend)
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same weights on every rank
shape = {"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
config = Qwen3MoeConfig(**shape, **heads, **experts, initializer_range=0.2)
model = Qwen3MoeForCausalLM(config).eval().to(kind)
sampler = Qwen3MoeForCausalLM(config).eval().to(kind, torch.bfloat16)
routers, sampler_routers = op.bind_routers(model), op.bind_routers(sampler)
mesh = init_device_mesh(kind, (ranks,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
tis = op.preset("tis")
torch.manual_seed(1 + rank)  # other prompts and samples on every rank


def logp_of(tokens):
    """Return the log-probability of each sampled token, [B, NEW]."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[:, -NEW:, 0]


def mean_over_ranks(value):
    """Return the mean of a number of every rank, where all have as many tokens."""
    total = torch.tensor(float(value), device=kind)
    dist.all_reduce(total)
    return float(total) / ranks


for step in range(STEPS):
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    sampler.load_state_dict(whole)  # the weight sync; copies into bfloat16
    prompts = torch.randint(1, 32, (PROMPTS, 6), device=kind).repeat_interleave(SIBLINGS, 0)
    given, lengths = torch.ones_like(prompts), {"max_new_tokens": NEW, "eos_token_id": None}
    returns = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    options = {"do_sample": True, "top_k": 0, **lengths, **returns}
    with torch.no_grad(), sampler_routers.record() as tape:
        out = sampler.generate(prompts, attention_mask=given, **options)
    tokens, response = out.sequences, out.sequences[:, -NEW:]
    traces = op.routes_of_generate(tape, tokens, given)
    routes = op.pad_routes(traces, torch.ones_like(tokens))
    chosen = torch.stack(out.logits, 1).float().log_softmax(-1).gather(-1, response[..., None])
    logp_rollout = chosen[..., 0]  # [B, NEW], as everything below
    mask = torch.ones_like(logp_rollout, dtype=torch.bool)  # no answer ends early here
    segment = torch.arange(len(tokens), device=kind).repeat_interleave(NEW)

    rewards = (response == WANTED).float().mean(1)
    groups = rewards.view(PROMPTS, SIBLINGS)  # a group is on one rank
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)

    with torch.no_grad():
        native = logp_of(tokens)
    with routers.replay(routes):
        logp = logp_of(tokens)
        logp_old = logp.detach()
        flat = (logp_old.flatten(), logp_rollout.flatten(), mask.flatten())
        part = op.partials(tis, op.slots(*flat, segment=segment))
        sums = [None] * ranks
        dist.all_gather_object(sums, part.sums)
        weight, keep, report = op.finish(tis, part, op.combine(sums))
        surrogate = (logp - logp_old).exp() * advantages.view(-1, 1)
        loss = -(weight * surrogate.flatten())[keep].sum() / report["correction/slots"]
        (loss * ranks).backward()  # FSDP2 takes the mean over ranks; the sum is meant
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    without = mean_over_ranks(op.mismatch(native, logp_rollout, mask).k3)
    replayed = mean_over_ranks(op.mismatch(logp_old, logp_rollout, mask).k3)
    reward = mean_over_ranks(rewards.mean())
    if rank == 0:
        print(f"step {step}  reward {reward:.3f}  k3 {without:.1e} without, {replayed:.1e} with")
dist.destroy_process_group()
