"""The figure of k3 by turn: hand-computed, from a run and from a measurement."""

import json
import math

import pytest

from onepolicy.report.figures.groups import Curve, by_turn
from onepolicy.report.figures.parts import DENSE, REPLAY, TRAINER, Absent, Figure
from onepolicy.report.measure import turns
from onepolicy.report.png import write_figures
from onepolicy.report.run import load_run
from onepolicy.report.run_page import turn_figures
from support.report_run import make_fixture_run


def of(folder) -> Figure:
    (figure,) = turn_figures(load_run(folder))
    assert isinstance(figure, Figure)
    return figure


def test_the_mean_is_over_all_tokens_of_scored_steps(tmp_path):
    """Step 10 has three times the tokens and half the k3 of step 20: (3 x 1 + 1 x 2) / 4 = 1.25.
    Without replay k3 is three times as large. Other steps do not count."""
    figure = of(make_fixture_run(tmp_path / "run", steps=20, tokens=40, turns=True))
    replayed, native = figure.data
    assert replayed["x"] == native["x"] == ["1", "2", "9 to 16"]
    assert replayed["y"] == pytest.approx([1.25e-6, 2.5e-6, 3.75e-6])
    assert native["y"] == pytest.approx([3.75e-6, 7.5e-6, 11.25e-6])
    assert replayed["text"] == native["text"] == ["1,200 tokens", "800 tokens", "400 tokens"]
    above, below = (replayed["error_y"][side] for side in ("array", "arrayminus"))
    assert above == pytest.approx([0.75e-6, 1.5e-6, 2.25e-6])  # to step 20's
    assert below == pytest.approx([0.25e-6, 0.5e-6, 0.75e-6])  # to step 10's
    for trace, look in ((replayed, REPLAY), (native, TRAINER)):
        assert (trace["line"]["color"], trace["line"]["dash"]) == (look.color, look.dash)
    assert "2 probe steps" in figure.note
    assert figure.title.startswith("k3 from turn 1 to turn 9 to 16: 1.25")


def test_without_replay_all_steps_count_and_there_is_one_curve(tmp_path):
    """The mean is of 3 x 1 at step 10 and 2 at 11 others, of 14 parts."""
    run = make_fixture_run(tmp_path / "run", steps=12, tokens=40, replay=False, turns=True)
    (trace,) = of(run).data
    assert trace["line"]["color"] == TRAINER.color
    assert trace["y"][0] == pytest.approx((3 * 1e-6 + 11 * 2e-6) / 14)


def test_episodes_of_one_turn_have_no_such_figure(tmp_path):
    assert turn_figures(load_run(make_fixture_run(tmp_path / "run", steps=3, tokens=40))) == []


def test_a_run_without_token_counts_leaves_a_sentence(tmp_path):
    folder = make_fixture_run(tmp_path / "run", steps=3, tokens=40, turns=True)
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = [{name: v for name, v in row.items() if "tokens_turn" not in name} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    (absent,) = turn_figures(load_run(folder))
    assert isinstance(absent, Absent)
    assert "train/tokens_turn@k" in absent.why


def test_equal_engines_and_values_that_are_missing_are_drawn():
    """A k3 of 0 is an open marker at the lowest line, and a null is left out."""
    rows = [
        {f"mismatch/k3_turn@{t}": k3, f"train/tokens_turn@{t}": 5.0}
        for t, k3 in ((0, 0.0), (1, 1e-3), (2, None))
    ]
    (trace,) = by_turn([Curve.of("with replay", REPLAY, rows)]).data
    assert trace["x"] == ["1", "2"]
    assert trace["marker"]["symbol"] == ["square-open", "square"]
    assert trace["y"][0] < trace["y"][1] == 1e-3
    assert all(math.isfinite(v) for side in ("array", "arrayminus") for v in trace["error_y"][side])


def test_measure_draws_every_scoring():
    def numbers(*k3: float) -> dict[str, float]:
        both = ((f"mismatch/k3_turn@{t}", v) for t, v in enumerate(k3))
        return dict(both) | {f"train/tokens_turn@{t}": 4.0 for t in range(len(k3))}

    metrics = {
        "without_replay": numbers(4e-4, 8e-4),
        "with_replay": numbers(1e-4, 2e-4),
        "dense": numbers(1e-5),
    }
    (figure,) = turns({"metrics": metrics})
    assert [trace["line"]["color"] for trace in figure.data] == [
        look.color for look in (TRAINER, REPLAY, DENSE)
    ]
    assert [trace["y"] for trace in figure.data] == [[4e-4, 8e-4], [1e-4, 2e-4], [1e-5]]
    assert "error_y" not in figure.data[0]
    assert turns({"metrics": {"without_replay": {"mismatch/k3": 1e-4}}}) == []


@pytest.mark.process
@pytest.mark.needs("chromium")
def test_json_and_png_are_written(tmp_path):
    figure = of(make_fixture_run(tmp_path / "run", steps=20, tokens=40, turns=True))
    written = write_figures(tmp_path / "figures", [figure], png=True)
    assert [path.name for path in written] == ["turns.json", "turns.png"]
    axis = json.loads(written[0].read_text())["layout"]["xaxis"]
    assert axis["categoryarray"] == ["1", "2", "9 to 16"]
    assert written[1].stat().st_size > 10_000
