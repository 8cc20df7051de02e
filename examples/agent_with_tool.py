"""GRPO on episodes of several turns with a calculator, with replay over the whole path. Runs as is.

    python examples/agent_with_tool.py

A turn ends at "=". What stands before it goes to the calculator, whose reply is appended as tokens.
The reward is the share of turns that the calculator could read. Each turn feeds the path anew, and
a token keeps the routes of the forward that first fed it.
"""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import onepolicy as op
from onepolicy.envs.tools.calculator import calculate

STEPS, PROBLEMS, SIBLINGS, TURNS, NEW = 8, 2, 8, 2, 4
LETTERS = "_0123456789+-*()=?"  # "_" only pads
END = LETTERS.index("=")
torch.manual_seed(0)
shape = {"vocab_size": len(LETTERS), "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
config = Qwen3MoeConfig(**shape, **heads, **experts, initializer_range=0.2)
model = Qwen3MoeForCausalLM(config).eval()
sampler = Qwen3MoeForCausalLM(config).eval().to(torch.bfloat16)
routers, sampler_routers = op.bind_routers(model), op.bind_routers(sampler)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
tis = op.preset("tis")


def encode(text):
    return [LETTERS.index(letter) for letter in text if letter in LETTERS]


def call_tool(turn):
    """Return the reply to a turn, and whether the calculator could read it."""
    text = "".join(LETTERS[token] for token in turn)
    reply = calculate(text.removesuffix("="))
    understood = text.endswith("=") and not reply.startswith("error")
    return encode(reply[:3] if understood else "?"), float(understood)


@torch.no_grad()
def play(prompt):
    """Return tokens [S], routes of S - 1 rows, log-probabilities and mask [S - 1], and the reward.

    Entry t of the last two belongs to the prediction of tokens[t + 1].
    """
    tokens, routes, read = encode(prompt), [], 0.0
    logp, mask = [0.0] * len(tokens[1:]), [False] * len(tokens[1:])
    for last in [False] * (TURNS - 1) + [True]:
        lengths = {"max_new_tokens": NEW, "eos_token_id": END, "pad_token_id": 0}
        returns = {"output_logits": True, "return_dict_in_generate": True}
        path, given = torch.tensor([tokens]), torch.ones(1, len(tokens), dtype=torch.long)
        options = {"do_sample": True, "top_k": 0, **lengths, **returns}
        with sampler_routers.record() as tape:
            out = sampler.generate(path, attention_mask=given, **options)
        turn = out.sequences[0, len(tokens) :].tolist()
        trace = op.routes_of_generate(tape, out.sequences, given)[0]
        routes.append(trace.rows(sum(map(len, routes)), len(trace)))  # only what is new
        chosen = torch.cat(out.logits).float().log_softmax(-1)
        reply, understood = call_tool(turn)
        reply = [] if last else reply
        logp += [*chosen[range(len(turn)), turn].tolist(), *([0.0] * len(reply))]
        mask += [True] * len(turn) + [False] * len(reply)  # the tool's words are not trained on
        tokens, read = tokens + turn + reply, read + understood
    return tokens, op.RoutingTrace.concat(routes), logp, mask, read / TURNS


def logp_of(tokens):
    """Return the log-probability of each token but the first, [S - 1]."""
    logits = model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).logits[0].float()
    return logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]


for step in range(STEPS):
    sampler.load_state_dict(model.state_dict())
    asked = [f"{torch.randint(10, ()).item()}+{torch.randint(10, ()).item()}?" for _ in "ab"]
    episodes = [play(prompt) for prompt in asked for _ in range(SIBLINGS)]
    groups = torch.tensor([e[4] for e in episodes]).view(PROBLEMS, SIBLINGS)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    rollout, masks = ([torch.tensor(e[part]) for e in episodes] for part in (2, 3))
    with torch.no_grad():
        native = [logp_of(e[0]) for e in episodes]
    new = []
    for tokens, trace, *_ in episodes:
        with routers.replay(trace):
            new.append(logp_of(tokens))
    old = [logp.detach() for logp in new]
    applied = op.reweight(old, rollout, masks, tis)
    for i, advantage in enumerate(advantages.flatten()):
        surrogate = applied.weight[i] * (new[i] - old[i]).exp() * advantage
        (-surrogate[applied.keep[i]].sum() / applied.denominator).backward()
    optimizer.step()
    optimizer.zero_grad()
    without, replayed = (op.mismatch(side, rollout, masks).k3 for side in (native, old))
    reward = groups.mean()
    print(f"step {step}  reward {reward:.3f}  k3 {without:.1e} without, {replayed:.1e} with")
