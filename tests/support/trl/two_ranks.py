"""A script for torchrun: `two_ranks.py FOLDER` trains with GRPOTrainer under DDP, on gloo.

FOLDER/log.json gets TRL's log, FOLDER/parameters_RANK.pt each process's parameters, and
FOLDER/shared_RANK.json the paths of a vLLM server's replies that its book has not sent.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import onepolicy.integrations.trl as op_trl
from onepolicy.integrations.trl.route_book import RouteBook
from onepolicy.integrations.trl.vllm_routes import watch_generation
from support.trl.tiny import CopySampler, make_trainer, parameters, train


def main(folder: Path) -> None:
    trainer = make_trainer(
        folder / "out", sampler=CopySampler(), per_device_train_batch_size=4, ddp_backend="gloo"
    )
    assert trainer.accelerator.num_processes == 2
    op_trl.attach(trainer, native_every=1, correction="tis", dump=folder / "dump")
    log = train(trainer)
    rank = trainer.accelerator.process_index
    torch.save(parameters(trainer), folder / f"parameters_{rank}.pt")
    if rank == 0:
        (folder / "log.json").write_text(json.dumps(log))
    shared = share_twice(trainer.accelerator)
    (folder / f"shared_{rank}.json").write_text(json.dumps(shared))
    dist.destroy_process_group()  # else gloo aborts a process now and then as it ends


def share_twice(accelerator: Any) -> list[Any]:
    """Return what a book has not sent after two calls that the main process's server answers."""
    book, calls = RouteBook(None, "vllm"), iter("ab")

    def generate() -> tuple[list[list[int]], list[list[int]], None]:
        if accelerator.is_main_process:
            book.add([1, 2], [3], routes=next(calls))
        return [[1, 2]], [[3]], None

    generation: Any = SimpleNamespace(accelerator=accelerator, mode="server", generate=generate)
    watch_generation(generation, book, supports=False)
    generation.generate()
    generation.generate()
    return [(path.tokens, path.prompt, path.routes) for path in book.take_routed()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
