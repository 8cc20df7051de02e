"""A type checker finds a user's mistakes: the package is marked as typed, and its public names
have real types."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import onepolicy

CORRECT_FILE = """\
import torch
from torch import Tensor, nn

import onepolicy as op


def step(model: nn.Module, ids: Tensor, logp_rollout: Tensor, mask: Tensor) -> dict[str, float]:
    routers: op.Routers = op.bind_routers(model)
    with torch.no_grad(), routers.record() as tape:
        model(ids)
    trace: op.RoutingTrace = tape.trace()
    with routers.replay(trace) as replayed:
        logp_new: Tensor = model(ids)
    op.check_alignment(replayed.trace, trace)

    correction: op.CorrectionConfig = op.preset("tis")
    applied = op.reweight(logp_new.detach(), logp_rollout, mask, correction)
    weight: Tensor = applied.weight
    loss: Tensor = -(applied.keep * weight * logp_new).sum() / applied.denominator

    k3: float = op.mismatch(logp_new.detach(), logp_rollout, mask).k3
    if op.diagnose(logp_new.detach(), logp_rollout, mask).bug:
        raise op.UsageError(f"k3 is {k3}")
    return {**applied.report, "loss": float(loss)}


def step_of_lists(old: list[Tensor], rollout: list[Tensor], mask: list[Tensor]) -> list[Tensor]:
    weights: list[Tensor] = op.reweight(old, rollout, mask, op.preset("tis")).weight
    return weights


def step_in_parts(old: Tensor, rollout: Tensor, mask: Tensor, segment: Tensor) -> Tensor:
    correction = op.preset("tis")
    part = op.partials(correction, op.slots(old, rollout, mask, segment=segment))
    weight, keep, report = op.finish(correction, part, op.combine([part.sums]))
    return weight * keep * report["correction/slots"]
"""
MISTAKES = (
    ("applied.weight\n", "applied.weights\n", "attr-defined"),
    ("op.mismatch(", "op.missmatch(", "attr-defined"),
    ('rollout, mask, op.preset("tis"))', 'rollout, mask, "tis")', "call-overload"),
)
"""The correct text, the mistake in its place, and the code of mypy's error."""
SEARCH_PATHS = ("PYTHONPATH", "MYPYPATH")
ERROR = re.compile(r"(?P<file>\w+\.py):(?P<line>\d+): error: .*\[(?P<code>[\w-]+)\]")


def environment_with_the_package(folder: Path) -> Path:
    """Return the Python of a new environment that has a copy of the package and borrows its
    dependencies.

    A copy, because an editable install elsewhere on the path would stand in for one that is not
    marked as typed.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    output = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
    site = Path(output.stdout.strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    shutil.copytree(
        Path(onepolicy.__file__).parent,
        site / "onepolicy",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return python


def strict_mypy(folder: Path, *files: str) -> list[tuple[str, int, str]]:
    """Return file, line and code of every error that `mypy --strict` finds as a user would run it.

    It costs half a minute of CPU: the cache is in `folder`, so mypy reads the types of torch anew.
    """
    python = environment_with_the_package(folder / "environment")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    result = subprocess.run(
        [*command, "--cache-dir", str(folder / "cache"), *files],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in SEARCH_PATHS},
        capture_output=True,
        text=True,
    )
    assert result.returncode in (0, 1), result.stdout + result.stderr
    errors = [ERROR.fullmatch(line) for line in result.stdout.splitlines() if ": error: " in line]
    assert None not in errors, result.stdout
    return [(found["file"], int(found["line"]), found["code"]) for found in errors if found]


@pytest.mark.full
@pytest.mark.process
def test_a_type_checker_finds_three_mistakes_and_nothing_else(tmp_path):
    text, expected = CORRECT_FILE, []
    for right, wrong, code in MISTAKES:
        assert text.count(right) == 1
        line = text[: text.index(right)].count("\n") + 1
        expected.append(("wrong.py", line, code))
        text = text.replace(right, wrong)
    (tmp_path / "right.py").write_text(CORRECT_FILE)
    (tmp_path / "wrong.py").write_text(text)
    assert sorted(strict_mypy(tmp_path, "right.py", "wrong.py")) == sorted(expected)
