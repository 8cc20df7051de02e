"""One optimiser step of verl's worker on one of two gloo processes. `python -m support.verl.ranks
RANK MODEL FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed

RANKS = 2


def main(rank: int, model: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        **{"VERL_ENGINE_VENDOR": "onepolicy", "RANK": str(rank), "LOCAL_RANK": str(rank)},
        **{"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    }
    from support.verl import worker as verl

    store = f"file://{folder}/rendezvous"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    whole = verl.sample(model)
    advantages = torch.randn(whole.logp.shape, generator=torch.Generator().manual_seed(1))
    share = len(whole.logp) // RANKS
    mine = slice(rank * share, (rank + 1) * share)
    rollout, worker = whole.part(mine), verl.make_worker(model)
    old = verl.score(worker, rollout.batch())
    metrics = verl.update(worker, rollout.batch(), old, advantages[mine], samples=len(whole.logp))
    found = {name: float(value[0]) for name, value in metrics.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
