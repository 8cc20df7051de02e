"""Write a dump of your own trainer and let `onepolicy audit` judge it. Runs as is.

    python examples/audit_dump.py [FOLDER]

Two dumps of the same model: one whose trainer scores as the engine sampled, and one whose trainer
forgot the temperature of 0.7. The first verdict is about the gap, the second names the bug. The
same from a shell: `onepolicy audit FOLDER/forgotten.jsonl`.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from onepolicy.audit.run import audit

SAMPLES, PROMPT, NEW, TEMPERATURE = 64, 4, 24, 0.7
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
trainer = Qwen3MoeForCausalLM(config).eval()
engine = Qwen3MoeForCausalLM(config).eval()
engine.load_state_dict(trainer.state_dict())
engine = engine.to(torch.bfloat16)


@torch.no_grad()
def sample(prompts):
    """Return tokens [B, S] and the engine's log-probabilities of the new ones [B, NEW]."""
    out = engine.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        max_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
        output_scores=True,  # behind the temperature: what the tokens were drawn from
        return_dict_in_generate=True,
    )
    scores = torch.stack(out.scores, 1).float().log_softmax(-1)
    return out.sequences, scores.gather(-1, out.sequences[:, PROMPT:, None])[..., 0]


@torch.no_grad()
def score(tokens, temperature):
    """Return the trainer's log-probabilities and entropies of the new tokens, [B, NEW] each."""
    logits = trainer(input_ids=tokens[:, :-1], use_cache=False).logits[:, PROMPT - 1 :].float()
    logp = (logits / temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, tokens[:, PROMPT:, None])[..., 0], entropy


def write(path, tokens, columns):
    """Write one line per sample; entry t of every list belongs to tokens[t]."""
    before = [0.0] * PROMPT  # the mask leaves the prompt out: these may be anything
    with path.open("w") as file:
        for i, row in enumerate(tokens.tolist()):
            lists = {name: before + values[i].tolist() for name, values in columns.items()}
            mask = [0] * PROMPT + [1] * NEW
            file.write(json.dumps({"tokens": row, "mask": mask, "step": 0, **lists}) + "\n")


folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
folder.mkdir(parents=True, exist_ok=True)
tokens, logp_rollout = sample(torch.randint(64, (SAMPLES, PROMPT)))
for name, temperature in (("right", TEMPERATURE), ("forgotten", 1.0)):
    logp_trainer, entropy = score(tokens, temperature)
    sides = {"logp_rollout": logp_rollout, "logp_trainer": logp_trainer, "entropy": entropy}
    write(folder / f"{name}.jsonl", tokens, sides)
    verdict = audit(folder / f"{name}.jsonl", {}).verdict
    print(f"{name}: {verdict.action}\n{verdict.text()}\n")
