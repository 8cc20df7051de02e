"""A learner rank's process under Ray."""

from __future__ import annotations

import json
import os
from contextlib import suppress

import ray

from onepolicy.no_statistics import turn_off


def process_info_json() -> str:
    """JSON: process, node and GPUs that Ray gave it."""
    context = ray.get_runtime_context()
    return json.dumps(
        {
            "pid": os.getpid(),
            "address": ray.util.get_node_ip_address(),
            "node": context.get_node_id(),
            "gpus": context.get_accelerator_ids().get("GPU", []),
        }
    )


class RankProcess:
    """A Ray actor. It is never restarted: its shards would be gone, and the run goes on from a checkpoint."""

    def __init__(self, environment: dict[str, str]) -> None:
        """environment: variables to be set before torch is imported."""
        turn_off()  # the worker's environment is that of a Ray which somebody else may have started
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.update(environment)

    def process_info_json(self) -> str:
        return process_info_json()

    def serve(self, rank: int, ranks: int, store: tuple[str, int], driver: str) -> None:
        """Be this rank of `ranks` until the run ends. store: where the ranks meet. driver: where it listens, and the
        token it wants (channel.advertised)."""
        from onepolicy.launch.rank_info import RankInfo
        from onepolicy.launch.rank_main import JOIN_LIMIT, run_rank
        from onepolicy.sync.group import join_store
        from onepolicy.train.sharded.channel import RankLost

        with suppress(RankLost):  # the driver knows, and says why
            run_rank(RankInfo(rank, ranks, 0, False), join_store(*store, JOIN_LIMIT), driver)
