"""`make zero`: what an agent program sampled has the bits of what is trained on.

    python benchmarks/zero/run.py [--out runs/zero] [a.b=value ...]

It trains a tiny hybrid MoE, which knows the program's conversations (conversations.py), by
recipe.toml: openai-agents plays the episodes through the gateway, and the weights change between
its turns. Every sampled token is scored anew under the weights that sampled it. The end is one
line, a page (OUT/report.html), its picture (OUT/zero.svg), and OUT/rows: every conversation, whose
tokens say which weights sampled them. Exit status 1 if a value, a route or a support differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zero.conversations import write_problems
from zero.picture import write_pages
from zero.witness import Witness

from onepolicy.build.components import Components
from onepolicy.cli.common import prepare_process
from onepolicy.config import load
from onepolicy.gateway.program_task import Programs
from onepolicy.run import loop
from onepolicy.run.hooks import build_hooks
from onepolicy.run.step import Hook
from onepolicy.run.train_command import run_to_end

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROBLEMS = 64


def readable() -> list[str]:
    """Return the folders of this Python and its packages: the program's sandbox sees them."""
    found = {Path(path).resolve() for path in (sys.prefix, sys.base_prefix, *sys.path)}
    ours = (ROOT / "src", ROOT / "tests", HERE.parent, HERE)
    return sorted(str(path) for path in found if path.exists() and path not in ours)


def play(
    out: Path, settings: Sequence[str], make_hook: Callable[[Components], Hook], witness: Witness
) -> None:
    """Train by the recipe into OUT/run, with one more hook at the end of every step's.

    witness: counts the requests.
    """
    problems = out / "problems.jsonl"
    write_problems(problems, PROBLEMS)
    command = json.dumps([sys.executable, "/program/agent.py", "{prompt}"])
    given = [
        *(f"out={out}/run", f"model.path={HERE}/policy", f"task.problems.path={problems}"),
        *(f"task.command={command}", f"task.readable={json.dumps(readable())}"),
        *(f"task.folder={HERE}/program", f"task.template={HERE}/template.jinja"),
    ]
    config = load(str(HERE / "recipe.toml"), [*given, *settings])
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(loop, "build_hooks", lambda each: [*build_hooks(each), make_hook(each)])
        )
        stack.enter_context(patch.object(Programs, "_count", witness.counting(Programs._count)))
        run_to_end(config)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/zero"), help="written anew")
    parser.add_argument("settings", nargs="*", help="of the run, a.b=value")
    return parser.parse_args()


def main() -> int:
    options, begun = read_options(), time.monotonic()
    prepare_process(1)
    out = options.out
    for old in ("run", "rows"):  # of an earlier call
        shutil.rmtree(out / old, ignore_errors=True)
    witness = Witness(out / "rows")
    play(out, options.settings, witness.watching, witness)
    counts = witness.counts
    print(f"{write_pages(out, counts)}, {time.monotonic() - begun:.0f} s in all")
    print(counts.describe())
    print(counts.line())
    return int(not counts.is_zero)


if __name__ == "__main__":
    sys.exit(main())
