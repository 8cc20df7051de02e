"""Colours and bars in a terminal, plain lines in a pipe, no colour where NO_COLOR is set."""

import errno
import os
import pty
import re
import subprocess
import sys

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.process

PROGRESS = """
from onepolicy.run.train_command import terminal_progress
with terminal_progress(2) as progress:
    for step in (1, 2):
        progress.step(step, {"reward/mean": 0.5})
    progress.note("a note")
"""
AUDIT = """
import sys
from onepolicy.cli import main
sys.exit(main(["audit", "conformance/embedded_bfloat16.parquet"]))
"""
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(rb"\x1b\[[0-9;]*\b(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")


def environment(**changes):
    """Return an environment in which nothing but a change speaks of colours."""
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return kept | {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm-256color", **changes}


def in_a_terminal(code, **changes):
    """Run the code with a pseudo terminal as stdout and stderr; return what it shows."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := read(ours):
            shown += chunk
        assert process.wait() == 0, shown
    finally:
        os.close(ours)
        process.kill()
    return shown


def read(terminal):
    """Return the next bytes, none once the other side is closed."""
    try:
        return os.read(terminal, 65536)
    except OSError as error:
        if error.errno == errno.EIO:
            return b""
        raise


def in_a_pipe(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, check=True
    )
    return done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("code", [PROGRESS, AUDIT], ids=["train", "audit"])
def test_a_terminal_gets_colours_unless_no_color_is_set_and_a_pipe_plain_lines(code):
    text, shown = in_a_pipe(code), in_a_terminal(code)
    assert text
    assert b"\x1b" not in text
    assert b"\r" not in text
    assert COLOUR.search(shown)
    plain = in_a_terminal(code, NO_COLOR="1")
    assert plain
    assert not COLOUR.search(plain), plain
    if code == PROGRESS:  # steps are a bar in a terminal and lines in a pipe
        lines = text.decode().splitlines()
        assert [line.split()[:2] for line in lines] == [["step", "1"], ["step", "2"], ["a", "note"]]
        shown = ESCAPE.sub(b"", shown).decode()
        assert "━" in shown
        assert "step    1" not in shown
        assert "a note" in shown


TITLE = b"\x1b]0;PWNED"
HOSTILE = """
import json, os, sys
from pathlib import Path
from onepolicy.cli import main
os.chdir({folder!r})
name = "\\x1b]0;PWNED\\x07[/b][red]x"
ended = [main(["train", {recipe!r}, "out=" + name, "steps=1"])]
about = Path(name) / "run.json"
about.write_text(json.dumps(json.loads(about.read_text()) | {{"pressure": name}}))
Path(name + ".toml").write_bytes(Path({recipe!r}).read_bytes())
again = "of " + name
for words in (
    ["audit", name, "--out", "audited" + name], ["audit", name, name], ["eval", name],
    ["train", "--resume", name],  # has all its steps
    ["train", "--resume", name, "steps=2"], ["train", "--from", name, "out=" + again, "steps=3"],
    ["export", name, "--out", "exported" + name], ["config", name + ".toml"],
    ["eval", name, "--step", "9"],
    ["make-policy", "--out", name],
):
    ended.append(main(words))
assert ended == [0] * 4 + [2] + [0] * 4 + [2, 2], ended
"""


@pytest.mark.full
def test_a_terminal_obeys_no_name_of_a_file_or_run(recipe, tmp_path):
    shown = in_a_terminal(HOSTILE.format(folder=str(tmp_path), recipe=str(recipe)))
    assert TITLE not in shown
    assert rb"\x1b]0;PWNED\x07[/b][red]x" in shown


OTHERS = """
import os
from pathlib import Path
from onepolicy.cli import main
os.chdir({folder!r})
name = "\\x1b]0;PWNED\\x07[/b][red]x"
recipe, model, prompts = name + ".toml", name + "-model", name + ".txt"
Path(name).mkdir(parents=True)
Path(recipe).write_bytes(Path({recipe!r}).read_bytes())
Path(prompts).write_text("1+1=\\n")
ended = [main(["make-policy", "--out", model, "steps=1", "layers=1", "experts=4"])]
few, out = "rollout.sampling.max_tokens=4", "compared" + name
arms = ["--arm", "a", "--arm", "b", "optim.lr=1e-4"]
for words in (
    ["measure", model, "--prompts", prompts, "--out", "out" + name, few],
    ["plan", recipe, "--cluster", "1xH100", "--json", name + ".json"],
    ["compare", recipe, "steps=1", "--jobs", "1", "--out", out, *arms],
    ["engine", "check", model],
    ["measure", model, "--prompts", name], ["measure", name], ["plan", recipe, "--cluster", name],
    ["compare", recipe, "--arm", name], ["compare", name], ["engine", "check", name],
):
    ended.append(main(words))
assert ended == [0] * 5 + [2] * 6, ended
"""


@pytest.mark.full
def test_a_terminal_obeys_no_name_in_the_other_commands(recipe, tmp_path):
    shown = in_a_terminal(OTHERS.format(folder=str(tmp_path), recipe=str(recipe)))
    assert TITLE not in shown
    assert rb"\x1b]0;PWNED\x07[/b][red]x" in shown
