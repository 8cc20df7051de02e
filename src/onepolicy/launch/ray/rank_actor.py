"""The process of a learner rank under Ray."""

from __future__ import annotations

import json
import os

import ray

from onepolicy.telemetry import disable_telemetry


def process_info_json() -> str:
    """Return this process, its node and the GPUs that Ray gave it, as JSON."""
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
    """A Ray actor that runs one rank.

    Ray never restarts it: its shards would be lost, so the run resumes from a checkpoint.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        """Set the variables of `environment` before torch is imported."""
        disable_telemetry()  # this environment comes from Ray, which somebody else may have started
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.update(environment)

    def process_info_json(self) -> str:
        return process_info_json()

    def run_rank(self, rank: int, world_size: int, store: tuple[str, int]) -> None:
        """Run this rank until the run ends.

        store: host and port of the store that the ranks share.
        """
        from onepolicy.launch.ranks import run_placed_rank

        run_placed_rank(rank, world_size, store)
