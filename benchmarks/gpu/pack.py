"""Make a folder that runs the queue for a GPU on a machine without a network: `make gpu-pack`.

    python benchmarks/gpu/pack.py            # .gpu-pack
    python3 .gpu-pack/run.py --seconds 520 --out OUT

It holds the tracked sources that the queue runs (sources.zip), wheels for Python 3.12 on Linux, and
run.py, which unpacks both and takes a wheel where its package is missing or older. The image brings
torch for its CUDA and numpy.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / ".gpu-pack"
MOST_MIB = 60
"""Of this folder and the tracked files together: what a lent machine takes in one call."""
WHEELS = (
    *("transformers", "tokenizers", "huggingface_hub", "safetensors", "regex", "pyyaml", "tqdm"),
    *("packaging", "typer", "shellingham", "click"),
    *("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "typing_extensions"),
    *("tomlkit", "rich", "markdown-it-py", "mdurl", "Pygments", "psutil"),
    *("httpx2", "httpcore2", "anyio", "h11", "idna", "truststore"),
    *("pytest", "pytest-timeout", "pluggy", "iniconfig", "hypothesis", "sortedcontainers"),
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
SOURCES = ("src", "tests", "benchmarks", "recipes", "pyproject.toml")
LEFT_OUT = "benchmarks/evidence/", "benchmarks/zero/policy/", "benchmarks/zero/study_policy/"
KEPT = "benchmarks/evidence/policies/one-of-8/"


def main() -> int:
    """Write the folder. Return 1 if it is too large to travel."""
    shutil.rmtree(PACK, ignore_errors=True)
    (PACK / "wheels").mkdir(parents=True)
    download(PACK / "wheels")
    files = tracked()
    with zipfile.ZipFile(PACK / "sources.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in filter(is_packed, files):
            archive.write(ROOT / name, name)
    (PACK / "commit.txt").write_text(commit() + "\n", encoding="utf-8")
    shutil.copy(ROOT / "benchmarks" / "gpu" / "unpack.py", PACK / "run.py")
    tree = sum((ROOT / name).stat().st_size for name in files) / 2**20
    pack = sum(path.stat().st_size for path in PACK.rglob("*") if path.is_file()) / 2**20
    print(f"{PACK.name}: {pack:.1f} MiB, with the working tree {tree + pack:.1f} of {MOST_MIB} MiB")
    print(f"there: python3 {PACK.name}/run.py --seconds 520 --out OUT")
    return int(tree + pack > MOST_MIB)


def is_packed(name: str) -> bool:
    """Return whether a tracked file is among the sources."""
    return name.startswith(SOURCES) and (name.startswith(KEPT) or not name.startswith(LEFT_OUT))


def download(folder: Path) -> None:
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", *platforms]
    command += ["-c", str(ROOT / "constraints.txt"), "-d", str(folder), *WHEELS]
    subprocess.run(command, check=True)


def tracked() -> list[str]:
    """Return the tracked files that exist, relative to the root."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def commit() -> str:
    """Return the commit, with + if tracked files differ from it."""
    words = ("git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
