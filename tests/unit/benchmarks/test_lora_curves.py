"""benchmarks/lora_curves.jsonl: LoRA beside full training, as its page says."""

import lora_curve_tables as tables
import pytest
from lora_curves import ARMS, RESULTS, finished_runs

from support.paths import ROOT

RUNS = finished_runs(RESULTS)


def test_the_page_has_the_runs():
    page = (ROOT / "docs" / "measured.md").read_text()
    written = page.partition(tables.BEGIN)[2].partition(tables.END)[0].strip()
    assert written == "\n".join(tables.table(RUNS))


def test_runs_are_of_the_settings_in_the_script():
    for run in RUNS:
        assert len(run["reward"]) == len(run["k3"]) == 32
        if run["arm"] in ARMS:
            assert run["settings"] == list(ARMS[run["arm"]])


@pytest.mark.parametrize("engine", tables.ENGINES)
def test_k3_of_adapters_is_at_most_twice_that_of_full_training(engine):
    if tables.paired(RUNS, engine)[0]:
        assert tables.k3_ratio(RUNS, engine) <= tables.LARGEST_K3


def run(arm, seed, first, last, k3=1e-5):
    reward = [first] * tables.BLOCK + [0.5] * 4 + [last] * tables.BLOCK
    settings = list(ARMS[arm])
    return {"arm": arm, "seed": seed, "settings": settings, "reward": reward, "k3": [k3]}


def runs(ends, k3=1e-5):
    full = [run("hf-full", seed, 0.3, 0.5) for seed in tables.SEEDS]
    return full + [run("hf-lora", seed, 0.3, ends[seed], k3) for seed in tables.SEEDS]


def test_the_rule():
    assert tables.rises_alike(runs((0.4, 0.41, 0.41)), "hf")
    assert not tables.rises_alike(runs((0.4, 0.39, 0.39)), "hf")  # less than half of the rise
    assert not tables.rises_alike(runs((0.29, 0.6, 0.6)), "hf")  # one seed falls
    assert tables.k3_ratio(runs((0.4, 0.4, 0.4), k3=3e-5), "hf") == pytest.approx(3)
    few = "\n".join(tables.table(runs((0.4, 0.4, 0.4))[:5]))
    assert "embedded: 2 of 3 pairs of runs are there: not decided" in few


def test_the_rises_of_a_rank_and_a_rate():
    row = tables.table(runs((0.4, 0.5, 0.6)))[-1]
    assert row == "| LoRA, merged | 16 | 1e-3 | 0.20 | 0.10 |"
