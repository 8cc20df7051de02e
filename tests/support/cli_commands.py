"""Commands of the command line, one after another in one process of their own."""

import json
import os
import subprocess
import sys
from typing import NamedTuple

from support.paths import ROOT

RUN = """
import contextlib, io, json, sys
{before}
from onepolicy.cli import main
seen = set()
for words in json.load(sys.stdin):
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try: status = main(words)
        except SystemExit as end: status = end.code
        except Exception as error: status = type(error).__name__
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    loaded = set(sys.modules) & {{"torch", "transformers"}} - seen
    seen |= loaded
    print(json.dumps([status, *texts, sorted(loaded)]), flush=True)
"""


class Ended(NamedTuple):
    """A command's exit status (an exception's name if it raised one), what it printed, and which of
    torch and transformers it loaded that none before it had."""

    status: int | str
    out: str
    err: str
    loaded: list[str]


def run_commands(commands, folder, *, before="", first_on_path=()):
    """Run the commands in `folder`, which has the cache too. `before`: code that runs first."""
    path = os.pathsep.join(map(str, [*first_on_path, ROOT / "src"]))
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(before=before)],
        input=json.dumps([list(words) for words in commands]),
        env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache")},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = [Ended(*json.loads(line)) for line in done.stdout.splitlines()]
    assert len(found) == len(commands)
    return found
