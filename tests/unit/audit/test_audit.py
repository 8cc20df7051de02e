"""Audits of synthetic dumps match closed forms, name planted causes, accuse no clean one."""

import functools
import json
import math
import operator
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.audit import accumulator
from onepolicy.audit.accumulator import SampledRow
from onepolicy.audit.assessment import _groups_of_steps, divergence_onset
from onepolicy.audit.figures import audit_figures
from onepolicy.audit.report import describe_difference
from onepolicy.audit.run import audit, run_audit
from onepolicy.cli import main
from onepolicy.config import UsageError
from onepolicy.console import Console
from onepolicy.record.schema import write_parquet
from onepolicy.report.figures.parts import Absent, Figure
from onepolicy.report.figures.tokens import extreme_curve
from onepolicy.verdict.scored_tokens import CAUSES
from support.audit_dumps import gaussian_rows, moved_routes, with_routes, world_rows, write_jsonl
from support.examples import examples


def audited(tmp_path: Path, rows: list[dict]):
    write_parquet(tmp_path / "dump.parquet", rows)
    return audit(tmp_path / "dump.parquet", {})


@pytest.mark.parametrize(
    ("kl", "action", "setting"), [(1e-4, "nothing", ""), (5e-3, "correct", "correction.preset=tis")]
)
def test_gaussian_noise_of_known_kl(tmp_path, kl, action, setting) -> None:
    rows = gaussian_rows(kl, rows=200)
    for row in rows:
        row["logp_rollout"] = np.float32(row["logp_rollout"]).astype(float).tolist()
    each = audited(tmp_path, rows)
    found = each.accumulated.overall.statistics()
    n = 200 * 78
    assert (found["tokens"], found["sequences"]) == (n, 200)
    assert found["k1"] == pytest.approx(kl, abs=5 * math.sqrt(2 * kl / n))
    assert found["k3"] == pytest.approx(kl, rel=0.06)  # its standard error is kl sqrt(2 / n)
    chi2_error = 6 * math.sqrt(8 * kl / n)
    assert found["chi2"] == pytest.approx(math.expm1(2 * kl), rel=0.1, abs=chi2_error)
    assert found["ess"] == pytest.approx(math.exp(-2 * kl), rel=1e-2)
    assert found["mean_rho"] == pytest.approx(1, abs=5 * found["mean_rho_error"])
    taus, shares = extreme_curve(each.accumulated.histogram)
    tau = math.exp(math.sqrt(2 * kl))  # about one standard deviation: P(|Z| > 1)
    assert shares[np.searchsorted(taus, tau)] == pytest.approx(0.317, abs=0.02)
    assert (each.verdict.action, each.verdict.setting, each.verdict.causes) == (action, setting, ())
    forecast = {f.preset: f for f in each.verdict.forecasts}
    assert forecast["tis"].attenuation == pytest.approx(1, abs=1e-2)
    # docs/corrections.md: trl-default multiplies by Phi((ln 3 - Tk) / sqrt(2 T k))
    total = 78 * found["k3"]
    phi = 0.5 * math.erfc(-(math.log(3) - total) / math.sqrt(4 * total))
    assert forecast["trl-default"].attenuation == pytest.approx(phi, abs=1e-3)
    if setting:
        assert each.verdict.effect.startswith("tis would keep 100% of these tokens")


def test_recommendations_for_heavy_tails_and_differing_routes(tmp_path) -> None:
    rows = gaussian_rows(2e-3)
    for row in rows[::2]:  # one token in 156 that the trainer finds unlikely
        row["logp_trainer"][40] = row["logp_rollout"][40] - 3.0
    each = audited(tmp_path, rows)
    assert (each.verdict.action, each.verdict.setting) == ("correct", "correction.preset=icepop")
    for row in rows:  # two layers, two experts each; the second differs on every fourth token
        routes = np.tile([[0, 1], [2, 3]], (80, 1, 1))
        other = routes.copy()
        other[::4, 1] = [3, 5]
        other[:, 0] = [1, 0]  # another order is no difference
        row["routes_rollout"] = routes.reshape(-1).tolist()
        row["routes_trainer"] = other.reshape(-1).tolist()
        row |= {"route_layers": 2, "route_top_k": 2}
    each = audited(tmp_path, rows)
    assert (each.verdict.action, each.verdict.setting) == ("replay", "replay.mode=r3")
    write_parquet(tmp_path / "replayed.parquet", rows, replayed=True)  # what is left is no routing
    said = audit(tmp_path / "replayed.parquet", {}).verdict
    assert (said.action, said.setting) == ("correct", "correction.preset=icepop")
    assert each.verdict.sentence.endswith("If that cannot be had, correct with icepop.")
    differing = 50 * 19  # of the 78 entries behind the prompt
    assert each.accumulated.routes.routers == differing / (2 * 50 * 78)
    assert each.accumulated.routes.tokens == differing
    assert each.accumulated.routes.per_layer.tolist() == [0, differing]
    assert layers_title(each) == "Layer 1 would choose otherwise most: for 24.4% of tokens"
    for row in rows:  # in both layers
        row["routes_trainer"] = row["routes_trainer"][2:4] * (2 * 80)
    title = "No layer stands out: other experts for at most 100% of tokens"
    assert layers_title(audited(tmp_path, rows)) == title


def layers_title(result) -> str:
    (found,) = [figure for figure in audit_figures([result]) if figure.name == "layers"]
    return found.title


@pytest.mark.parametrize(
    ("planted", "cause"),
    [
        ({"shift": 1}, "shift"),
        ({"temperature": 0.7, "entropy": True}, "temperature"),
        ({}, None),
        ({"noise": 0.6, "entropy": True}, None),
    ],
)
def test_planted_causes_are_named(tmp_path, planted, cause) -> None:
    each = audited(tmp_path, world_rows(1, **planted))
    assert each.verdict.causes == ((cause,) if cause else ())
    assert (each.verdict.action == "bug") == bool(cause)
    if cause:
        assert CAUSES[cause] in each.verdict.sentence
        assert each.verdict.basis[0].startswith(f"{cause}: ")
    missing = "temperature" in " ".join(each.not_checked)
    assert missing == ("entropy" not in planted)


MOVED = {
    "layer": "the layer axis is moved by one",
    "row": "routes are one row late",
    "swap": "swapped",
}


@pytest.mark.parametrize(("temperature", "others"), [(1.0, ()), (0.7, ("temperature",))])
def test_moved_routes_are_named_with_their_evidence(
    tmp_path, subtests, temperature, others
) -> None:
    rows = with_routes(world_rows(1, temperature=temperature, entropy=True))
    for how, words in MOVED.items():
        with subtests.test(how):
            moved = moved_routes(rows, how)
            if how == "swap":
                moved[2:] = rows[2:]
            found = audited(tmp_path, moved).verdict
            assert found.causes == (*others, "routes"), found.text()
            assert words in found.text()


@given(
    seed=st.integers(0, 10**6),
    noise=st.floats(0, 1.0),
    routes=st.floats(0, 0.15),
    newest=st.integers(1, 4),
    steps=st.sampled_from([1, 2, 24]),
)
@examples(15)
def test_a_clean_dump_with_unusual_content_is_not_accused(seed, noise, routes, newest, steps):
    rows = with_routes(world_rows(seed, noise=noise, entropy=True), noise=routes, seed=seed)
    rng = np.random.default_rng(seed)
    for i, row in enumerate(rows):
        before = np.array(row["logp_trainer"]) - rng.exponential(0.3, len(row["tokens"]))
        row |= {"version": int(rng.integers(newest)), "step": i % steps, "turn": 0, "reward": 1.0}
        row |= {"logp_previous": before.tolist(), "logp_native": row["logp_trainer"]}
    with tempfile.TemporaryDirectory() as folder:
        found = audited(Path(folder), rows)
    assert found.verdict.causes in ((), ("routing",), ("numerics",))
    assert found.onset is None


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 3))])
def test_a_clean_run_is_never_accused(tmp_path, seed) -> None:
    """Mismatch differs fourfold between steps, tails are heavy, samples old, logits noisy."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(20):
        kl = 2e-3 * 2 ** rng.uniform(-1, 1)
        for row in gaussian_rows(kl, rows=4, seed=100 * seed + step, step=step):
            tail = rng.exponential(3, 80) * (rng.random(80) < 0.003)
            row["logp_trainer"] = (np.array(row["logp_trainer"]) - tail).tolist()
            rows.append(row | {"version": step - int(rng.integers(2))})
    found = audited(tmp_path, rows)
    assert (found.verdict.causes, found.onset) == ((), None)
    clean = world_rows(seed, noise=rng.random(), entropy=True)
    rows = [row | {"version": i % 3} for i, row in enumerate(clean)]
    assert audited(tmp_path, rows).verdict.causes == ()


def test_versions_that_rise_with_the_steps_are_not_stale(tmp_path) -> None:
    """Early steps have the larger gap, and older weights, as while a learning rate decays."""
    rows = []
    for step in range(4):
        kl = 4e-3 if step < 2 else 1e-5
        rows += gaussian_rows(kl, rows=10, seed=step, step=step, version=step)
    assert audited(tmp_path, rows).verdict.causes == ()
    for row in rows:
        row["step"] = 0
    assert audited(tmp_path, rows).verdict.causes == ("stale",)


def test_a_bug_that_starts_in_mid_training_is_named_with_its_step(tmp_path) -> None:
    rows = []
    for step in range(40):
        rows += gaussian_rows(1e-4, rows=3, seed=step, step=step, reward=float(step))
        if step >= 36:
            for row in rows[-3:]:
                noise = np.random.default_rng(step).random(80)
                row["logp_trainer"] = (-10 - noise * 6).tolist()
                row["logp_rollout"] = [-10.0, *row["logp_trainer"][:-1]]
    assert audited(tmp_path, rows).onset is None  # four steps are not five
    found = audited(tmp_path, rows + [dict(row, step=40) for row in rows[-3:]])
    assert found.onset == 36
    assert found.verdict.causes == ("shift",)
    assert "from step 36 on" in found.verdict.sentence


def test_onset_rule() -> None:
    flat = dict.fromkeys(range(10, 40), 1e-3)

    def onset(value: float, steps: range = range(30, 40)) -> int | None:
        return divergence_onset(flat | dict.fromkeys(steps, value))

    assert onset(1e-3) is None
    assert onset(4.1e-3) == 30
    assert onset(3.9e-3) is None
    assert onset(1.0, range(30, 34)) is None  # four in a row
    flat[12] = 0.1
    assert onset(0.09) is None  # seen at the start too


def test_a_jump_in_a_dump_of_few_steps() -> None:
    few = {0: 1e-3, 1: 2e-3, 2: 1e-3, 3: 9e-3, 4: 0.02, 5: 9e-3}
    assert divergence_onset(few) == 3
    assert divergence_onset(few, dict.fromkeys(few, 4e-4)) == 3
    assert divergence_onset(few, dict.fromkeys(few, 6e-4)) is None  # 9e-3 - 2 * 6e-4 < 4 * 2e-3
    for unknown in (3, 4, 5):  # an infinite k3, in any place
        errors = dict.fromkeys(few, 4e-4) | {unknown: math.nan}
        assert divergence_onset(few | {unknown: math.inf}, errors) is None
    assert divergence_onset(few | {4: 2e-3}) is None
    assert divergence_onset({0: 1e-3, 3: 9e-3, 4: 9e-3, 5: 9e-3}) is None  # one step before
    assert divergence_onset({0: 1e-3, 1: 1e-3, 4: 9e-3, 5: 9e-3}) is None  # two from it on


def test_nested_routes_are_read_from_parquet_and_from_json_lines(tmp_path) -> None:
    """Routes [T][L][K] are those that are flat."""
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    flat = with_routes(gaussian_rows(4e-3, rows=12))
    nested = [dict(row) for row in flat]
    for row in nested:
        for name in ("routes_rollout", "routes_trainer"):
            shape = (len(row["tokens"]), row["route_layers"], row["route_top_k"])
            row[name] = np.asarray(row[name]).reshape(shape).tolist()
    wanted = audited(tmp_path, flat).accumulated.routes
    assert wanted.tokens > 0
    dump = tmp_path / "d.parquet"
    parquet.write_table(arrow.Table.from_pylist(nested), dump)
    for found in (audit(dump, {}), audit(write_jsonl(tmp_path / "n.jsonl", nested), {})):
        assert found.accumulated.routes.per_layer.tolist() == wanted.per_layer.tolist()
        assert found.accumulated.routes.tokens == wanted.tokens
    nested[3]["routes_rollout"][5][1].append(0)
    parquet.write_table(arrow.Table.from_pylist(nested), dump)
    with pytest.raises(UsageError, match="routes_rollout: lists inside of it differ in length"):
        audit(dump, {})


def test_an_audit_counts_tokens_and_rows(tmp_path, subtests) -> None:
    """24 rows of 40 tokens, of which every second was sampled by older weights."""
    found = audited(tmp_path, world_rows(1, stale=0.6, entropy=True)).verdict
    assert "480 tokens were sampled by older weights" in found.text()
    for planted in ({"stale": 0.6}, {"shift": 1}):
        with subtests.test(planted=planted):
            said = audited(tmp_path, world_rows(1, entropy=True, **planted)).verdict
            assert said.action == "bug"
            assert "slot" not in said.text()


def test_weights_that_are_stale_from_a_step_on_are_dated(tmp_path) -> None:
    """6 steps of 16 rows; from step 3 on other weights sampled."""
    sizes = [1e-3] * 3 + [0.05] * 3
    rows = [
        row
        for step, kl in enumerate(sizes)
        for row in gaussian_rows(kl, rows=16, seed=step, step=step)
    ]
    found = audited(tmp_path, rows)
    assert found.onset == 3
    assert "from step 3 on" in found.verdict.sentence
    assert any(note.startswith("k3 diverges at step 3") for note in found.notes)


def test_the_sample_to_diagnose_is_bounded_and_of_whole_rows(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(accumulator, "SAMPLE_TOKENS", 1600)
    each = audited(tmp_path, gaussian_rows(1e-3, rows=300))
    sample = each.accumulated.sample
    assert sample.size == sum(len(row.columns["mask"]) for row in sample.heap) == 1600
    rows = [row.dump_row for row in sample.rows(None)]
    assert rows[-1] > 150  # not the first ones
    assert any("20 rows drawn at random" in line for line in each.notes)
    monkeypatch.setattr(accumulator, "SAMPLE_TOKENS", 1)
    long = audited(tmp_path, gaussian_rows(5e-3, rows=30)).accumulated.sample
    assert len(long.heap) == 12  # as many as a verdict needs


def behind_prompts(rows: list[dict], length: int) -> list[dict]:
    """Return the rows behind prompts that differ."""
    out = []
    for i, row in enumerate(rows):
        ahead = dict.fromkeys(("logp_rollout", "logp_trainer", "entropy"), [0.0] * length)
        ahead |= {"tokens": [i] * length, "mask": [False] * length}
        out.append({name: [*ahead.get(name, []), *values] for name, values in row.items()})
    return out


def hot_at_the_end() -> list[dict]:
    """Return 60 steps of 3 rows of 40 tokens; the last 5 steps were sampled at 1.35."""
    cold, hot = (
        [row for i in range(8) for row in world_rows(i, temperature=t, entropy=True)]
        for t in (1.0, 1.35)
    )
    return [*cold[:165], *hot[165:180]]


def test_long_prompts_do_not_hide_a_bug(tmp_path, monkeypatch) -> None:
    """Prompts once took the room of the rows in which bugs are looked for."""
    monkeypatch.setattr(accumulator, "SAMPLE_TOKENS", 10_000)
    for prompt in (0, 640):
        rows = behind_prompts(hot_at_the_end(), prompt)
        found = audited(tmp_path, [row | {"step": i // 3} for i, row in enumerate(rows)])
        assert (found.onset, found.verdict.causes) == (55, ("temperature",))
        assert not any("drawn at random" in note for note in found.notes)
        size = found.accumulated.sample.size
        assert size == 180 * (40 + min(prompt, 2))
    sampled = found.accumulated.sample.rows(55)
    assert len(sampled) == 15
    assert len({int(row.columns["tokens"][0]) for row in sampled}) == 15  # still other contexts


def test_rows_that_were_not_looked_at_are_no_advice(tmp_path, monkeypatch) -> None:
    """From the onset on, 15 of 180 rows, hardly one is in a sample of 12."""
    monkeypatch.setattr(accumulator, "SAMPLE_TOKENS", 1)
    rows = [row | {"step": i // 3} for i, row in enumerate(hot_at_the_end())]
    found = audited(tmp_path, rows)
    few = len(found.accumulated.sample.rows(55))
    assert few < 12
    assert (found.onset, found.verdict.action) == (55, "unclear")
    assert f"{few} of 15 rows were drawn" in found.verdict.sentence
    assert "audit a dump of the steps from 55 on alone" in found.verdict.sentence
    monkeypatch.setattr(accumulator, "FEW_ROWS", 1)
    rows = []
    for step in range(60):
        rows += gaussian_rows(1e-6 if step < 55 else 3e-4, rows=3, seed=step, step=step)
    found = audited(tmp_path, rows)  # a gap that needs nothing, of rows that nobody looked at
    assert (found.onset, found.accumulated.sample.rows(55)) == (55, [])
    assert found.verdict.action == "unclear"
    assert "0 of 15 rows were drawn" in found.verdict.sentence


def test_steps_add_up_to_the_whole(tmp_path) -> None:
    rows = []
    for step in range(5):
        rows += gaussian_rows(1e-3 * (step + 1), rows=4, seed=step, step=step)
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    each = audited(tmp_path, rows)
    merged = functools.reduce(operator.add, each.accumulated.steps.values())
    whole = each.accumulated.overall.statistics()
    assert whole == merged.statistics()
    assert each.accumulated.histogram.sum() == whole["tokens"]


def test_command_writes_terminal_json_and_html(tmp_path, capsys) -> None:
    rows = []
    for step in range(30):
        kl = 1e-4 if step < 20 else 9e-3
        rows += gaussian_rows(kl, rows=3, seed=step, step=step, reward=1.0)
    write_parquet(tmp_path / "a.parquet", rows)
    renamed = [{("ours" if k == "mask" else k): v for k, v in row.items()} for row in rows[:9]]
    write_jsonl(tmp_path / "b.jsonl", renamed)
    out = tmp_path / "out"
    assert main(["audit", str(tmp_path / "a.parquet"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "k3 diverges at step 20" in printed.replace("\n", " ")
    tree = json.loads((out / "audit.json").read_text())
    assert tree["onset"] == 20
    # judged where it diverges: 9e-3, not the mean, 3e-3
    assert re.search(r"from step 20 on, [789]\.\d*e-3 ", tree["verdict"]["sentence"])
    assert tree["overall"]["k3"] == pytest.approx((1e-4 * 20 + 9e-3 * 10) / 30, rel=0.2)
    assert [step["step"] for step in tree["steps"]] == list(range(30))
    assert tree["steps"][0]["reward"] == 1.0
    page = (out / "audit.html").read_text()
    assert tree["verdict"]["sentence"] in page
    assert 'id="fig-f2"' not in page  # no token is off by more than a factor of 2
    for figure in ("f_tau", "k3", "reward"):
        assert f'id="fig-{figure}"' in page
    assert main(["audit", str(tmp_path / "b.jsonl"), "--columns", "mask=ours"]) == 0
    assert main(["audit", str(tmp_path / "b.jsonl")]) == 2
    assert "column mask is missing" in capsys.readouterr().err
    assert main(["audit", str(tmp_path / "b.jsonl"), "--columns", "masks=ours"]) == 2


def test_an_identical_dump_may_be_a_copy(tmp_path) -> None:
    rows = [row | {"logp_trainer": row["logp_rollout"]} for row in gaussian_rows(1e-3, rows=3)]
    write_parquet(tmp_path / "d.parquet", rows)
    assert main(["audit", str(tmp_path / "d.parquet"), "--out", str(tmp_path / "out")]) == 0
    tree = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert tree["verdict"]["action"] == "unclear"
    assert "Is one a copy of the other?" in tree["verdict"]["sentence"]
    assert tree["overall"]["k3"] == 0


def test_two_dumps_side_by_side(tmp_path) -> None:
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path, kl in zip(paths, (1e-4, 4e-3), strict=True):
        write_parquet(path, gaussian_rows(kl))
    console = Console(record=True, width=120)
    both = run_audit(paths, {}, tmp_path / "out", console)
    assert [each.verdict.action for each in both] == ["nothing", "correct"]
    text = " ".join(console.export_text().split())
    drawn = {f.name: f for f in audit_figures(both)}
    assert isinstance(drawn["f_tau"], Figure)
    assert [line["name"] for line in drawn["f_tau"].data[:2]] == ["a.parquet", "b.parquet"]
    assert isinstance(drawn["k3"], Absent)
    tree = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert [each["verdict"]["action"] for each in tree["dumps"]] == ["nothing", "correct"]
    gap = tree["differences"]["k3"]
    assert gap["low"] < 4e-3 - 1e-4 < gap["high"]
    assert gap["high"] - gap["low"] < 1e-3
    assert "k3 is larger in b.parquet than in a.parquet: " in text
    same = run_audit([paths[0], paths[0]], {}, None, Console(record=True, width=120))
    assert "no difference is shown" in describe_difference(same)


def padded(rows: list[dict], by: int) -> list[dict]:
    """Return the rows with entries outside the mask behind them: one side's experts are all 0."""
    rng, out = np.random.default_rng(0), []
    for row in rows:
        layers, top_k = row["route_layers"], row["route_top_k"]
        ids = rng.random((by, layers, 16)).argsort(-1)[..., :top_k].reshape(-1)
        behind = {"tokens": [0], "mask": [False], "routes_rollout": [0] * layers * top_k}
        behind |= {name: [0.0] for name in ("logp_rollout", "logp_trainer", "entropy")}
        longer = {name: row[name] + value * by for name, value in behind.items()}
        out.append(row | longer | {"routes_trainer": row["routes_trainer"] + ids.tolist()})
    return out


def test_routes_outside_the_mask_may_be_anything(tmp_path) -> None:
    rows = padded(with_routes(world_rows(1, entropy=True)), 60)
    found = audited(tmp_path, rows)
    assert found.verdict.action == "nothing", found.verdict.text()
    rows[0]["routes_trainer"][-1] = -100
    assert audited(tmp_path, rows).verdict.action == "nothing"
    rows[0]["routes_trainer"][0] = -100
    with pytest.raises(UsageError, match=r"row 0, column routes_trainer: entry 0 is -100"):
        audited(tmp_path, rows)


def test_odd_rows_are_found_though_each_is_alone_in_its_step(tmp_path) -> None:
    rows = [row for seed in range(5) for row in world_rows(seed, entropy=True)]
    rows += [row for seed in (5, 6) for row in world_rows(seed, noise=0.5, entropy=True)]
    order = np.random.default_rng(0).permutation(len(rows))
    steps = [rows[at] | {"step": step} for step, at in enumerate(order)]
    assert audited(tmp_path, steps).verdict.causes == ("stale",)


def test_no_group_of_steps_is_small(subtests) -> None:
    for counts in ([24, 24, 1], [30, 3], [1] * 25, [5], [12, 12], [11, 1, 11, 1]):
        steps = [step for step, count in enumerate(counts) for _ in range(count)]
        rows = [SampledRow(0.0, at, step, {}) for at, step in enumerate(steps)]
        with subtests.test(counts=counts):
            sizes = _groups_of_steps(rows).bincount().tolist()
            assert min(sizes) >= min(len(rows), 12)
            assert sum(sizes) == len(rows)


def test_a_gap_of_rounding_does_not_diverge(tmp_path) -> None:
    rows = [
        row | {"step": step}
        for step in range(30)
        for row in gaussian_rows(1e-13 if step < 20 else 1e-12, rows=4, seed=step)
    ]
    assert audited(tmp_path, rows).onset is None


def test_files_of_two_models_are_refused(tmp_path) -> None:
    for name, change, words in (
        ("route_top_k", {"k": 2}, "changes from 4 to 2"),
        ("route_layers", {"layers": 3}, "changes from 4 to 3"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        write_parquet(folder / "1.parquet", with_routes(world_rows(1)))
        write_parquet(folder / "2.parquet", with_routes(world_rows(2), **change))
        with pytest.raises(UsageError, match=f"column {name}: {words} inside the dump"):
            audit(folder, {})


def test_rows_of_a_file_have_the_same_columns(tmp_path):
    rows = gaussian_rows(4e-3)
    rows[3] = {name: value for name, value in rows[3].items() if name != "entropy"}
    with pytest.raises(UsageError, match="row 3 or row 0 lacks entropy"):
        write_parquet(tmp_path / "d.parquet", rows)
