"""Scripts of this folder in processes of their own, whose packages are those of the test."""

from __future__ import annotations

import os
import subprocess
import sys

from support.paths import ROOT


def run_script(name: str, *arguments: object, ranks: int = 0) -> None:
    """Run a script to its end. ranks: processes that torchrun makes of it, with a thread each."""
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable]
    if ranks:
        environment["OMP_NUM_THREADS"] = "1"
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(ROOT / "tests" / "support" / name), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
