"""The numbers of docs/evidence.md and its appendix, computed a second time from the raw lines.

Nothing of benchmarks/evidence is imported: a run's end, its failing and the exact tests are written
here anew, and compared with what the pages print.
"""

import json
import math
import re
from collections import Counter
from hashlib import sha256
from itertools import product
from statistics import fmean

import pytest

from support.paths import ROOT

RUNS = (ROOT / "benchmarks" / "evidence" / "runs.jsonl").read_text(encoding="utf-8").splitlines()
PAGES = "\n".join(
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("evidence", "evidence_tables")
)
TABLES = {
    table["id"]: table
    for table in json.loads((ROOT / "docs" / "data" / "evidence.json").read_text(encoding="utf-8"))
    if "names" in table.get("study", {}) and f"table: evidence/{table['id']} " in PAGES
}
DIGESTS = {  # of each study's lines: a change may be too small for the digits of a page
    "main": "a70330fabf3b5b6d", "replicate": "c027a5d40a46de10",
    "growth": "cc73fc1db81c2c2f", "dose-40": "eaf3c4ff13c83779",
    "one-of-128": "9c3d909b3dd2a436", "dose-0": "2d97372f00064a6d",
    "dose-10": "66d8cbb837a76082", "dose-20": "fb41e4d61abb7534",
    "paper-4": "456e9118a019bb02", "two-of-8": "7b30e32647485614",
    "paper-1": "18db88214343ff10", "int4": "11a3f1a73ecc0cbf",
    "growth-2": "0aa60dbb0c417db5", "one-of-128-slow": "ecaafb423dea31f7",
    "replicate-2": "9bd2e2c1d214fcde", "supports": "649b7b07ab0d485c",
    "miles-own": "5bd7c5c88476c6bc",
}  # fmt: skip
PROSE = (  # of tables that no page prints
    ("main", "r3", "recompute", "of 32 pairs {only there} fail only without replay"),
    ("main", "r3", "recompute", "none only with it, held-out +{gap};"),
    ("main", "r3", "recompute", "with replay on none** (exact McNemar p = {mcnemar})"),
    ("main", "r3", "recompute", "**shown** twice: by {gap} (p = {wilcoxon})"),
    ("main", "r3", "control", "1 fails only there, and it ends {gap} below (p = {wilcoxon};"),
    ("replicate", "r3", "recompute", "but {only there} fail only without: p = {mcnemar}"),
    ("replicate", "r3", "recompute", "{gap} higher with replay (p = {wilcoxon}, on all seeds)"),
    ("replicate", "r3", "control", "and {gap} below control's (p = {wilcoxon};"),
    ("replicate", "r3-tis", "recompute", "p = {mcnemar} each (9 of 16 seeds fail uncorrected"),
    ("replicate", "gspo-r3", "recompute", "(p = {mcnemar} each); no arm without replay differs"),
    ("replicate", "miles-moe", "recompute", "it ends {gap} below no correction (p = {wilcoxon})"),
    ("miles-own", "miles-moe-bn-own", "recompute", "they end {gap} and 0.111 below"),
    ("miles-own", "miles-moe-bn-own", "recompute", "(p = {wilcoxon}, 0.008)"),
    ("miles-own", "miles-moe-wide-own", "recompute", "0.124 and {gap} below no correction"),
    ("miles-own", "miles-moe-wide-own", "recompute", "(p = 0.001, {wilcoxon})"),
    ("paper-4", "gspo-r3", "recompute", "end {gap} to 0.136 higher (Wilcoxon p = {wilcoxon} to"),
    ("paper-4", "r3-tis", "recompute", "0.099 to {gap} higher (Wilcoxon p = {wilcoxon} to 0.02)"),
    ("paper-4", "r3", "recompute", "(Wilcoxon p = 0.008 to {wilcoxon}) and fail on 3 or "),
    ("two-of-8", "r3", "recompute", "replay ends higher by {gap} (p = 0.055)"),
    ("two-of-8", "r3", "control", "and below no pressure by {gap}."),
    ("one-of-128-slow", "control", "", "from 0.193 they end at {end} (control)"),
    ("one-of-128-slow", "recompute", "", "{end} (recompute) and"),
    ("one-of-128-slow", "r3", "", "{end} (r3) (`evidence/slow`)"),
    ("growth-2", "entropy-held", "", "With the entropy held {failed} of {runs} runs fail"),
    ("growth-2", "recompute", "", "({failed} of {runs} uncorrected)"),
)


@pytest.fixture(scope="module")
def runs():
    """Return (study, arm) -> seed -> (the run's end, whether it fails)."""
    found = {}
    for line in map(json.loads, RUNS):
        seeds = found.setdefault((line["study"], line["arm"]), {})
        assert line["seed"] not in seeds
        start, end = line["sampled"][0], line["sampled"][-1]
        seeds[line["seed"]] = end, line["error"] is not None or end <= start
    return found


def together(runs, studies, arm):
    return {seed: run for each in studies.split("+") for seed, run in runs[each, arm].items()}


def numbers(runs, studies, arm, base):
    """Return the numbers of an arm, or of its pairs with another, as a page writes them."""
    here = together(runs, studies, arm)
    if not base:
        ends, failed = zip(*here.values(), strict=True)
        return {"runs": f"{len(ends)}", "failed": f"{sum(failed)}", "end": f"{fmean(ends):.3f}"}
    there = together(runs, studies, base)
    pairs = [(there[seed], here[seed]) for seed in here.keys() & there.keys()]
    gaps = [mine - other for (other, _), (mine, _) in pairs]
    fails = Counter((before, after) for (_, before), (_, after) in pairs)
    only = fails[True, False], fails[False, True]
    return {
        "pairs": f"{len(pairs)}",
        "only there": f"{only[0]}",
        "only here": f"{only[1]}",
        "mcnemar": f"{mcnemar(*only):.2g}".replace("e-0", "e-"),
        "gap": f"{fmean(gaps):+.3f}",
        "wilcoxon": f"{signed_rank(gaps):.1g}".replace("e-0", "e-"),
    }


def mcnemar(there, here):
    """Return the two-sided exact p: that of so few heads of fair coins."""
    coins = there + here
    few = sum(math.comb(coins, heads) for heads in range(min(there, here) + 1))
    return min(1, 2 * few / 2**coins)


def signed_rank(gaps):
    """Return the two-sided exact p over all flips of signs. Ties share the middle of their ranks,
    which are doubled here; no gap of 0 has one."""
    sizes = sorted(abs(gap) for gap in gaps if gap)
    ranks = [2 * sizes.index(size) + sizes.count(size) + 1 for size in sizes]
    sums = Counter([0])
    for rank in ranks:
        sums += Counter({total + rank: count for total, count in sums.items()})
    up = sum(ranks[sizes.index(gap)] for gap in gaps if gap > 0)
    few = sum(count for total, count in sums.items() if total <= min(up, sum(ranks) - up))
    return min(1, 2 * few / 2 ** len(ranks))


@pytest.mark.parametrize("study", DIGESTS)
def test_no_line_of_a_study_has_changed(study):
    lines = [line for line in RUNS if json.loads(line)["study"] == study]
    assert sha256("\n".join(lines).encode()).hexdigest()[:16] == DIGESTS[study]


@pytest.mark.parametrize("table", TABLES)
def test_a_table_of_the_page(runs, table):
    study, columns = TABLES[table]["study"], TABLES[table]["columns"]
    printed = re.search(rf"table: evidence/{table} -->.*?\|---\|\n(.*?)\n\n", PAGES, re.DOTALL)
    names = [each["value"] for each in columns if each.get("printed", True)]
    found = []
    for (studies, label), arm in product(study["names"].items(), study["arms"]):
        assert set(studies.split("+")) <= DIGESTS.keys()
        bases = study.get("against", [""])
        for base in bases[arm] if isinstance(bases, dict) else bases:
            texts = {"study": label, "arm": arm, "against": base}
            found.append(texts | numbers(runs, studies, arm, base))
    for line, texts in zip(printed[1].splitlines(), found, strict=True):
        cells = dict(zip(names, line.strip("| ").split(" | "), strict=True))
        known = cells.keys() & texts.keys()
        assert {name: cells[name] for name in known} == {name: texts[name] for name in known}
    assert known & {"end", "gap", "failed"} or table == "main-gap"


@pytest.mark.parametrize(("study", "arm", "base", "text"), PROSE)
def test_a_sentence_of_the_page(runs, study, arm, base, text):
    found = {name: each.lstrip("+-") for name, each in numbers(runs, study, arm, base).items()}
    assert text.format(**found) in " ".join(PAGES.split())
