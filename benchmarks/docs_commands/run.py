"""Execute the commands of README and guides, on small stand-ins, and keep what came out.

    PYTHONPATH=tests python benchmarks/docs_commands/run.py     # all: an hour of a busy machine
    ... --only plan                                             # those with this text in them
    ... --failed                                                # those that failed, and new ones

commands.toml says what is changed in each, which ones are not run here, and why. log.json gets the
command, the pages that print it, what was run, its exit status, seconds and last line. One command
runs at a time, each in a process of its own, in a folder that stand_ins.py fills. Those that only
need this Python are forked from this process (forked.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from forked import load, run_forked
from rules import LOG, RULES, as_run
from server import Server, free_port

from support.doc_commands import commands_of_guides

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 600
"""Seconds that a command may take."""
WHEEL = ("onepolicy", "/path/to/clone", "/path/to/onepolicy", ".")
"""What the pages install; here it is the wheel of this tree."""
RUNS = ("RUN", "runs/RUN")
ALONE = ("kind=vllm ", "--engine vllm ", "train.ranks", "compare", "--restarts")
"""What starts processes of its own, so it begins in a fresh one."""


class Outcome(NamedTuple):
    """What a command did."""

    status: int
    seconds: float
    last: str  # line of its output


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="commands with this text in them")
    parser.add_argument("--failed", action="store_true", help="commands without a good outcome")
    parser.add_argument("--folder", type=Path, help="prepared before, or becomes it now")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="docs-commands-"))
    runner = Runner(folder.resolve())
    try:
        runner.run(arguments.only, failed=arguments.failed)
    finally:
        runner.stop()


class Runner:
    """Runs commands in a prepared folder and keeps their outcomes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.port = free_port()
        self.server: Server | None = None
        self.environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "WANDB_MODE": "offline",
            "OMP_NUM_THREADS": "1",
        }
        self.log: dict[str, dict[str, Any]] = {}
        if LOG.exists():
            self.log = {each["command"]: each for each in json.loads(LOG.read_text())}
        if not all((folder / run).exists() for run in RUNS):
            self.prepare()

    def prepare(self) -> None:
        """Fill the folder, and train the run that commands resume, judge and export."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        code = "import sys, pathlib, stand_ins; stand_ins.prepare(pathlib.Path(sys.argv[1]))"
        environment = self.environment | {"PYTHONPATH": f"{ROOT / 'src'}:{HERE}"}
        command = [sys.executable, "-c", code, str(self.folder)]
        subprocess.run(command, check=True, env=environment)
        load()
        for run in RUNS:
            outcome = self.execute(f"onepolicy train RECIPE out={run}")
            assert outcome.status == 0, outcome.last

    def run(self, only: str, *, failed: bool) -> None:
        """Run the commands in the order of commands.toml; write the log after each."""
        load()
        pages = {" ".join(words): found for words, found in commands_of_guides().items()}
        for line, rule in RULES["run"].items():
            known = self.log.get(line)
            good = known is not None and known["status"] == rule.get("status", 0)
            if only not in line or (failed and good and not rule.get("serves")):
                continue
            ran = as_run(line, rule)
            if rule.get("serves"):
                outcome = self.serve(ran)
            else:
                outcome = self.execute(ran, rule.get("status", 0))
            self.log[line] = {
                **{"command": line, "pages": pages[line], "ran": ran},
                **{"status": outcome.status, "seconds": round(outcome.seconds, 1)},
                "last": outcome.last,
            }
            print(f"{outcome.status:3} {outcome.seconds:6.1f} s  {line[:90]}", flush=True)
            kept = [self.log[each] for each in RULES["run"] if each in self.log]
            LOG.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    def execute(self, ran: str, expected: int = 0) -> Outcome:
        """Run one command to its end. expected: the exit status that is no mistake."""
        words = self.words(ran)
        for place, word in enumerate(words):
            if word == "--out" and not words[place + 1].startswith("runs/"):
                shutil.rmtree(self.folder / words[place + 1], ignore_errors=True)
        start = time.monotonic()
        output = self.folder / "output.txt"
        if words[0] == "onepolicy" and not any(word in f"{ran} " for word in ALONE):
            status = run_forked(words[1:], self.folder, self.environment, output, LIMIT)
        else:
            status = self.execute_alone(words, output)
        seconds = time.monotonic() - start
        text = output.read_text(errors="replace")
        if status not in (0, expected) or not text.strip():
            text = Path(f"{output}.err").read_text(errors="replace")
        return Outcome(status, seconds, self.last_line(text))

    def execute_alone(self, words: list[str], output: Path) -> int:
        """Run a program in a process that it loads itself."""
        program = str(shutil.which(words[0], path=self.environment["PATH"]))
        with output.open("w") as out, Path(f"{output}.err").open("w") as err:
            process = subprocess.Popen(
                [program, *words[1:]],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                return process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return 124

    def last_line(self, text: str) -> str:
        """Return the last line that says something, without this machine's folders."""
        lines = [line.strip() for line in text.splitlines() if any(c.isalnum() for c in line)]
        line = " ".join(lines[-1:]).replace(str(self.folder), "FOLDER").replace(str(ROOT), "ROOT")
        return line[:160]

    def words(self, line: str) -> list[str]:
        """Return the words of a command with this machine's port and wheel."""
        url = f"http://127.0.0.1:{self.port}"
        found = []
        for word in line.split():
            for address in ("http://127.0.0.1:8000", "URL"):
                word = word.replace(address, url)
            name, bracket, extras = word.partition("[")
            if line.startswith("pip ") and name in WHEEL:
                [wheel] = (self.folder / "wheels").glob("*.whl")
                word = f"{wheel}{bracket}{extras}"
            if word == "8000":
                word = str(self.port)
            found.append(word)
        if line.startswith("pip "):
            found = [word for word in found if word != "-e"]
            found[2:2] = ["--dry-run"]
        return found

    def serve(self, ran: str) -> Outcome:
        """Start a server, which answers the commands after it, and wait until it is ready."""
        start = time.monotonic()
        self.server = Server(self.words(ran), self.folder, self.environment)
        status, last = self.server.wait(LIMIT)
        return Outcome(status, time.monotonic() - start, last)

    def stop(self) -> None:
        """Stop the server."""
        if self.server is not None:
            self.server.stop()


if __name__ == "__main__":
    main()
