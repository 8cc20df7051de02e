"""Switch off what vLLM, Ray and the model hub's client report about their users.

`import onepolicy` does it, before any of them can be imported, and processes that we start inherit it. A value that
was exported does not win, and there is no setting to turn reports on.
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
    """In this process, and in all that it starts with its own environment."""
    os.environ.update(OPT_OUT)
