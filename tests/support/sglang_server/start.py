"""TEST FIXTURE: start a SGLang 0.5.23 server on this CPU, with the shim. `python start.py MODEL
[--port N] [...]`.

It uses the Python of the venv that `make sglang` builds. Further arguments are SGLang's.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv-sglang" / "bin" / "python"
CPU = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-cuda-graph", "--disable-overlap-schedule"),
    *("--mem-fraction-static", "0.1", "--max-total-tokens", "16384"),
    *("--max-running-requests", "64", "--enable-return-routed-experts"),
]


def start(model, port, *extra, dtype="bfloat16", log=None):
    """Start the server and return its Popen. It is ready when /model_info answers: 20 s on a quiet
    machine, minutes on a busy one."""
    environment = os.environ | {
        "PYTHONPATH": str(HERE / "shim"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    where = ["--host", "127.0.0.1", "--port", str(port), "--model-path", str(model)]
    command = [str(PYTHON), "-m", "sglang.launch_server", *where, "--dtype", dtype, *CPU, *extra]
    how = {"start_new_session": True, "preexec_fn": end_with_parent}
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, **how)


def end_with_parent():
    """Let the kernel kill the server when this process ends, even by SIGKILL. SGLang's own child
    processes do the same."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def stop(server):
    """Stop the server and its child processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--dtype", default="bfloat16")
    arguments, rest = parser.parse_known_args()
    server = start(arguments.model, arguments.port, *rest, dtype=arguments.dtype)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(server.wait())
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        stop(server)
