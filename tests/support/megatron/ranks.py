"""A script for torchrun: `ranks.py FOLDER` tries every parallelism on two processes.

FOLDER/found_RANK.pt gets what a rank found.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core import parallel_state

from support.megatron import expert_parallel, tensor_parallel
from support.megatron.cpu import start, stop
from support.megatron.pipeline import recorded_stage, train_step

TENSOR = {"tensor_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}
VIRTUAL = PIPELINE | {"virtual_pipeline_model_parallel_size": 2}
EXPERTS = {"expert_model_parallel_size": 2}


@contextmanager
def groups(**sizes: int) -> Iterator[None]:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    yield


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    start(str(folder), rank, 2)
    found = {}
    with groups(**TENSOR):
        found["tensor"] = tensor_parallel.find(**TENSOR, sequence_parallel=True)
    with groups(**PIPELINE):
        found["pipeline"] = train_step(**PIPELINE)
        found["stage"] = recorded_stage(**PIPELINE)
    with groups(**VIRTUAL):
        found["virtual stages"] = train_step(**VIRTUAL)
    with groups(**EXPERTS):
        found["experts"] = expert_parallel.step(expert_parallel.make(**EXPERTS), rank)
    torch.save(found, folder / f"found_{rank}.pt")
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
