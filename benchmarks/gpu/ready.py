"""What an image lacks for the tests and benchmarks of a GPU. Imports the standard library only."""

from __future__ import annotations

from importlib.util import find_spec

NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "pydantic": "pydantic",
    "tomlkit": "tomlkit",
    "rich": "rich",
    "safetensors": "safetensors",
    "numpy": "numpy",
    "httpx2": "httpx2",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
}
"""Package -> module that it brings."""


def problems() -> list[str]:
    """Return a line for every package that is missing."""
    missing = [package for package, module in NEEDED.items() if find_spec(module) is None]
    if not missing:
        return []
    return [
        f"missing here: {', '.join(missing)}",
        "where there is a network: make gpu-wheels; here: python3 -m pip install --no-index "
        "--no-deps --target /tmp/site .gpu-wheels/*.whl && export PYTHONPATH=/tmp/site",
    ]
