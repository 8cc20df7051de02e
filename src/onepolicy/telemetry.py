"""Variables that switch off the usage reports of vLLM, Ray and huggingface_hub.

`import onepolicy` sets them before any of these packages can be imported, and child processes
inherit them. They replace values that the user exported. No setting turns the reports on.
"""

from __future__ import annotations

import os

OPT_OUT = {
    "DO_NOT_TRACK": "1",  # asked by vLLM and huggingface_hub
    "HF_HUB_DISABLE_TELEMETRY": "1",  # read when huggingface_hub is imported
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def disable_telemetry() -> None:
    """Switch off usage reports in this process and in the child processes that inherit from it."""
    os.environ.update(OPT_OUT)
