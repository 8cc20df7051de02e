"""What a worker says of itself."""

from __future__ import annotations

import json
import os

import ray


def about() -> str:
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
