"""benchmarks/lora_curves.jsonl: LoRA beside full training, as its page says."""

import pytest
from lora_curve_tables import (
    BEGIN,
    BLOCK,
    END,
    ENGINES,
    LARGEST_K3,
    SEEDS,
    k3_ratio,
    paired,
    rises_alike,
    table,
)
from lora_curves import ARMS, RESULTS, finished_runs

from support.paths import ROOT

RUNS = finished_runs(RESULTS)


def test_the_page_has_the_runs():
    page = (ROOT / "docs" / "lora_measured.md").read_text()
    written = page.partition(BEGIN)[2].partition(END)[0].strip()
    assert written == "\n".join(table(RUNS))


def test_runs_are_of_the_settings_in_the_script():
    for run in RUNS:
        assert len(run["reward"]) == len(run["k3"]) == 32
        if run["arm"] in ARMS:
            assert run["settings"] == list(ARMS[run["arm"]])


@pytest.mark.parametrize("engine", ENGINES)
def test_k3_of_adapters_is_at_most_twice_that_of_full_training(engine):
    if paired(RUNS, engine)[0]:
        assert k3_ratio(RUNS, engine) <= LARGEST_K3


def run(arm, seed, first, last, k3=1e-5):
    return {
        "arm": arm,
        "seed": seed,
        "settings": list(ARMS[arm]),
        "reward": [first] * BLOCK + [0.5] * 4 + [last] * BLOCK,
        "k3": [k3],
    }


def runs(ends, k3=1e-5):
    full = [run("hf-full", seed, 0.3, 0.5) for seed in SEEDS]
    return full + [run("hf-lora", seed, 0.3, ends[seed], k3) for seed in SEEDS]


def test_the_rule():
    assert rises_alike(runs((0.4, 0.41, 0.41)), "hf")
    assert not rises_alike(runs((0.4, 0.39, 0.39)), "hf")  # less than half of the rise
    assert not rises_alike(runs((0.29, 0.6, 0.6)), "hf")  # one seed falls
    assert k3_ratio(runs((0.4, 0.4, 0.4), k3=3e-5), "hf") == pytest.approx(3)
    assert "embedded: 2 of 3 pairs of runs are there: not decided" in "\n".join(
        table(runs((0.4, 0.4, 0.4))[:5])
    )


def test_the_rises_of_a_rank_and_a_rate():
    row = table(runs((0.4, 0.5, 0.6)))[-1]
    assert row == "| LoRA, merged | 16 | 1e-3 | 0.20 | 0.10 |"
