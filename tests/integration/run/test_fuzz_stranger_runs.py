"""Whole run folders as a stranger can make them, given to every command that takes one: it is used
or refused in words, runs nothing, shows nothing that lies elsewhere, and obeys no text of it."""

import os
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest

from onepolicy.cli import main
from onepolicy.config import UsageError
from onepolicy.report.run_page import write_report
from support.fuzz import HEAVY, survives
from support.small_recipe import write_recipe
from support.stranger_runs import apply, changes, remove, restore

SECRET = "zq-outside-zq"
"""Text in the files that links out of the run lead to."""
COMMANDS = ("audit", "export", "eval", "report", "compare", "resume")
READ_BY = {
    "metrics.jsonl": ("report", "compare", "resume", "audit"),
    "samples.jsonl": ("report", "resume"),
    "config.json": COMMANDS,
    "run.json": ("audit", "report", "resume"),
    "summary.json": ("report", "compare"),
    "checkpoints": ("export", "export", "resume", "eval"),
    "probes": ("audit", "report"),
}
"""File or folder of a run -> commands that read it."""


class Trap:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Refused(Exception):
    """A run folder that a command refuses in words."""


@pytest.fixture
def place(policy, tmp_path):
    """Yield a folder with a recipe and its two finished arms, in memory where the system has
    that."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=memory) as made:
        recipe = write_recipe(
            policy,
            "steps = 4",
            "train = { threads = 1 }",
            "eval = { every = 2, problems = 2, k = 2 }",
            "log = { counterfactual_every = 2, tensorboard = false }",
            folder=Path(made),
        )
        for name in ("off", "r3"):
            words = [f"replay.mode={name}", "correction.preset=recompute", "seed=0"]
            out = Path(made) / "arms" / f"{name}-seed0"
            assert main(["train", str(recipe), *words, f"out={out}"]) == 0
        yield Path(made)


def play(command, place):
    """Run the command on the run of the second arm. Return its exit status."""
    run, out = place / "arms" / "r3-seed0", str(place / "out")
    if command == "report":
        try:
            write_report(run)
        except UsageError as error:
            return check_text(str(error)) or 2
        return 0
    if command == "resume":  # whose end is a new summary and page
        remove(run / "summary.json")
    words = {
        "audit": [str(run), "--out", out],
        "export": [str(run), "--out", out],
        "eval": [str(run), "eval.problems=1", "eval.k=1"],
        "compare": [str(place / "recipe.toml"), "--out", str(place / "arms")],
        "resume": ["--resume", str(run)],
    }[command]
    return main([{"resume": "train"}.get(command, command), *words])


def check_text(text):
    assert text.replace("\n", "").isprintable()
    assert "Traceback" not in text
    assert SECRET not in text


@pytest.mark.full
@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(300, id="fast"),
        pytest.param(HEAVY, id="slow", marks=pytest.mark.slow),
    ],
)
def test_runs(place, inputs, capsys, tmp_path):
    run, outside, out = place / "arms" / "r3-seed0", place / "outside", place / "out"
    kept = (path for path in run.rglob("*") if path.name not in ("report.html", ".lock"))
    whole = {str(path.relative_to(run)): path.read_bytes() for path in kept if path.is_file()}
    shutil.copytree(run, outside)
    samples = outside / "samples.jsonl"
    samples.write_text(samples.read_text().replace('"finish": "', f'"finish": "{SECRET}'))
    sprung = tmp_path / "sprung"
    trap = pickle.dumps(Trap(sprung))

    def make(damage):
        made = changes(damage, whole)
        first = made[0][0].split("/")[0]
        return damage.random.choice(READ_BY.get(first, COMMANDS)), made

    def read(given):
        command, made = given
        capsys.readouterr()
        try:
            apply(run, made, outside, trap)
            status = play(command, place)
            check_text("".join(capsys.readouterr()))
            written = [path for path in (run / "report.html", *out.rglob("*")) if path.is_file()]
            assert not any(SECRET.encode() in path.read_bytes() for path in written)
            assert not sprung.exists()
            if status:
                raise Refused
        finally:
            remove(out)
            restore(run, made, whole)

    for command in COMMANDS[:5]:
        read((command, []))
    survives("run of a stranger", inputs, make, read, lambda _: None, Refused, between=(0.1, 0.9))
