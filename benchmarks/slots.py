"""CPU time and memory of a slot, from 1,024 slots in a micro-batch to 32,768.

    python benchmarks/slots.py                         # to 8,192 slots
    python benchmarks/slots.py --largest 32768 --vocabulary 32000
    python benchmarks/slots.py --numerics on-policy

Forward and backward of the tiny policy over packed samples of 128 slots, whose cost of a slot
should not depend on their number, and over one sample of all slots, in which attention grows with
every slot before it. CPU microseconds of this process on one thread, median of --rounds; bytes of
all tensors alive at once beside the model. The last line says from how many slots on attention to
slots further away than 128 takes longer than everything else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from replay import samples
from transformers import PreTrainedModel

from onepolicy.config.policy import PolicyConfig
from onepolicy.invariant.enable import enable_invariant
from onepolicy.models.chunk_size import slots_per_chunk
from onepolicy.models.logits_chunks import install_logits_chunks
from onepolicy.models.prepare import prepare_for_training
from onepolicy.tiny.model import make_model
from onepolicy.train.dry_run import PeakMemory
from onepolicy.train.forward import forward
from onepolicy.types import TokenBatch

CPU = torch.device("cpu")
SHORT = 128  # slots of a sample


def model_of(args: argparse.Namespace) -> PreTrainedModel:
    model = make_model(PolicyConfig(max_len=args.largest + 1), args.vocabulary)
    prepare_for_training(model, CPU)
    if args.numerics == "on-policy":
        enable_invariant(model)
    install_logits_chunks(model, slots_per_chunk(None, args.vocabulary))
    return model


def cost(model: PreTrainedModel, batch: TokenBatch, rounds: int) -> tuple[float, float]:
    """Return CPU microseconds and bytes of a slot."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        (-forward(model, batch).logp.sum()).backward()

    with PeakMemory(model.parameters()) as peak:
        step()
    taken = []
    for _ in range(rounds):
        begun = time.process_time()
        step()
        taken.append(time.process_time() - begun)
    slots = batch.num_slots
    return 1e6 * statistics.median(taken) / slots, peak.peak / slots


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--largest", type=int, default=8192, help="slots; they double from 1,024 on"
    )
    parser.add_argument("--vocabulary", type=int, default=32)
    parser.add_argument("--numerics", choices=("fast", "on-policy"), default="fast")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, slots, takes_over = model_of(args), 1024, None
    while slots <= args.largest:
        short, short_bytes = cost(model, samples(slots // SHORT, SHORT), args.rounds)
        one, one_bytes = cost(model, samples(1, slots), args.rounds)
        print(
            f"{slots} slots: samples of {SHORT} {short:.1f} us, {short_bytes / 1024:.1f} KiB "
            f"a slot; one sample {one:.1f} us, {one_bytes / 1024:.1f} KiB",
            flush=True,
        )
        if takes_over is None and one > 2 * short:
            takes_over = slots
        slots *= 2
    where = f"at {takes_over} slots" if takes_over else f"beyond {args.largest} slots"
    print(f"attention of one sample takes over {where}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
