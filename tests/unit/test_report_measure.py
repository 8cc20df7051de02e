"""The report of `onepolicy measure` in headless Chromium, and its waterfall."""

import json
import shutil

import pytest
from report_run import make_fixture_run
from test_report_browser import opened

from onepolicy.report.distribution import figure, rows, worst_rows
from onepolicy.report.measure import breakdown_rows, fall_figure, waterfall_rows, write_report


def estimate(value):
    return {"value": value, "low": 0.5 * value, "high": 1.5 * value}


def bar(name, removed, left):
    return {"name": name, "how": f"with {name} <changed>", "removed": estimate(removed), "left": estimate(left)}


ROW = {"name": "0 to 8", "tokens": 10, "k3": 1e-3, "mean_dlogp": 0.02, "share": 1.0}
TREE = {
    "model": "some/<model>",
    "tokens": 10,
    "sequences": 2,
    "verdict": {
        "action": "replay",
        "causes": ["routing"],
        "sentence": "Replay.",
        "setting": "r3",
        "basis": ["k3 is 1"],
    },
    "waterfall": {"total": estimate(5e-3), "bars": [bar("routing", 4e-3, 1e-3), bar("precision", -1e-3, 2e-3)]},
    "alone": [{"name": "batch shape", "how": "alone", "nats": estimate(1e-9)}],
    "metrics": {
        "without_replay": {"mismatch/k3": 5e-3, "routing/routers": 0.1},
        "with_replay": {"mismatch/k3": 1e-3, "routing/routers": 0.1},
        "repeated_forward": {"counterfactual/repeat/k3": 0.0, "repeat/k3": 0.0},
    },
    "breakdowns": {"place": [ROW], "probability": [ROW], "entropy": [ROW], "class": [ROW]},
    "worst": [{"sequence": 0, "place": 3, "before": "1+</pre>", "token": "<b>", "p_rollout": 0.9, "p_trainer": 0.1}],
    "distribution": {
        "top": 2,
        "metrics": {
            "without_replay": {"tv_low": 0.02, "tv_high": 0.3, "argmax_differs": 0.25},
            "with_replay": {"tv_low": 0.01, "tv_high": 0.29, "argmax_differs": 0.0},
        },
        "edges": [0.001, 0.01, 0.1],
        "above": {
            "without_replay": {"low": [1.0, 0.5, 0.0], "high": [1.0, 1.0, 0.75]},
            "with_replay": {"low": [1.0, 0.25, 0.0], "high": [1.0, 1.0, 0.5]},
        },
        "worst": [
            {
                "sequence": 1,
                "place": 4,
                "before": "<i>2",
                "sampled": "+",
                "tv_low": 0.2,
                "tv_high": 0.4,
                "candidates": [
                    {"token": "+", "p_rollout": 0.6, "p_trainer": 0.4},
                    {"token": "</td>", "p_rollout": None, "p_trainer": 0.5},
                ],
            }
        ],
    },
    "config": {"replay": {"mode": "r3"}},
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measure")
    probe = sorted((make_fixture_run(folder / "run", steps=30, tokens=200) / "probes").iterdir())[-1]
    (folder / "out" / "probes").mkdir(parents=True)
    shutil.copy(probe, folder / "out" / "probes" / "step_00000.safetensors")
    (folder / "out" / "measure.json").write_text(json.dumps(TREE))
    with opened(write_report(folder / "out").read_text(), folder / "phone", width=500) as phone:
        return phone.drawn()


def test_the_page_is_drawn_and_complete(page):
    html = page.roots["html"]
    assert "data-errors" not in html
    assert page.roots["body"]["data-figures"] == "drawn"
    assert html["data-loaded"] == ""
    assert int(html["data-overflow"] or "1") <= 0


def test_every_figure_has_data(page):
    routing = {"routers", "tokens", "sequences", "layers", "gate-mass"}
    wanted = {"waterfall", "f_tau", "scatter", "scatter_native", "distribution", *(f"breakdown-{i}" for i in range(4))}
    assert set(page.marks) == wanted | routing
    assert page.marks["waterfall"]["point"] == 4  # the gap, two bars, the remainder
    assert all(marks.get("point", 0) + marks.get("js-line", 0) > 0 for marks in page.marks.values())


def test_distributions_are_drawn_and_told(page):
    found = TREE["distribution"]
    assert page.marks["distribution"]["js-line"] == 2 * 4  # and the legend: at least and at most, of both scorings
    data = figure(found).data
    assert data[0]["y"] == pytest.approx([1.0, 0.5, 0.01])  # 0 is drawn a decade below the smallest share, as 0
    assert data[1]["y"] == [1.0, 1.0, 0.75]
    assert rows(found)[0] == ("positions whose likeliest token differs", "25%", "0%")
    assert worst_rows(found)[0][2:4] == ("0.2 \N{EN DASH} 0.4", "'+' 0.6 / 0.4, '</td>' \N{EN DASH} / 0.5")
    plain = {**found, "metrics": {"without_replay": found["metrics"]["without_replay"]}}
    assert rows(plain)[0][2] == "\N{EN DASH}"


def test_waterfall_bars_stand_between_their_levels():
    gap, removed, left = fall_figure(TREE).data
    assert (gap["y"], left["y"]) == ([5e-3], [2e-3])
    assert removed["base"] == [1e-3, 2e-3]
    assert removed["y"] == pytest.approx([4e-3, -1e-3])  # a change that made it worse hangs below its base
    assert [row[0] for row in waterfall_rows(TREE)] == ["the gap", "routing", "precision", "remainder"]
    assert breakdown_rows([ROW]) == [("0 to 8", "10", "0.001", "0.02", "100%")]
