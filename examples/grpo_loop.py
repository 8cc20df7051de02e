"""GRPO with replay and TIS in a loop of your own: transformers, torch, the library. Runs as is.

    python examples/grpo_loop.py

Prompts of several lengths are padded on the left, the update goes by micro-batches, and the sampler
is a bfloat16 copy that gets the new weights after each step. The reward is the share of one wanted
token in the response. Each line prints the gap without replay and with it.
"""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import onepolicy as op

STEPS, PROMPTS, SIBLINGS, NEW, MICRO, WANTED, PAD = 8, 4, 8, 12, 16, 7, 0
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=32,
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
model = Qwen3MoeForCausalLM(config).eval()  # no dropout: eval() is a trainer's mode too
sampler = Qwen3MoeForCausalLM(config).eval().to(torch.bfloat16)
routers, sampler_routers = op.bind_routers(model), op.bind_routers(sampler)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
tis = op.preset("tis")


def make_prompts():
    """Return ids and mask [PROMPTS * SIBLINGS, 6]: prompts of 3 to 6 tokens, padded on the left."""
    ids = torch.randint(1, 32, (PROMPTS, 6))
    mask = torch.arange(6) >= torch.tensor([0, 1, 2, 3])[:, None]
    ids = ids.masked_fill(~mask, PAD)
    return ids.repeat_interleave(SIBLINGS, 0), mask.long().repeat_interleave(SIBLINGS, 0)


def logp_of(model, tokens, mask):
    """Return the log-probability of each token but the first, [B, S - 1]."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    logits = model(input_ids=tokens, **given).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


for step in range(STEPS):
    prompts, prompt_mask = make_prompts()
    sampler.load_state_dict(model.state_dict())  # the weight sync; copies into bfloat16
    with torch.no_grad(), sampler_routers.record() as tape:
        out = sampler.generate(
            prompts,
            attention_mask=prompt_mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW,
            eos_token_id=None,
            pad_token_id=PAD,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens, response = out.sequences, out.sequences[:, -NEW:]
    traces = op.routes_of_generate(tape, tokens, prompt_mask)  # one per sample
    mask = torch.cat([prompt_mask, torch.ones_like(response)], 1)
    chosen = torch.stack(out.logits, 1).float().log_softmax(-1).gather(-1, response[..., None])
    trained = torch.zeros(len(tokens), tokens.shape[1] - 1, dtype=torch.bool)
    trained[:, -NEW:] = True  # slot t predicts token t + 1
    logp_rollout = torch.zeros(trained.shape).masked_scatter(trained, chosen[..., 0])

    rewards = (response == WANTED).float().mean(1)
    groups = rewards.view(PROMPTS, SIBLINGS)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)

    with torch.no_grad():  # the policy that was sampled, in the trainer's arithmetic
        native = logp_of(model, tokens, mask)
        with routers.replay(op.pad_routes(traces, mask)):
            logp_old = logp_of(model, tokens, mask)
    applied = op.reweight(logp_old, logp_rollout, trained, tis)  # over the whole step
    for start in range(0, len(tokens), MICRO):
        part = slice(start, start + MICRO)
        with routers.replay(op.pad_routes(traces[part], mask[part])):
            logp = logp_of(model, tokens[part], mask[part])
            surrogate = (logp - logp_old[part]).exp() * advantages.view(-1, 1)[part]
            loss = -(applied.weight[part] * surrogate)[applied.keep[part]].sum()
            (loss / applied.denominator).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    without = op.mismatch(native, logp_rollout, trained).k3
    replayed = op.mismatch(logp_old, logp_rollout, trained).k3
    print(
        f"step {step}  reward {rewards.mean():.3f}  k3 {without:.1e} without, {replayed:.1e} with"
    )
