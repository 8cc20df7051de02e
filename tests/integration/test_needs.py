"""Tests whose system program is missing, and the installation of such programs."""

import os
import shutil
import subprocess
import sys

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.process
TESTS = ROOT / "tests"
ASKS = """
import pytest
from support.needs import need

@pytest.mark.needs("chromium")
def test_marked(): pass

@pytest.fixture
def browser(): need("bwrap")

def test_in_a_fixture(browser): pass

@pytest.mark.skipif(True, reason="no .venv-sglang")
def test_left_out(): pass

@pytest.mark.skipif(True, reason="this processor has no AVX-512")
def test_of_a_processor(): pass

@pytest.mark.xfail
def test_expected(): assert False

def test_plain(): pass
"""
SKIPS_ITSELF = 'import pytest\npytest.importorskip("no_such_package")\ndef test_it(): pass'


def tried(folder, ci):
    """Return the output and status of pytest on these files, under the hooks of
    tests/conftest.py."""
    shutil.copy(TESTS / "conftest.py", folder)
    (folder / "test_asks.py").write_text(ASKS, encoding="utf-8")
    (folder / "test_skipped.py").write_text(SKIPS_ITSELF, encoding="utf-8")
    environment = os.environ | {"CI": ci, "PATH": "/nowhere", "PYTHONPATH": str(TESTS)}
    options = ["-rs", "-p", "no:cacheprovider", "-c", "/dev/null"]
    options.append("--continue-on-collection-errors")
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout, done.returncode


@pytest.mark.full
def test_a_missing_program_is_skipped_with_its_package(tmp_path):
    said, status = tried(tmp_path, "")
    assert status == 0, said
    assert "1 passed, 5 skipped, 1 xfailed" in said
    assert "needs chromium: apt install chromium" in said
    assert "needs bwrap: apt install bubblewrap" in said


@pytest.mark.full
def test_in_ci_it_fails_as_does_a_file_that_skips_itself(tmp_path):
    said, status = tried(tmp_path, "true")
    assert status == 1, said
    assert said.count("skipped in CI, where nothing may be missing") == 4
    assert "skipped in CI, where nothing may be missing: could not import" in said
    assert "1 passed, 1 skipped, 1 xfailed" in said


def script(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    """Return a PATH with only a shell and an apt-get that logs its arguments."""
    (tmp_path / "sh").symlink_to("/bin/sh")
    (tmp_path / "env").symlink_to(shutil.which("env"))
    script(tmp_path, "apt-get", f'echo "$@" >> {tmp_path}/asked')
    return tmp_path


def ran(machine):
    command, path = ["/bin/sh", TESTS / "system.sh"], {"PATH": str(machine)}
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    asked = machine / "asked"
    return done.stdout, asked.read_text(encoding="utf-8") if asked.exists() else ""


def test_root_installs_missing_programs(machine):
    script(machine, "id", "echo 0")
    script(machine, "setpriv", "")
    _, asked = ran(machine)
    assert asked.splitlines()[0] == "update -qq"
    assert asked.splitlines()[1].endswith(" chromium bubblewrap")


def test_sudo_without_a_password_installs_too(machine):
    script(machine, "id", "echo 1000")
    script(machine, "sudo", 'shift; exec "$@"')
    script(machine, "true", "")
    _, asked = ran(machine)
    assert asked.splitlines()[1].endswith(" chromium bubblewrap util-linux")


def test_an_ordinary_user_gets_a_message(machine):
    script(machine, "id", "echo 1000")
    said, asked = ran(machine)
    assert asked == ""
    assert "Not installed: chromium bubblewrap util-linux." in said


def test_a_failing_apt_get_ends_nothing(machine):
    script(machine, "id", "echo 0")
    script(machine, "apt-get", "exit 100")
    said, _ = ran(machine)
    assert "apt-get failed" in said


def test_nothing_is_done_where_nothing_is_missing(machine):
    for name in ("chromium", "bwrap", "setpriv"):
        script(machine, name, "")
    assert ran(machine) == ("", "")
