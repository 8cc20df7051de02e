"""Memory of scoring and update against trainable slots, in copies of the logits.

    python benchmarks/update_memory.py --slots 6400 12800
    python benchmarks/update_memory.py --slots 6400 --vocabulary 151936

Bytes of all tensors alive at once in the second step of a real learner, less those of the model and
its optimiser: with whole logits (train.logits_chunk=0), and in chunks as a run has them. One copy
is a float32 tensor [slots, vocabulary]. The policy has two of the tiny policy's layers.
"""

import argparse
from dataclasses import replace

import torch
from plan import CPU, Case, PeakInside, parts, step
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from onepolicy.models.chunk_size import slots_per_chunk
from onepolicy.models.logits_chunks import install_logits_chunks
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay.routers import bind_routers
from onepolicy.train.learner import LocalLearner
from onepolicy.train.scorer import PolicyScorer

RESPONSE = 100  # slots of a sample, all of them trainable


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[6400, 12800])
    parser.add_argument("--vocabulary", type=int, default=30_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for slots in args.slots:
        case = Case(samples=slots // RESPONSE, prompt=1, response=RESPONSE, micro_batches=1)
        copy = 4 * slots * args.vocabulary
        for name, chunk in (("whole", 0), ("chunks", slots_per_chunk(None, args.vocabulary))):
            peak = peak_of(replace(case, logits_chunk=chunk), args.vocabulary)
            print(f"{slots} slots, {name:6}: {peak / 1e6:8.1f} MB, {peak / copy:.2f} copies")


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
