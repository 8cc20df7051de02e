"""The slides' table on the tiny policy: corrections under quantised rollouts, and whether training
stays healthy.

recompute, PPO-IS, Vanilla-IS, TIS (replay off) and R3, each with bfloat16, int8, fp8 and 3-bit
rollouts, on 5 seeds of 100 steps: 100 runs. Evaluation is always with unquantised weights. Seeds
pair the problems and the random numbers.

    python benchmarks/quant_table.py --search --workers 2      # the learning rate, unquantised only
    python benchmarks/quant_table.py --minutes 60 --workers 2  # an hour of runs; repeat until done
    python benchmarks/quant_table.py --show --figures FOLDER   # table and curves of finished runs

Fixed before the first quantised run: seeds, horizon, settings (quant_table.toml, which must be
committed) and the rule. A run falls back if its held-out avg@2 ends, or is at any evaluation, FALL
or more below its best so far. The learning rate is the largest of RATES at which no unquantised run
of the recompute arm falls back on any seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gym_curves import ROOT, train
from quant_tables import Outcome, figures, table

from onepolicy.report.png import write_figures
from onepolicy.run.log import read_metrics

RECIPE = Path(__file__).with_suffix(".toml")
RATES = (6e-4, 4e-4, 3e-4, 2e-4, 1.5e-4, 1e-4, 5e-5)
FALL = 0.2  # of held-out accuracy; 256 samples have a standard error of 0.03
METHODS = {
    "recompute": ("correction.preset=recompute",),
    "PPO-IS": ("correction.preset=ppo-is",),
    "Vanilla-IS": ("correction.preset=vanilla-is",),
    "TIS": ("correction.preset=tis",),
    "R3": ("correction.preset=recompute", "replay.mode=r3", "log.counterfactual_every=0"),
}
FORMATS = {
    "bf16": (),
    "int8": ("rollout.quant=int8",),
    "fp8": ("rollout.quant=fp8",),
    "simulated 3 bits": ("rollout.quant.format=simulated", "rollout.quant.bits=3"),
}


def main() -> None:
    options = arguments()
    if options.search:
        search(options)
        return
    if not options.show:
        require_fixed(options.out)
        run_all(options)
    found = [
        outcome for job in jobs(options) if (outcome := finished(options.out, *job)) is not None
    ]
    print(table(found, FALL))
    if options.figures:
        for path in write_figures(options.figures, figures(found), png=options.png):
            print(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--search", action="store_true", help="find the learning rate")
    parser.add_argument("--show", action="store_true", help="start nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/quant_table"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="N")
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="NAME"
    )
    parser.add_argument(
        "--formats", nargs="+", default=list(FORMATS), choices=FORMATS, metavar="NAME"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no run later than this"
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="runs at a time, a core each"
    )
    parser.add_argument("--figures", type=Path, help="write the curves there, as plotly JSON")
    parser.add_argument("--png", action="store_true")
    parser.add_argument("--model", default="tiny")
    parser.add_argument(
        "--trial",
        nargs="*",
        default=None,
        metavar="a.b=c",
        help="a trial with other settings: no rule",
    )
    return parser.parse_args()


def jobs(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Return (method, format, seed), seeds outermost, so that finished runs can be compared at any
    time."""
    return [
        (method, quant, seed)
        for seed, quant, method in itertools.product(
            options.seeds, options.formats, options.methods
        )
    ]


def folder(out: Path, method: str, quant: str, seed: int) -> Path:
    return out / f"{method.lower()}-{quant.replace(' ', '-')}-seed{seed}"


def run_all(options: argparse.Namespace) -> None:
    start = time.monotonic()

    def one(job: tuple[str, str, int]) -> None:
        method, quant, seed = job
        run = folder(options.out, *job)
        if (run / "summary.json").exists() or time.monotonic() - start > 60 * options.minutes:
            return
        settings = (*METHODS[method], *FORMATS[quant], *(options.trial or ()))
        train(RECIPE, options.model, run, seed, 1, settings)
        print(f"{run.name}: {(time.monotonic() - start) / 60:.1f} min", flush=True)

    todo = jobs(options)
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(one, todo))
    missing = sum(finished(options.out, *job) is None for job in todo)
    if missing:
        print(f"{missing} of {len(todo)} runs are still missing; start again to go on", flush=True)


def finished(out: Path, method: str, quant: str, seed: int) -> Outcome | None:
    run = folder(out, method, quant, seed)
    return (
        Outcome(method, quant, seed, read_metrics(run)) if (run / "summary.json").exists() else None
    )


def search(options: argparse.Namespace) -> None:
    """Try rates from the largest. The first at which no seed fails ends the search. Writes
    OUT/search.json."""
    steady = None
    for rate in RATES:
        failed = []

        def one(seed: int, rate: float = rate, failed: list[int] = failed) -> None:
            run = options.out / f"search-{rate:g}-seed{seed}"
            if failed:
                return
            train(RECIPE, options.model, run, seed, 1, (f"optim.lr={rate}", *(options.trial or ())))
            fall = Outcome("recompute", "bf16", seed, read_metrics(run)).fall
            print(f"lr {rate:g}, seed {seed}: falls back by {fall:.3f}", flush=True)
            if fall >= FALL:
                failed.append(seed)

        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(one, options.seeds))
        if not failed:
            steady = rate
            break
    (options.out / "search.json").write_text(
        json.dumps({"lr": steady, "seeds": options.seeds, "fall": FALL})
    )
    print(f"largest steady learning rate: {steady}; set optim.lr in {RECIPE.name} to it and commit")


def require_fixed(out: Path) -> None:
    """Check that the settings are committed, and that their learning rate is the one that the
    search found."""
    path = out / "search.json"
    if not path.exists():
        raise SystemExit(f"{path}: run --search first")
    found, own = (
        json.loads(path.read_text())["lr"],
        tomllib.loads(RECIPE.read_text())["optim"]["lr"],
    )
    if found != own:
        raise SystemExit(f"{RECIPE}: optim.lr is {own}, --search found {found}; set it and commit")
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", str(RECIPE), __file__],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if changed:
        raise SystemExit(
            f"not committed: {changed.strip()}; what is compared must be fixed before the first run"
        )


if __name__ == "__main__":
    main()
