"""Memory of scoring and update against trainable slots, in copies of the logits.

    python benchmarks/update_memory.py --slots 6400 12800
    python benchmarks/update_memory.py --slots 6400 --vocabulary 151936
    python benchmarks/update_memory.py --slots 6400 12800 --prompt 512

Bytes of all tensors alive at once in the second step of a real learner, less those of the model and
its optimiser: with whole logits (train.logits_chunk=0), and in chunks as a run has them. One copy
is a float32 tensor [slots, vocabulary]. The policy has two of the tiny policy's layers. Samples
have 100 trainable slots; with --prompt each group of 8 shares a prompt of that many tokens. All of
a step is one micro-batch.

The file runs on older sources too: copy it into their benchmarks/.
"""

import argparse
from dataclasses import replace

import torch
from plan import CPU, Case, PeakInside, parts, sample
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from onepolicy.models.chunk_size import slots_per_chunk
from onepolicy.models.logits_chunks import install_logits_chunks
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay.routers import bind_routers
from onepolicy.train.learner import LocalLearner
from onepolicy.train.pack import pack
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import Group, Sample

RESPONSE = 100  # trainable slots of a sample
GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[6400, 12800])
    parser.add_argument("--vocabulary", type=int, default=30_000)
    parser.add_argument("--prompt", type=int, default=1, help="tokens that a group shares")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for slots in args.slots:
        samples = slots // RESPONSE
        case = Case(samples=samples, prompt=args.prompt, response=RESPONSE, micro_batches=1)
        copy = 4 * slots * args.vocabulary
        for name, chunk in (("whole", 0), ("chunks", slots_per_chunk(None, args.vocabulary))):
            peak = peak_of(replace(case, logits_chunk=chunk), args.vocabulary)
            print(
                f"{slots} trainable slots of {samples * case.slots}, {name:6}: "
                f"{peak / 1e6:8.1f} MB, {peak / copy:.2f} copies",
                flush=True,
            )


def peak_of(case: Case, vocabulary: int) -> float:
    """Return the most bytes alive in a step beside the model and its optimiser."""
    model = build_policy(vocabulary)
    prepare_for_training(model, CPU)
    if case.logits_chunk:
        install_logits_chunks(model, case.logits_chunk)
    learner = LocalLearner(PolicyScorer(model, case.config(), routers=bind_routers(model)))
    step(learner, case)
    states = [tensor for own in learner.optimizer.state.values() for tensor in own.values()]
    held = [part for tensor in (*model.parameters(), *states) for part in parts(tensor)]
    with PeakInside(held) as peak:
        step(learner, case)
    return float(peak.peak)


def step(learner: LocalLearner, case: Case) -> None:
    groups = [group_of(learner, case, first) for first in range(0, case.samples, GROUP)]
    batch = learner.score(pack(groups))
    zeros = torch.zeros(batch.num_slots)
    learner.step(batch.replace(advantage=zeros + 1, weight=zeros + 1, keep=batch.trainable))


def group_of(learner: LocalLearner, case: Case, first: int) -> Group:
    """Return siblings whose prompts have the tokens and routes of the first one's."""
    members = range(first, min(first + GROUP, case.samples))
    samples: list[Sample] = [sample(learner, case, seed) for seed in members]
    leader = samples[0]
    for other in samples[1:]:
        other.tokens[: case.prompt] = leader.tokens[: case.prompt]
        assert other.routing is not None
        assert leader.routing is not None
        other.routing.ids[: case.prompt] = leader.routing.ids[: case.prompt]
    return Group(first, tuple(samples))


def build_policy(vocabulary: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        num_hidden_layers=2,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(config).eval()


if __name__ == "__main__":
    main()
