"""Interaction scaling through an agent program: turn budgets of 4 and 32 under routing pressure.

    python benchmarks/zero/study.py             # plays every run that study.jsonl does not have
    python benchmarks/zero/study.py --table     # what came out

study.toml has the settings and the rules, fixed before the first run. A run is a budget, an arm and
a seed. What it measured is one line of study.jsonl, in the tree: stop the script at any time and
start it again. `--policy FOLDER` makes the policy anew (that of the tree made the runs).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evidence import run, trials
from evidence.drop_supports import dropped_supports
from evidence.run import block_mean
from json_lines import appending
from zero import conversations
from zero.run import readable

from onepolicy.config import load
from onepolicy.config.load import resolve_as
from onepolicy.config.policy import PolicyConfig
from onepolicy.gateway.rendering import Renderer
from onepolicy.interfaces import Progress
from onepolicy.run.train import start_run
from onepolicy.tiny import model as tiny

HERE = Path(__file__).resolve().parent
RECIPE, RESULTS, POLICY = HERE / "study.toml", HERE / "study.jsonl", HERE / "study_policy"
PLAN = tomllib.loads((HERE / "study_plan.toml").read_text(encoding="utf-8"))
SHOWN = ("reward", "k3", "routers", "entropy", "grad_norm")
CURVES = {name: run.CURVES[name] for name in SHOWN} | {"paths": "program/paths"}
"""Name -> metric, the last: conversations of an episode."""
BLOCKS = 4  # a run's curves are means of quarters
NAMES = ("budget", "arm", "seed")
Line = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run of the study."""

    budget: str
    arm: str
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.budget, self.arm, self.seed

    @property
    def settings(self) -> list[str]:
        """Return the settings beside study.toml, the later ones last."""
        pressure = f"rollout.pressure.seed={1000 + self.seed}"
        seeds = [f"seed={self.seed}", pressure]
        return [*PLAN["budgets"][self.budget]["settings"], *PLAN["arms"][self.arm], *seeds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="print what came out, and play none")
    parser.add_argument("--policy", type=Path, metavar="FOLDER", help="make the policy, play none")
    parser.add_argument("--seeds", nargs="+", type=int, help="(default: the registered ones)")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("runs/zero-study"), help="run folders")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"(default: {RESULTS.name})")
    parser.add_argument("--again", action="store_true", help=trials.AGAIN)
    options = parser.parse_args()
    if options.policy is not None:
        make_policy(options.policy)
    elif options.table:
        print(table(finished(options.results)))
    else:
        registered = options.results.resolve() == RESULTS
        if registered or not options.again:
            seeds = PLAN["seeds"]
            trials.refuse_pilots(parser, "the study", options.seeds, seeds, registered=registered)
        play_all(options)


def play_all(options: argparse.Namespace) -> None:
    """Play the runs that are not in the results yet."""
    with appending(options.results) as append:
        done = {tuple(line[name] for name in NAMES) for line in finished(options.results)}
        jobs = [job for job in planned(options.seeds) if job.key not in done]
        print(f"{len(jobs)} runs to play, {len(done)} lines in {options.results}", flush=True)
        for line in trials.played(partial(play, out=options.out), jobs, options.workers):
            append(line)
            print(line["budget"], line["arm"], line["seed"], f"{line['seconds']} s",
                  line["curves"]["reward"], line["error"] or "", flush=True)  # fmt: skip


def planned(seeds: Sequence[int] | None = None) -> Iterator[Job]:
    """Yield the runs seed by seed, so that what has finished is paired."""
    for seed in seeds or planned_seeds():
        for budget in PLAN["budgets"]:
            for arm in PLAN["arms"]:
                yield Job(budget, arm, seed)


def planned_seeds() -> range:
    return range(PLAN["seeds"][0], PLAN["seeds"][1] + 1)


def finished(results: Path) -> list[Line]:
    """Return the lines of a file, all of the plan, the recipe and the policy of now."""
    lines = trials.finished(results, NAMES)
    for line in lines:
        trials.refuse_other(results, line, digest(), NAMES)
    return lines


def digest() -> str:
    return trials.digest_of(PLAN, RECIPE, POLICY)


def play(job: Job, out: Path) -> Line:
    """Train one run in this process, on one thread, and return its line of the results."""
    folder = out / f"{job.budget}-{job.arm}-{job.seed}"
    problems = out / f"problems-{job.budget}-{job.arm}-{job.seed}.jsonl"
    budget = PLAN["budgets"][job.budget]
    conversations.write_problems(problems, budget["problems"], budget["digits"])
    command = json.dumps([sys.executable, "-I", "-S", "/program/plain.py", "{prompt}"])
    given = [
        *(f"out={folder}", f"model.path={POLICY}", f"task.problems.path={problems}"),
        *(f"task.command={command}", f"task.readable={json.dumps(readable())}"),
        *(f"task.folder={HERE}/program", f"task.template={HERE}/template.jinja"),
    ]
    line: Line = {"budget": job.budget, "arm": job.arm, "seed": job.seed}
    line |= {"settings": job.settings, "commit": trials.commit(), "digest": digest()}

    def train() -> None:
        with supports_of(job.arm):
            start_run(load(str(RECIPE), [*given, *job.settings]), Progress())

    return line | measured(trials.trained(line, folder, train))


def supports_of(arm: str) -> AbstractContextManager[None]:
    """Return the context that a run of this arm trains in."""
    if arm in PLAN["drop_supports"]["arms"]:
        return dropped_supports()
    return nullcontext()


def measured(rows: list[Line]) -> Line:
    """Return a run's curves as means of quarters."""
    steps = trials.steps_of(rows)
    blocks = trials.blocks_of(steps, BLOCKS)
    return {
        "steps": len(steps),
        "curves": {
            name: [block_mean(block, metric) for block in blocks] for name, metric in CURVES.items()
        },
    }


def fails(line: Line) -> bool:
    """Return whether a run ended with an error, or with a reward that is not above its start's."""
    return line["error"] is not None or last(line) <= line["curves"]["reward"][0]


def last(line: Line) -> float:
    """Return the mean reward of the last quarter; 0 of a run that ended with an error."""
    if line["error"] is not None:
        return 0.0
    return float(line["curves"]["reward"][-1])


def sign_flips(gaps: Sequence[float]) -> float:
    """Return the exact two-sided p of a mean of paired differences, over all flips of signs."""
    flips = itertools.product((1, -1), repeat=len(gaps))
    sums = [abs(sum(s * gap for s, gap in zip(signs, gaps, strict=True))) for signs in flips]
    return sum(each >= abs(sum(gaps)) - 1e-9 for each in sums) / len(sums)


def mcnemar(only_there: int, only_here: int) -> float:
    """Return the exact two-sided p of discordant pairs."""
    return sign_flips([1.0] * only_there + [-1.0] * only_here)


def gains(lines: Iterable[Line], budget: str, arm: str, base: str) -> dict[int, float]:
    """Return by how much an arm ends above another at a budget, by seed."""
    ends = {(line["arm"], line["seed"]): last(line) for line in lines if line["budget"] == budget}
    return {
        seed: ends[arm, seed] - ends[base, seed]
        for each, seed in sorted(ends)
        if each == arm and (base, seed) in ends
    }


def verdict(lines: Sequence[Line]) -> str:
    """Return the sentence of the primary measure (study_plan.toml), once it has all seeds."""
    few, many = (gains(lines, budget, "r3-support", "nothing") for budget in PLAN["budgets"])
    claim, seeds = "earns more with 32 turns than with 4", planned_seeds()
    more = [many[seed] - few[seed] for seed in seeds if seed in few and seed in many]
    if len(more) < len(seeds):
        return f"R3 + support {claim}: not whole yet, {len(more)} of {len(seeds)} seeds."
    mean, p = statistics.fmean(more), sign_flips(more)
    said = "not shown"
    if p < PLAN["level"]:
        said = "shown" if mean > 0 else "opposite"
    return f"R3 + support {claim}: {said} (by {mean:+.3f}, p = {p:.2g}, {len(more)} seeds)."


def table(lines: Sequence[Line]) -> str:
    """Return the verdict, a row for every budget and arm, and the paired tests."""
    rows = [
        verdict(lines),
        "",
        "| turns | arm | runs | fail | reward, start | end | k3, first quarter | last | "
        "routers that differ, first quarter |",
        "|" + " --- |" * 9,
    ]
    for budget, arm in itertools.product(PLAN["budgets"], PLAN["arms"]):
        runs = [line for line in lines if (line["budget"], line["arm"]) == (budget, arm)]
        if runs:
            starts = [line["curves"]["reward"][0] for line in runs]
            start = statistics.fmean(each for each in starts if each is not None)
            curves = (curve(runs, name, at) for name, at in (("k3", 0), ("k3", -1), ("routers", 0)))
            rows.append(
                f"| {budget} | {arm} | {len(runs)} | {sum(map(fails, runs))} | {start:.3f} | "
                f"{statistics.fmean(map(last, runs)):.3f} | {' | '.join(curves)} |"
            )
    rows += ["", "| turns | arm | against | pairs | fail only there / only here | exact McNemar | "
             "end, here - there | exact sign flips |", "|" + " --- |" * 8]  # fmt: skip
    for budget, (base, arm) in itertools.product(
        PLAN["budgets"], itertools.combinations(PLAN["arms"], 2)
    ):
        found = list(gains(lines, budget, arm, base).values())
        if found:
            there, here = discordant(lines, budget, arm, base)
            rows.append(
                f"| {budget} | {arm} | {base} | {len(found)} | {there} / {here} | "
                f"{mcnemar(there, here):.2g} | {statistics.fmean(found):+.3f} | "
                f"{sign_flips(found):.2g} |"
            )
    return "\n".join(rows)


def discordant(lines: Iterable[Line], budget: str, arm: str, base: str) -> tuple[int, int]:
    """Return on how many seeds only the base fails, and only the arm."""
    failed = {
        (line["arm"], line["seed"]): fails(line) for line in lines if line["budget"] == budget
    }
    pairs = [
        (failed[base, seed], failed[arm, seed])
        for each, seed in failed
        if each == arm and (base, seed) in failed
    ]
    return pairs.count((True, False)), pairs.count((False, True))


def curve(lines: Iterable[Line], name: str, block: int) -> str:
    """Return the median over runs of a curve's block."""
    values = [line["curves"][name][block] for line in lines]
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"{statistics.median(known):.2g}"


def make_policy(path: Path) -> None:
    """Go on with the policy of `make zero`, on conversations of 2 to 8 digits.

    In half of the episodes the lead guesses at one of its turns, however many it has: what training
    takes off.
    """
    config = resolve_as(PolicyConfig, {}, (*conversations.POLICY, *PLAN["policy"]["settings"]))
    torch.set_num_threads(config.threads)
    tokenizer = conversations.make_tokenizer()
    model = Qwen3_5MoeForCausalLM.from_pretrained(HERE / "policy", dtype=torch.float32)
    tiny.warm_up(
        model, tokenizer, lambda _: guessing(config.seed), config, progress=conversations.say
    )
    tiny.save_policy(model, tokenizer, config, path)


def guessing(seed: int) -> Iterator[conversations.Row]:
    """Yield conversations of episodes, of which a half are guessed, without end."""
    renderer, rng = Renderer(conversations.make_tokenizer()), random.Random(seed)
    while True:
        teacher, digits = conversations.Teacher(renderer), rng.choice(PLAN["policy"]["digits"])
        terms = conversations.draw_terms(rng, digits)
        gives_up = 1 - (1 - PLAN["policy"]["guessed"]) ** (1 / (digits - 1))
        conversations.play(teacher, terms, rng, 0.0, gives_up)
        yield from teacher.conversations()


if __name__ == "__main__":
    main()
