"""A script for torchrun: `two_ranks.py FOLDER` trains with GRPOTrainer under DDP, on gloo.

FOLDER/log.json gets TRL's log, FOLDER/parameters_RANK.pt each process's parameters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import onepolicy.integrations.trl as op_trl
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
    dist.destroy_process_group()  # else gloo aborts a process now and then as it ends


if __name__ == "__main__":
    main(Path(sys.argv[1]))
