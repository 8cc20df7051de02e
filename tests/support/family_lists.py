"""The MoE families of transformers by version, from the sources of its wheels.

    PYTHONPATH=tests python -m support.family_lists 5.24.0

writes family_lists.json, with the version downloaded. The tests compare the tables of families.py
with it, so a family is missed also where an older transformers is installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from support.families import CAUSAL_LM, discover, folder

LISTS = Path(__file__).with_suffix(".json")
_MAPPED = re.compile(r'\(\s*"(\w+)",\s*"(\w+ForCausalLM)"\s*\)')


def families_of(models: Path) -> dict[str, list[str]]:
    """Return the folders with a causal LM class and without one, and the model types that have no
    such class of their own, by the names of transformers' mapping."""
    with_lm, without = discover(models)
    sources = ((models / name / f"modeling_{name}.py").read_text("utf-8") for name in with_lm)
    classes = {name for source in sources for name in CAUSAL_LM.findall(source)}
    mapped = (models / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    start = mapped.index("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")
    pairs = _MAPPED.findall(mapped[start : mapped.index("\n)", start)])
    own = {path.parent.name for path in models.glob("*/modeling_*.py")}
    borrowing = {name for name, used in pairs if used in classes and folder(name) not in own}
    found = {"with a causal LM": with_lm, "without": without, "borrowing": borrowing}
    return {name: sorted(each) for name, each in found.items()}


def main(versions: list[str]) -> None:
    lists = {}
    for version in versions:
        with tempfile.TemporaryDirectory() as folder:
            wanted = f"transformers=={version}"
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, wanted]
            subprocess.run(pip, check=True)
            (wheel,) = Path(folder).glob("*.whl")
            zipfile.ZipFile(wheel).extractall(folder)
            lists[version] = families_of(Path(folder) / "transformers" / "models")
    LISTS.write_text(json.dumps(lists, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
