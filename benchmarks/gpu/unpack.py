"""Run the queue for a GPU from this folder, which `make gpu-pack` made. Needs torch and numpy.

    python3 run.py --seconds 520 --out OUT

All arguments are those of benchmarks/gpu/run.py, which is in sources.zip. Uses the standard library
only.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
BROUGHT = ("torch", "numpy")
"""What the image must bring: its CUDA decides about the one, its size about the other."""


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, `0.23.3` -> (0, 23, 3)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0]))


def is_wanted(wheel: Path) -> bool:
    """Return whether the wheel's package is missing here, or older."""
    name, wheels_version = wheel.name.split("-")[:2]
    try:
        return numbers(version(name)) < numbers(wheels_version)
    except PackageNotFoundError:
        return True


def main() -> int:
    """Unpack what is needed and run the queue. Return 1 if the image lacks a package."""
    lacking = [name for name in BROUGHT if find_spec(name) is None]
    if lacking:
        print(f"this Python ({sys.executable}) lacks {', '.join(lacking)}, which is not packed")
    if sys.version_info[:2] != (3, 12) or sys.platform != "linux":
        found = f"{sys.version_info[0]}.{sys.version_info[1]} on {sys.platform}"
        print(f"the wheels here are for Python 3.12 on linux, this is {found}")
        return 1
    if lacking:
        return 1
    folder = Path(tempfile.mkdtemp(prefix="onepolicy-gpu-"))
    taken = []
    for wheel in sorted((HERE / "wheels").glob("*.whl")):
        if is_wanted(wheel):
            taken.append("-".join(wheel.name.split("-")[:2]))
            zipfile.ZipFile(wheel).extractall(folder / "site")
    zipfile.ZipFile(HERE / "sources.zip").extractall(folder / "sources")
    print(f"taken from the pack: {', '.join(taken) or 'nothing'}", flush=True)
    places = [str(folder / "site"), str(folder / "sources" / "src"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    script = folder / "sources" / "benchmarks" / "gpu" / "run.py"
    commit = (HERE / "commit.txt").read_text(encoding="utf-8").strip()
    os.execv(sys.executable, [sys.executable, str(script), "--commit", commit, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
