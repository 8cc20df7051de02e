"""Print how many routers differ at the start under pressure, for scales and policies.

python benchmarks/evidence/calibrate.py --scales 0.05 0.1 0.2 0.45 0.6
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from run import make_policies

TASK = ("task.kind=chain", "task.ops=4", "rollout.prompts_per_step=32", "rollout.group_size=8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scales", nargs="+", default=["0.07", "0.16", "0.47", "0.6"])
    parser.add_argument("--policy", default="benchmarks/evidence/policies/one-of-8")
    options = parser.parse_args()
    make_policies(())
    print("| scale | routers | tokens | F(2) | k3 without replay | with |\n|" + " --- |" * 6)
    for scale in options.scales:
        print(row(options.policy, scale), flush=True)


def row(policy: str, scale: str) -> str:
    """Return the table's row of one scale."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured"
        command = [sys.executable, "-m", "onepolicy", "measure", policy, *TASK]
        command += ["rollout.engine.dtype=float32", "--pressure", scale, "--out", str(out)]
        subprocess.run(command, check=True, capture_output=True)
        metrics = json.loads((out / "measure.json").read_text())["metrics"]
    without, replayed = metrics["without_replay"], metrics["with_replay"]
    return (
        f"| {scale} | {without['routing/routers']:.1%} | {without['routing/tokens']:.1%} | "
        f"{without['mismatch/f2']:.2%} | {without['mismatch/k3']:.2g} | "
        f"{replayed['mismatch/k3']:.1g} |"
    )


if __name__ == "__main__":
    main()
