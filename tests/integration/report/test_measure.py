"""The report of `onepolicy measure` in headless Chromium, and its waterfall."""

import itertools
import json
import re

import pytest
from safetensors.numpy import load_file, save_file

from onepolicy.notation import DASH
from onepolicy.report.figures.causes import distribution, fall_title, waterfall
from onepolicy.report.measure import (
    alone_rows,
    breakdown,
    comparison,
    distribution_table,
    engine_rows,
    summary,
    tiles,
    waterfall_rows,
    worst_positions,
    write_report,
)
from onepolicy.report.page import DARK, LIGHT
from support.browser import PLOTLY
from support.framed_page import inspected
from support.report_run import write_probe


def estimate(value):
    return {"value": value, "low": 0.5 * value, "high": 1.5 * value}


def bar(name, removed, left):
    how = f"with {name} <changed>"
    return {"name": name, "how": how, "removed": estimate(removed), "left": estimate(left)}


ROW = {"name": "0 to 8", "tokens": 10, "k3": 1e-3, "mean_dlogp": 0.02, "share": 1.0}
TURNS = [ROW | {"name": "turn 1", "share": 0.7843}, ROW | {"name": "turn 2", "share": 0.2157}]
ROUTES = {"routing/routers": 0.1, "routing/tokens": 0.5, "routing/layer@1": 0.1}
REPLAYED = ROUTES | {"replay/gate_mass@1": 0.9}
WORST = {"sequence": 0, "place": 3, "before": "1+</pre>", "token": "<b>", "after": "2"}
CANDIDATES = [
    {"token": "+", "p_rollout": 0.6, "p_trainer": 0.4},
    {"token": "</td>", "p_rollout": None, "p_trainer": 0.5},
]
FAR = {"sequence": 1, "place": 4, "before": "<i>2", "sampled": "+", "tv_low": 0.2, "tv_high": 0.4}
TREE = {
    "model": "some/<model>",
    "tokens": 10,
    "sequences": 2,
    "verdict": {
        "action": "replay",
        "causes": ["routing"],
        "sentence": "Replay.",
        "setting": "r3",
        "basis": ["k3 is 1e-05"],
        "forecasts": [{"preset": "tis", "keep": 1.0, "attenuation": 0.99}],
    },
    "dense": "some/dense",
    "waterfall": {
        "total": estimate(5e-3),
        "bars": [bar("routing", 4e-3, 1e-3), bar("precision", -1e-3, 2e-3)],
    },
    "alone": [{"name": "batch shape", "how": "alone", "nats": estimate(1e-9)}],
    "metrics": {
        "without_replay": {"mismatch/k3": 5e-3, "mismatch/f2": 0.1, **ROUTES},
        "with_replay": {"mismatch/k3": 1e-3, "mismatch/f2": 0.0, **REPLAYED},
        "dense": {"mismatch/k3": 2e-4, "mismatch/f2": 0.0},
        "repeated_forward": {"counterfactual/repeat/k3": 0.0, "repeat/k3": 0.0},
    },
    "breakdowns": {
        **{name: [ROW] for name in ("place", "probability", "entropy", "class")},
        "turn": TURNS,
    },
    "worst": [WORST | {"p_rollout": 0.9, "p_trainer": 0.1}],
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
        "worst": [FAR | {"candidates": CANDIDATES}],
    },
    "started": "2026-01-02T03:04:05",
    "versions": {"torch": "2"},
    "config": {
        "rollout": {
            "engine": {"kind": "hf", "dtype": "bfloat16"},
            "sampling": {"temperature": 1.0},
            "prompts_per_step": 10,
        },
        "model": {"dtype": "float32"},
        "train": {"autocast": "off"},
        "task": {"kind": "chain", "env": {"api_key": "sk-LEAKED"}},
        "seed": 0,
    },
}


VIEWS = [(390, False), (1280, True)]
CAUSES = {"waterfall", "distribution"}
ROUTING = {"layers", "gate-mass"}
DISTANCE = {"f_tau", "scatter-without_replay", "scatter-with_replay", "scatter-dense"}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measure") / "out"
    write_probe(folder / "probe.safetensors", tokens=200, replay=True, seed=1)
    probe = load_file(folder / "probe.safetensors")
    native = {k.removesuffix("_native"): v for k, v in probe.items() if k.endswith("_native")}
    trained = {name: value for name, value in probe.items() if not name.endswith("_native")}
    native["logp_rollout"] = trained["logp_rollout"]
    scorings = {"with_replay": trained, "without_replay": native}
    scorings["dense"] = {name: trained[name][:150] for name in ("logp_rollout", "logp_trainer")}
    tensors = {f"{scoring}.{k}": v for scoring, own in scorings.items() for k, v in own.items()}
    save_file(tensors, folder / "tensors.safetensors")
    (folder / "measure.json").write_text(json.dumps(TREE))
    return write_report(folder)


@pytest.fixture(scope="module")
def views(report, tmp_path_factory):
    return inspected(report.read_text(encoding="utf-8"), tmp_path_factory.mktemp("browser"), VIEWS)


@pytest.mark.full
@pytest.mark.process
def test_the_page_is_whole_on_every_screen(views):
    for (width, dark), view in zip(VIEWS, views, strict=True):
        assert (view["width"], view["wider"]) == (width, 0)
        assert (view["errors"], view["loaded"]) == ([], [])
        assert (view["cut"], view["overlapping"]) == ([], [])
        page = (DARK if dark else LIGHT)["page"]
        assert view["background"] == f"rgb({', '.join(str(v) for v in bytes.fromhex(page[1:]))})"


@pytest.mark.full
@pytest.mark.process
def test_every_figure_has_data_and_a_name(views):
    for view in views:
        assert set(view["figures"]) == CAUSES | ROUTING | DISTANCE
        assert all(view["figures"].values()), view["figures"]
        assert view["figures"]["waterfall"] == 4  # the gap, two bars, the remainder
        assert view["unnamed"] == 0


def test_headings_are_in_order(report):
    page = PLOTLY.sub("", report.read_text(encoding="utf-8"))
    levels = [int(level) for level in re.findall(r"<h([1-6])\b", page)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))


@pytest.mark.full
@pytest.mark.process
def test_the_inspection_sees_cut_titles_and_errors(report, tmp_path):
    """A title too long for its figure and a page that throws must fail the tests above."""
    page = report.read_text(encoding="utf-8")
    page = page.replace("rollout probability", "rollout probability " * 30)
    throws = "<script>throw Error('planted')</script><script>"
    page = page.replace('<script id="plotly">', throws)
    (view,) = inspected(page, tmp_path, [(390, False)])
    assert any("planted" in error for error in view["errors"])
    assert any(text.startswith("scatter-dense: rollout probability") for text in view["cut"])


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_contrast(palette):
    """WCAG 2.2: 4.5 for text, 3 for drawings."""
    for ground in ("paper", "page"):
        for text in ("ink", "muted", "bad", "good", "rollout", "replay"):
            assert contrast(palette[text], palette[ground]) >= 4.5, (text, ground)
        for drawn in ("trainer", "dense"):
            assert contrast(palette[drawn], palette[ground]) >= 3, (drawn, ground)
    assert contrast(palette["paper"], palette["rollout"]) >= 4.5  # the marked token


def contrast(a, b):
    def luminance(color):
        parts = [v / 255 for v in bytes.fromhex(color[1:])]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_figures_are_files_and_the_page_is_small(report):
    names = {path.stem for path in (report.parent / "figures").iterdir()}
    assert names == CAUSES | ROUTING | DISTANCE
    assert report.stat().st_size < 6e6


def test_texts_of_the_model_are_escaped(report):
    page = report.read_text(encoding="utf-8")
    assert "some/&lt;model&gt;" in page
    assert "1+&lt;/pre&gt;</span><mark>&lt;b&gt;</mark>" in page
    assert "trained on" not in page
    assert "sk-LEAKED" not in page  # a key of the task's settings
    assert "probe" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_the_verdict_says_that_it_judged_made_up_sums(report):
    """Without --prompts the model answers the chain task, and a reader would think of his own."""
    line = "Replay. Judged on 10 made-up sums: give --prompts to judge on your own."
    assert line in report.read_text(encoding="utf-8")
    config = TREE["config"]
    for task, said in (("chain", line), ("jsonl", "Replay.")):
        parts = summary(TREE | {"config": config | {"task": {"kind": task}}})
        assert said in map(str, parts)


def test_distributions_are_drawn_and_described():
    found = TREE["distribution"]
    low, _, high, _ = distribution(found).data
    # 0 is drawn a decade below the smallest share, as 0
    assert low["y"] == pytest.approx([1.0, 0.5, 0.01])
    assert high["y"] == [1.0, 1.0, 0.75]
    assert distribution_table(found).rows[0] == (
        "positions whose likeliest token differs",
        "25%",
        "0%",
    )
    dash = "\N{EN DASH}"
    worst = (f"0.2 {dash} 0.4", f"'+' 0.6 / 0.4, '</td>' {dash} / 0.5")
    assert worst_positions(found)[0][2:4] == worst
    plain = {**found, "metrics": {"without_replay": found["metrics"]["without_replay"]}}
    assert distribution_table(plain).rows[0][2] == dash


def test_waterfall_bars_stand_between_their_levels():
    """A gap of 5e-3: routing takes 4e-3 away, precision adds 1e-3 again. The axis counts in units
    of 1e-3."""
    drawn = waterfall(TREE)
    gap, less, more, left = drawn.data
    assert (gap["x"], left["x"]) == ([5], [2])
    assert (less["base"], less["x"]) == (pytest.approx([5]), pytest.approx([-4]))
    assert (more["base"], more["x"]) == (pytest.approx([1]), pytest.approx([1]))
    assert less["error_x"]["array"] == pytest.approx([2])  # 2e-3 to 6e-3 may be gone
    assert drawn.layout["xaxis"]["title"]["text"] == "k3, 10<sup>\u22123</sup> nats per token"
    assert less["y"] == ["routing<br><b>-4e-3 (80%)</b>"]
    assert more["y"] == ["precision<br><b>+1e-3 (20%)</b>"]
    assert drawn.title == "80% of the gap of 5e-3 nats per token comes from routing"
    names = ["the gap", "routing", "precision", "remainder"]
    table = waterfall_rows(TREE)
    assert [row[0] for row in table] == names
    # the table has the picture's signs, in the intervals too
    assert [row[1] for row in table] == ["", "-4e-3", "+1e-3", ""]
    assert table[1][2] == "-6e-3 \N{EN DASH} -2e-3"
    assert less["text"] == ["-4e-3 nats (-6e-3 \N{EN DASH} -2e-3)"]


def test_parts_of_the_gap_stand_beside_parts_of_the_tokens():
    found = breakdown("turn", TURNS)
    assert found.rows[0] == ("turn 1", "10", "1e-3", "0.02", "78.4%")
    assert found.title == "By turn: turn 1 holds 78.4% of the gap on 50% of the tokens"


def test_shares_are_percentages_in_the_tables():
    shares = ["mismatch/f1.25", "mismatch/f2", "mismatch/f5", "mismatch/ess"]
    shares += ["routing/routers", "routing/tokens"]
    others = ["mismatch/k1", "mismatch/k3", "mismatch/max_dp", "mismatch/max_dlogp"]
    others += ["routing/sequence"]
    found = dict.fromkeys([*shares, *others], 0.25)
    repeated = dict.fromkeys(["counterfactual/repeat/k3", "counterfactual/repeat/routers"], 0.25)
    repeated |= dict.fromkeys(["engine_all/k3", "engine_all/routers", "engine_all/same"], 0.25)
    tree = TREE | {"metrics": {"without_replay": found, "repeated_forward": repeated}}
    told = [row[1] for row in comparison(tree)]
    assert told == ["0.25"] * 2 + ["25%"] * 4 + ["0.25"] * 2 + ["25%"] * 2 + ["0.25"] * 2 + ["25%"]
    assert [row[1] for row in engine_rows(tree)] == ["0.25", "25%", "25%"]


def test_the_title_has_the_known_facts():
    nothing = {"total": estimate(1e-3), "bars": [bar("routing", 1e-4, 9e-4)]}
    title = "No single cause: 90% of the gap of 1e-3 nats is left unexplained"
    assert fall_title(nothing) == title
    assert fall_title({"total": estimate(0.0), "bars": []}) == "There is no gap to explain"
    wide = bar("routing", 9e-4, 1e-4)
    wide["removed"] = {"value": 9e-4, "low": -1e-4, "high": 2e-3}
    title = fall_title({"total": estimate(1e-3), "bars": [wide]})
    assert title.endswith("though its interval includes 0")
    wide["removed"] = {"value": 9e-4, "low": None, "high": None}
    assert fall_title({"total": estimate(1e-3), "bars": [wide]}).endswith("comes from routing")


def test_few_sequences_have_no_interval():
    """Their ends are null in measure.json."""
    unknown = {"value": 4e-3, "low": None, "high": None}
    one = bar("routing", 3e-3, 1e-3) | {"removed": unknown | {"value": 3e-3}}
    tree = TREE | {"waterfall": {"total": unknown, "bars": [one]}}
    tree["alone"] = [{"name": "lm_head", "how": "x", "nats": unknown}]
    assert [row[2] for row in waterfall_rows(tree)][:2] == [DASH, DASH]
    assert alone_rows(tree)[-1][2] == DASH
    drawn = waterfall(tree)
    assert drawn.data[0]["error_x"]["array"] == [0.0]
    assert drawn.data[1]["x"] == [-3.0]  # 10^-3 nats


def test_a_negligible_gap_has_no_percentages_and_no_intervals():
    made = [bar("routing", 1e-5, 5e-5), bar("precision", -6e-5, 6e-5)]
    fall = {"total": estimate(6e-5), "bars": made}
    small = TREE | {"waterfall": fall}
    drawn = waterfall(small)
    title = "The gap of 6e-5 nats per token is too small to matter"
    assert drawn.title == title
    for trace in drawn.data:
        assert "%" not in str(trace["y"])
        assert set(trace["error_x"]["array"] + trace["error_x"]["arrayminus"]) == {0.0}
        assert "(" not in str(trace["text"])
    assert [row[2] for row in waterfall_rows(small)] == ["\u2013"] * 4
    plain = {"mismatch/k3": 9e-5, "mismatch/f2": 0.0}
    metrics = {"without_replay": plain, "with_replay": {"mismatch/k3": 3e-5}}
    assert tiles(small | {"metrics": metrics})[1][2] == "both are too small to matter"
    plain["mismatch/k3"] = 1e-4
    assert tiles(small | {"metrics": metrics})[1][2] == "3.33 times less"


def test_each_change_alone_and_each_repeat_is_a_row():
    how = "k3 between two passes: the same forward a second time, packed in the opposite order"
    large = {"name": "bfloat16", "how": "packed", "nats": estimate(4e-3)}
    assert alone_rows(TREE | {"alone": [*TREE["alone"], large]}) == [
        ("trainer, repeated", "0", "\u2013", how),
        ("batch shape", "1e-9", "\u2013", "alone"),  # no interval where it is too small to matter
        ("bfloat16", "4e-3", "2e-3 \u2013 6e-3", "packed"),
    ]
