"""`make zero`: what an agent program sampled has the bits of what is trained on.

    python benchmarks/zero/run.py [--out runs/zero] [--policy FOLDER] [a.b=value ...]

It writes the program's conversations, warms up a tiny hybrid MoE on them (`onepolicy make-policy`),
and trains it by recipe.toml: openai-agents plays the episodes through the gateway, and the weights
change between its turns. Every sampled token is scored anew under the weights that sampled it. The
end is one line, a page (OUT/report.html), and OUT/rows: every conversation, whose tokens say which
weights sampled them. Exit status 1 if a value, a route or a support differs.
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

from zero.conversations import write_conversations, write_problems
from zero.picture import write_pages
from zero.witness import Witness

from onepolicy.build.components import Components
from onepolicy.cli.common import prepare_process
from onepolicy.config import load
from onepolicy.config.load import resolve_as
from onepolicy.config.policy import PolicyConfig
from onepolicy.gateway.program_task import Programs
from onepolicy.run import loop
from onepolicy.run.hooks import build_hooks
from onepolicy.run.make_policy import make_policy
from onepolicy.run.step import Hook
from onepolicy.run.train_command import run_to_end

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EPISODES, PROBLEMS = 300, 64
"""Worked episodes of the warm-up, and problems of the run."""
POLICY = (
    *("recurrent=3", "layers=4", "hidden_size=64", "heads=2", "kv_heads=1", "head_dim=32"),
    *("experts=8", "top_k=2", "expert_size=64", "max_len=768"),
    *("mistakes=0", "steps=700", "tokens_per_step=1024", "lr=3e-3"),
)
"""Three layers of the gated delta rule and one of attention, each with 2 of 8 experts a token."""


def readable() -> list[str]:
    """Return the folders of this Python and its packages: the program's sandbox sees them."""
    found = {Path(path).resolve() for path in (sys.prefix, sys.base_prefix, *sys.path)}
    ours = (ROOT / "src", ROOT / "tests", HERE.parent, HERE)
    return sorted(str(path) for path in found if path.exists() and path not in ours)


def make_files(out: Path) -> Path:
    """Write the conversations and make the policy of them. Return its folder."""
    path = out / "conversations.jsonl"
    print(f"writing {EPISODES} worked episodes of the program to {path}", flush=True)
    write_conversations(path, EPISODES)
    task = ["task.kind=jsonl", f"task.path={path}", "task.held_out=64"]
    return make_policy(resolve_as(PolicyConfig, {}, [*POLICY, *task]), out / "policy")


def play(
    out: Path,
    made: Path,
    settings: Sequence[str],
    make_hook: Callable[[Components], Hook],
    witness: Witness,
) -> None:
    """Train by the recipe into OUT/run, with one more hook at the end of every step's.

    made: folder of the problems and, unless the settings name another, of the policy. witness:
    counts the requests.
    """
    command = json.dumps([sys.executable, "/program/agent.py", "{prompt}"])
    given = [
        *(f"out={out}/run", f"model.path={made}/policy"),
        f"task.problems.path={made}/problems.jsonl",
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
    parser.add_argument("--out", type=Path, default=Path("runs/zero"), help="made anew")
    parser.add_argument("--policy", type=Path, help="one that an earlier call made")
    parser.add_argument("settings", nargs="*", help="of the run, a.b=value")
    return parser.parse_args()


def main() -> int:
    options, begun = read_options(), time.monotonic()
    prepare_process(1)
    out = options.out
    if options.policy is None and out.exists():
        shutil.rmtree(out)  # of an earlier call
    for old in ("run", "rows"):
        shutil.rmtree(out / old, ignore_errors=True)
    policy = options.policy or make_files(out)
    write_problems(out / "problems.jsonl", PROBLEMS)
    witness = Witness(out / "rows")
    play(out, out, [f"model.path={policy}", *options.settings], witness.watching, witness)
    counts = witness.counts
    (out / "zero.json").write_text(json.dumps(counts.as_json(), indent=1) + "\n", encoding="utf-8")
    print(f"{write_pages(out, counts)}, {time.monotonic() - begun:.0f} s in all")
    print(counts.describe())
    print(counts.line())
    return int(not counts.is_zero)


if __name__ == "__main__":
    sys.exit(main())
