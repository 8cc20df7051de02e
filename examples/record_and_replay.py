"""Record the routes of one model, replay them in another, and see the gap close. Runs as it is.

    python examples/record_and_replay.py

It prints a k3 of 1.4e-3 without and 1.8e-4 with replay, 5.9% of the routes differing.
"""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import onepolicy as op

torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=32,
    initializer_range=0.2,
)
trainer = Qwen3MoeForCausalLM(config).eval()  # yours: any transformers MoE causal LM
sampler = Qwen3MoeForCausalLM(config).eval()  # your engine: same weights, other arithmetic
sampler.load_state_dict(trainer.state_dict())
sampler = sampler.to(torch.bfloat16)
tokens = torch.randint(64, (16, 65))


def logp(model):  # [16, 64]: slot t feeds tokens[:, t] and scores tokens[:, t + 1]
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].flatten()


with torch.no_grad(), op.bind_routers(sampler).record() as tape:
    logp_rollout = logp(sampler)
trace = tape.trace()  # ids [1024, 4 layers, 4 experts] uint8: which experts the sampler used

routers = op.bind_routers(trainer)  # every router, found by structure; raises if there is none
mask = torch.ones(1024, dtype=torch.bool)
with torch.no_grad(), routers.record() as tape:
    print("k3 without replay:", op.mismatch(logp(trainer), logp_rollout, mask).k3)
print("routes that differ:", op.routing_disagreement(tape.trace(), trace).routers)

with routers.replay(trace):  # these experts, the trainer's own router weights, gradients intact
    logp_old = logp(trainer)
    print("k3 with replay:", op.mismatch(logp_old, logp_rollout, mask).k3)
    applied = op.reweight(logp_old, logp_rollout, mask, op.preset("tis"))  # weight = min(rho, 2)
    loss = -(applied.weight * logp_old)[applied.keep].sum() / applied.denominator
    loss.backward()
