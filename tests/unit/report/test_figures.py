"""The report's contents: figures by hand-computed cases, sentences for missing parts, errors that
name the file."""

import html
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from safetensors.numpy import save_file

from onepolicy.config import resolve
from onepolicy.report.figures.parts import (
    REPLAY,
    ROLLOUT,
    TRAINER,
    Absent,
    Figure,
    LogScale,
    Series,
)
from onepolicy.report.figures.routing import per_layer
from onepolicy.report.figures.tokens import extreme_tokens, subsample
from onepolicy.report.run import load_run
from onepolicy.report.run_page import (
    k3_by_age,
    learning_figures,
    mismatch_figures,
    pairs_of,
    routing_figures,
    time_split,
    token_figures,
    write_report,
)
from onepolicy.report.run_summary import outcome
from onepolicy.run.summary import summarise
from support.report_run import make_fixture_run, own_probe

FULL = {
    *("reward", "length", "entropy", "grad_norm", "k3", "f_tau", "scatter", "scatter_native"),
    *("layers", "gate-mass", "time"),
}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    return make_fixture_run(tmp_path_factory.mktemp("runs") / "full")


@pytest.fixture(scope="module")
def report(run_folder) -> str:
    assert write_report(run_folder) == run_folder / "report.html"
    return (run_folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> Path:
    return make_fixture_run(tmp_path_factory.mktemp("runs") / "small", steps=12, tokens=120)


@pytest.fixture
def copy(small_run, tmp_path) -> Path:
    """Return a small run that a test may damage."""
    return shutil.copytree(small_run, tmp_path / "run")


def specs(html: str) -> dict[str, dict]:
    data = re.search(r'<script id="figures" type="application/json">(.*?)</script>', html, re.S)
    return {spec["name"]: spec for spec in json.loads(data[1])["figures"]}


def without_plotly(html: str) -> str:
    return re.sub(r'<script id="plotly">.*?</script>', "", html, flags=re.S)


def page_of(folder: Path) -> str:
    return without_plotly(write_report(folder).read_text(encoding="utf-8"))


def test_full_report(report):
    assert set(specs(report)) == FULL
    assert report.count('<script id="plotly">') == 1
    for name in FULL:
        assert report.count(f'id="fig-{name}"') == 1
    page = without_plotly(report)
    assert "http" not in page
    assert not re.search(r"\b(src|href)=|url\(|@import", page)
    assert '<ul class="absent">' not in page
    assert "<script>window.hacked" not in page  # text of a run is escaped
    assert "&lt;script&gt;window.hacked = true&lt;/script&gt;" in page
    assert "&lt;/pre&gt;&lt;b&gt;&amp; &#39;quoted&#39;&lt;/b&gt;" in page
    for name, spec in specs(report).items():  # plotly's own validator takes it
        plain = json.loads(re.sub(r'"@[a-z-]+"', '"#123456"', json.dumps(spec)))
        figure = go.Figure(data=plain["data"], layout=plain["layout"])
        assert figure.layout.xaxis.title.text, name
        assert figure.layout.yaxis.title.text, name


def test_verdict_and_comparison_by_hand(copy):
    summary = json.loads((copy / "summary.json").read_text()) | {
        "reward_first": 0.25,
        "reward_last": 0.75,
        "crash_step": 9,
        "mismatch": {"mismatch/k3": 2e-3, "routing/routers": 0.01},
        "mismatch_at_probes": {"mismatch/k3": 1e-3, "routing/routers": 0.02},
        "mismatch_without_replay": {"mismatch/k3": 4e-3, "routing/routers": 0.05},
        "probe_steps": [10],
    }
    (copy / "summary.json").write_text(json.dumps(summary))
    page, first = html.unescape(page_of(copy)), outcome(summary)
    assert first.startswith("The policy crashed at step 9")
    assert "4\u00d7, one probe" in page
    order = [page.index(part) for part in ("<h1>", first, 'class="tiles"', "0.25 \u2192 0.75")]
    assert order == sorted(order)
    cells = ("Routes that would differ", "1%", "5%", "2%", "\u2013")
    row = "".join(f"<td>{cell}</td>" for cell in cells)
    assert row in re.sub(r' data-name="[^"]*"', "", page)


def test_colours_and_second_signs(run_folder):
    looks = (ROLLOUT, TRAINER, REPLAY)
    assert [look.color for look in looks] == ["@rollout", "@trainer", "@replay"]
    for sign in ("dash", "symbol", "pattern"):
        assert len({getattr(look, sign) for look in looks}) == 3
    figures = {f.name: f for f in all_figures(run_folder) if isinstance(f, Figure)}
    assert figures["reward"].data[1]["line"]["color"] == "@rollout"
    assert "eval/response_length" in load_run(run_folder).names("eval/")
    assert not any("length" in trace["name"] for trace in figures["reward"].data)
    assert figures["entropy"].data[1]["line"]["color"] == "@trainer"
    assert [t["line"]["color"] for t in figures["k3"].data[1::2]] == ["@trainer", "@replay"]
    assert figures["scatter"].data[0]["marker"]["color"] == "@replay"
    assert figures["scatter_native"].data[0]["marker"]["color"] == "@trainer"
    assert [t["marker"]["color"] for t in figures["layers"].data] == ["@trainer", "@replay"]
    (mass,) = figures["gate-mass"].data
    assert mass["marker"]["color"] == "@replay"
    assert mass["y"] == pytest.approx([0.001 * (1 + layer) for layer in range(8)], rel=1e-3)
    assert mass["x"] == list(range(0, 16, 2))  # the decoder's layers


def test_a_layer_is_named_only_where_it_stands_out(subtests):
    """It is above twice the median of the others: 3% beside 1, 2 and 1%, not 3% beside 2, 1, 2%."""
    cases = {
        (0.01, 0.02, 0.01, 0.03): "Layer 3 would choose otherwise most: for 3% of tokens",
        (
            0.02,
            0.03,
            0.01,
            0.02,
        ): "No layer stands out: other experts for at most 3% of tokens",
        (0.01, 0.02, 0.01): "No layer stands out: other experts for at most 2% of tokens",
        (0.0, 0.25): "Layer 1 would choose otherwise most: for 25% of tokens",
        (0.25,): "No layer stands out: other experts for at most 25% of tokens",
        (0.0, 0.0): "No layer would choose another expert",
    }
    for shares, title in cases.items():
        with subtests.test(title):
            assert per_layer([Series("here", TRAINER, np.array(shares))]).title == title


def all_figures(folder: Path) -> list[Figure | Absent]:
    run = load_run(folder)
    drawn = (learning_figures, mismatch_figures, token_figures, routing_figures)
    return [*(figure for draw in drawn for figure in draw(run)), time_split(run)]


OF_ROUTERS = {"layers", "gate-mass"}
OF_REPLAY = {"scatter_native", "gate-mass"}
MISSING = [
    ("moe", OF_ROUTERS, "a dense model has no routers"),
    ("replay", OF_REPLAY, "No second curve: rollout routes are not replayed"),
    ("evaluation", set(), "no evaluation was run (eval.every = 0)"),
]


def test_missing_pieces_leave_a_sentence(tmp_path, subtests):
    for part, gone, sentence in MISSING:
        with subtests.test(part):
            made = make_fixture_run(tmp_path / part, steps=12, tokens=120, **{part: False})
            page = page_of(made)
            assert set(specs(page)) == FULL - gone
            assert sentence in page
            if part == "replay":  # k3 is then drawn as the trainer's
                (figure,) = mismatch_figures(load_run(made))
                assert isinstance(figure, Figure)
                assert [t["line"]["color"] for t in figure.data[1::2]] == ["@trainer"]


def test_a_metric_that_no_step_has_leaves_its_name(copy):
    rows = map(json.loads, (copy / "metrics.jsonl").read_text().splitlines())
    kept = [{name: v for name, v in row.items() if name != "train/entropy"} for row in rows]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    page = page_of(copy)
    assert set(specs(page)) == FULL - {"entropy"}
    assert "<li>Entropy: metrics.jsonl has no train/entropy.</li>" in page


def retold(copy: Path, change) -> dict[str, str]:
    """Return the title of each figure once every row of metrics.jsonl went through `change`."""
    rows = [change(json.loads(line)) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = resolve(json.loads((copy / "config.json").read_text()))
    (copy / "summary.json").write_text(json.dumps(summarise(config, rows, copy, None)))
    return {figure.name: figure.title for figure in all_figures(copy) if isinstance(figure, Figure)}


def test_titles_follow_the_data(copy):
    def change(row):
        at, probed = row["step"], "counterfactual/mismatch/k3"
        if at == 0:
            return row
        own = {"train/entropy": 0.6 / at, "train/grad_norm": 0.0, "train/response_length": 80.0}
        own |= {"train/reward": 0.9 - 0.05 * at, "mismatch/k3": 1e-2 * at}
        return row | own | ({probed: 4e-2 * at} if probed in row else {})

    titles = retold(copy, change)
    assert titles["entropy"] == "Entropy falls 4.47-fold, from 0.274 to 0.0612 nats"
    assert titles["grad_norm"] == "Gradient norm is 0 throughout"
    assert titles["length"] == "Response length is 80 tokens throughout"
    assert titles["reward"].startswith("Reward falls")
    assert titles["k3"] == "Replay cuts k3 by 4\u00d7, one probe"
    assert titles["time"].startswith("The largest part of a step is rollout: 5")


def test_a_small_k3_has_no_ratio_in_the_report(copy):
    page = page_of(copy)
    assert "k3 is too small to matter: " in page
    assert "replay cuts" not in page.lower()
    assert "100% the rollout's" in html.unescape(page)


def test_no_probe_and_no_samples(copy):
    for path in (copy / "probes").iterdir():
        path.unlink()
    (copy / "samples.jsonl").unlink()
    page = page_of(copy)
    assert set(specs(page)) == FULL - {"f_tau", "scatter", "scatter_native"}
    for part in ("F(\u03c4)", "Probability scatter"):
        assert f"{part}: no probe" in page
    assert "Samples: samples.jsonl is" in page


def probe_run(copy: Path, **tensors: list) -> object:
    types = {name: np.float32 for name in tensors if "logp" in name}
    arrays = {name: np.array(v, dtype=types.get(name)) for name, v in tensors.items()}
    save_file(arrays, copy / "probes" / "step_00011.safetensors")
    return load_run(copy)


def test_a_probe_of_log_probabilities_alone_is_drawn(copy):
    """The first version wrote no more."""
    run = probe_run(copy, logp_rollout=[-2.0] * 8, logp_trainer=[-1.0] * 8)
    tail, scatter, absent = token_figures(run)
    assert (tail.name, scatter.name, absent.name) == ("f_tau", "scatter", "scatter_native")
    assert scatter.note.startswith("All 8 tokens of the probe at step 11")
    assert isinstance(absent, Absent)


def test_a_probe_that_counts_differing_experts_is_drawn(copy):
    own_probe(copy / "probes" / "step_00012.safetensors")
    drawn = token_figures(load_run(copy))
    assert [each.name for each in drawn] == ["f_tau", "scatter_native", "scatter"]
    assert all(isinstance(each, Figure) for each in drawn)


def test_f_tau_by_hand(copy):
    """Ratios 1, 1.5, 3, 1/3 -> F(1.25) = 3/4, F(2) = 1/2, F(5) = 0; equal engines -> 0 from the
    start."""
    native = [-2 + math.log(ratio) for ratio in (1.0, 1.5, 3.0, 1 / 3)]
    logp = {"logp_rollout": [-2.0] * 4, "logp_trainer": [-2.0] * 4}
    pairs = pairs_of(probe_run(copy, **logp, logp_trainer_native=native))
    figure = extreme_tokens([each.tail() for each in pairs])
    assert isinstance(figure, Figure)
    # 5 is off the axis: the largest ratio is 3
    replayed, native, *replayed_spots, at_125, at_2 = figure.data
    floor = 0.01  # one decade below 1/n = 0.25
    assert (at_125["y"], at_2["y"]) == ([0.75], [0.5])
    assert figure.title == "Off by more than a factor of 2: 0% with replay, 50% without replay"
    assert at_2["marker"]["symbol"] == ["diamond"]
    assert replayed["y"] == [floor]
    assert [spot["y"] for spot in replayed_spots] == [[floor]] * 2
    assert replayed_spots[0]["marker"]["symbol"] == ["square-open"]
    assert set(native["y"]) == {0.75, 0.5, floor}
    assert native["y"][-1] == floor  # to the first zero and no further
    assert native["y"].count(floor) == 1
    axis = figure.layout["yaxis"]
    assert dict(zip(axis["tickvals"], axis["ticktext"], strict=True))[floor] == "0"


def test_layers_are_of_the_last_step_that_measured_them(copy):
    run, layer = load_run(copy), "routing/layer@"
    for row in run.rows:
        for name in [name for name in row if "@" in name]:
            del row[name]
    (missing,) = routing_figures(run)
    assert missing.why.startswith("Routing by layer: metrics.jsonl has no routing/layer@k")
    native = f"counterfactual/{layer}"
    run.rows[1] |= {f"{layer}3": 0.5, f"{native}3": 0.75, "replay/gate_mass@3": 0.5}
    run.rows[2] |= {f"{layer}10": 0.25, f"{layer}2": 0.0, f"{native}2": 0.25, f"{native}10": 1.0}
    (figure,) = routing_figures(run)
    assert [(bar["x"], bar["y"]) for bar in figure.data] == [
        ([2, 10], [0.25, 1.0]),
        ([2, 10], [0.0, 0.25]),
    ]
    expected = "Layer 10 would choose otherwise most: for 100% of tokens without replay"
    assert figure.title == expected
    assert "the experts that ran are 100% the rollout's in every layer" in figure.note


def test_zero_k3_is_visible(copy):
    (figure,) = mismatch_figures(load_run(copy))
    assert isinstance(figure, Figure)
    trace, axis = figure.data[2], figure.layout["yaxis"]
    zero = trace["x"].index(7)  # the fixture's step 7 has k3 = 0
    assert trace["marker"]["symbol"][zero] == "line-ns-open"
    assert trace["marker"]["symbol"].count("line-ns-open") == 1
    assert trace["y"][zero] == min(trace["y"]) == axis["tickvals"][0]
    assert axis["ticktext"][0] == "0"
    assert axis["type"] == "log"
    assert axis["range"][0] < math.log10(trace["y"][zero])


def test_k3_of_each_age_is_a_mean_over_tokens(copy):
    run = load_run(copy)
    assert isinstance(k3_by_age(run), Absent)
    k3s, tokens = "mismatch/k3_staleness@", "staleness/tokens@"
    run.rows[1] |= {f"{k3s}0": 0.01, f"{tokens}0": 10.0, f"{k3s}2": 0.5, f"{tokens}2": 5.0}
    run.rows[2] |= {f"{k3s}0": 0.04, f"{tokens}0": 20.0, f"{k3s}2": None}
    figure = k3_by_age(run)
    assert isinstance(figure, Figure)
    assert figure.data[0]["x"] == [0, 2]
    assert figure.data[0]["y"] == pytest.approx([0.03, 0.5])
    run.rows[2] |= {f"{k3s}8": 0.6, f"{tokens}8": 5.0}  # a bin
    figure = k3_by_age(run)
    assert figure.data[0]["x"] == ["0", "2", "8 to 15"]
    assert figure.title.endswith("0.6 of those 8 to 15 old")


def test_log_scale_by_hand():
    scale = LogScale.of([3e-4, 0.02, math.nan], [0.0])
    assert (scale.floor, scale.top) == pytest.approx((1e-5, 0.1))
    assert scale.has_zero
    assert scale.lift([0.0, -1e-9, 0.02]) == [scale.floor, scale.floor, 0.02]
    powers = [f"10<sup>\u2212{power}</sup>" for power in (4, 3)]
    assert scale.axis("x")["ticktext"] == ["0", *powers, "0.01", "0.1"]
    clean = LogScale.of([3e-4, 0.02])
    assert (clean.floor, clean.has_zero) == (pytest.approx(1e-4), False)
    assert "0" not in clean.axis("x")["ticktext"]
    nothing = LogScale.of([0.0, 0.0])  # bitwise mode: every k3 is 0
    assert nothing.axis("x")["ticktext"][0] == "0"
    assert nothing.floor < nothing.top
    smallest = LogScale.of([5e-324, 0.0])
    assert smallest.floor > 0
    assert smallest.axis("k3")["range"][0] < -300


def test_subsample_keeps_the_extremes():
    difference = np.random.default_rng(1).random(30_000)
    chosen = subsample(difference, 10_000)
    assert len(set(chosen.tolist())) == 10_000
    assert set(np.argsort(-difference)[:500]) <= set(chosen)
    rest = difference[np.setdiff1d(chosen, np.argsort(-difference)[:500])]
    assert rest.mean() == pytest.approx(difference.mean(), abs=0.02)  # not only extremes
    assert (subsample(difference[:9], 10_000) == np.arange(9)).all()


def test_time_split_adds_up(run_folder):
    run = load_run(run_folder)
    figure = time_split(run)
    assert isinstance(figure, Figure)
    total = np.sum([trace["y"] for trace in figure.data], axis=0)
    assert total == pytest.approx([row["time/step"] for row in run.rows if "time/step" in row])
    names = [trace["name"] for trace in figure.data]
    assert names == ["rollout", "score", "update", "sync", "other"]


def test_crash_is_marked(copy):
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps(summary | {"crash_step": 9}))
    reward = learning_figures(load_run(copy))[0]
    assert isinstance(reward, Figure)
    assert reward.layout["shapes"][0]["x0"] == 9
    assert reward.layout["annotations"][0]["text"] == "crash"
