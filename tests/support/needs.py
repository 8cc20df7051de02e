"""System programs that tests drive, and the Debian package that brings each."""

import shutil

import pytest

PACKAGES = {
    "bwrap": "bubblewrap",
    "chromium": "chromium",
    "g++": "g++",
    "ip": "iproute2",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}


def need(*programs):
    """Skip the running test where one of these programs is missing; for use in fixtures."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        packages = " ".join(PACKAGES[program] for program in missing)
        pytest.skip(f"needs {' and '.join(missing)}: apt install {packages}")
