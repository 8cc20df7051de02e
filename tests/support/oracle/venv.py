"""The Python of the oracle venv, and the folder of the scripts that it runs."""

from pathlib import Path

from support.paths import ROOT

PYTHON = ROOT / ".venv-oracle" / "bin" / "python"
SCRIPTS = Path(__file__).parent
