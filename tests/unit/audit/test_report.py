"""The report of an audit: verdict first, clear badges, titles that follow the data, pictures."""

import math
import re

import pytest
import torch

from onepolicy.audit.figures import audit_figures
from onepolicy.audit.report import write_report
from onepolicy.audit.run import audit, run_audit
from onepolicy.cli import main
from onepolicy.console import Console
from onepolicy.record.schema import write_parquet
from onepolicy.report.figures.parts import Figure
from onepolicy.report.words import BADGES
from support.audit_dumps import gaussian_rows, with_routes, write_jsonl
from support.paths import ROOT


def far_rows():
    """Return rows of which every fourth was sampled by other weights."""
    return [row for i in range(40) for row in gaussian_rows(4e-3 if i % 4 else 0.3, rows=1, seed=i)]


@pytest.mark.parametrize(
    ("rows", "badge"), [(gaussian_rows(4e-3), "correct it"), (far_rows(), "bug")]
)
def test_the_verdict_comes_first(tmp_path, rows, badge) -> None:
    console = Console(record=True, width=100)
    (found,) = run_audit([write_jsonl(tmp_path / "d.jsonl", rows)], {}, tmp_path / "out", console)
    text = console.export_text()
    assert text.lstrip().startswith(badge.upper())  # older rich prints an empty line first
    assert text.index(found.verdict.sentence[:40]) < text.index("Tokens compared")
    page = (tmp_path / "out" / "audit.html").read_text()
    assert re.search(
        rf'class="card verdict {found.verdict.action}".*\n<p class="badge">{badge}<', page
    )


def test_the_effect_of_a_correction_is_no_reason_for_it(tmp_path) -> None:
    console = Console(record=True, width=200)
    run_audit([write_jsonl(tmp_path / "d.jsonl", gaussian_rows(4e-3))], {}, None, console)
    lines = [line.strip() for line in console.export_text().splitlines()]
    (effect,) = [line for line in lines if "multiply the step by" in line]
    assert effect.startswith("tis would keep 100% of these tokens")
    assert not [line for line in lines if line.startswith("Because tis")]


IN_TRL = (
    'In TRL 1.16: replay is op_trl.attach(trainer, replay="r3"); tis is GRPOConfig(vllm_importa'
)
IN_VERL = (
    "In verl 0.9.1: replay is actor_rollout_ref.rollout.enable_rollout_routing_replay=true, on FSDP"
)
IN_SLIME = (
    "In miles / slime: replay is --use-rollout-routing-replay, in miles on FSDP with the setup"
)
IN_ALL = "`onepolicy config preset tis` says it in the settings of verl, miles, TRL and others."


@pytest.mark.parametrize(
    ("written_by", "options", "line"),
    [
        ("trl", [], IN_TRL),
        ("verl", [], IN_VERL),
        ("trl", ["--from", "verl"], IN_VERL),
        ("", ["--from", "slime"], IN_SLIME),
        ("", [], IN_ALL),
        ("\x1b[2Jsomebody's", [], IN_ALL),
    ],
)
def test_advice_is_in_the_settings_of_the_trainer(
    tmp_path, capsys, monkeypatch, written_by, options, line
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    dump = tmp_path / "d.parquet"
    write_parquet(dump, gaussian_rows(4e-3), framework=written_by)
    assert main(["audit", str(dump), *options]) == 0
    lines = [each.strip() for each in capsys.readouterr().out.splitlines()]
    at = lines.index("Set: correction.preset=tis")
    assert lines[at + 1].startswith(line)
    assert ("tis is " in lines[at + 1]) == (line != IN_ALL)


def test_an_unknown_trainer_is_named(tmp_path, capsys) -> None:
    dump = write_jsonl(tmp_path / "d.jsonl", gaussian_rows(4e-3))
    assert main(["audit", str(dump), "--from", "trll"]) == 2
    said = capsys.readouterr().err
    assert "--from: give one of verl, miles, trl" in said
    assert "did you mean trl?" in said


def test_the_way_to_the_entropy_is_named_and_is_right(tmp_path) -> None:
    """The line of docs/audit.md on logits log 3 and 0: p is 3/4 and 1/4."""
    said = audit(write_jsonl(tmp_path / "d.jsonl", gaussian_rows(3e-4, entropy=False)), {}).verdict
    assert said.action == "unclear"
    (page,) = re.findall(r"docs/\w+\.md", said.sentence)
    (line,) = re.findall(r"`(torch\.[^`]*entropy\(\))`", (ROOT / page).read_text(encoding="utf-8"))
    found = eval(line, {"torch": torch, "logits": torch.tensor([math.log(3), 0.0])})
    assert float(found) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def test_two_audits_fit_80_columns(tmp_path) -> None:
    dumps = [
        write_jsonl(tmp_path / f"{name}.jsonl", gaussian_rows(kl))
        for name, kl in (("a_clean_dump_of_long_name", 4e-3), ("another_of_stale_weights", 8e-3))
    ]
    console = Console(record=True, width=80)
    run_audit(dumps, {}, None, console)
    lines = console.export_text().splitlines()
    assert "A: a_clean_dump_of_long_name.jsonl, B: another_of_stale_weights.jsonl" in lines
    (head,) = [line for line in lines if "95% interval" in line]
    assert re.findall(r"[^\W_]+", head) == ["A", "B", "B", "A", "95", "interval"]
    cell = next(line for line in lines if "k3, nats per token" in line)
    assert re.search(r"\d \[[-\de.]+, [-\de.]+\]", cell)


def test_numbers_near_1_have_their_digits(tmp_path) -> None:
    console = Console(record=True, width=100)
    run_audit([write_jsonl(tmp_path / "d.jsonl", gaussian_rows(4e-3))], {}, None, console)
    assert re.search(r"Correlation of probabilities *\W *0\.994\d\D", console.export_text())


def test_the_side_of_the_gap_is_in_the_table(tmp_path) -> None:
    rows = gaussian_rows(1e-4, rows=1)
    row = rows[0] | {"mask": [True] * 80, "logp_rollout": [-1.0] * 80}
    row["logp_trainer"] = [-1.5] * 40 + [-1.25] * 40
    console = Console(record=True, width=100)
    run_audit([write_jsonl(tmp_path / "d.jsonl", [row])], {}, None, console)
    text = console.export_text()
    for share, value in (("1%", -0.5), ("99%", -0.25)):
        (told,) = re.findall(rf" {share} quantile of log rho, nats *\W* (-\S+)", text)
        assert float(told) == pytest.approx(value, rel=0.02)


def test_no_badge_can_be_read_as_all_is_well() -> None:
    assert [name for name, words in BADGES.items() if words in ("correct", "replay")] == []
    assert BADGES["correct"] == "correct it"


def drawn(tmp_path, rows) -> dict[str, Figure]:
    figures = audit_figures([audit(write_jsonl(tmp_path / "d.jsonl", rows), {})])
    return {each.name.partition("_")[0]: each for each in figures if isinstance(each, Figure)}


def test_the_picture_of_rows_and_positions_shows_far_rows(tmp_path) -> None:
    picture = drawn(tmp_path, far_rows())["rows"]
    (cells,) = picture.data
    assert cells["type"] == "heatmap"
    means = [sum(10**cell for cell in row if cell is not None) / len(row) for row in cells["z"]]
    assert len(means) == 40
    assert {i for i, mean in enumerate(means) if mean > 0.25} == set(range(0, 40, 4))
    assert picture.title == "10 of 40 rows are 5 times farther apart than the middle one"
    assert "No row and no place" in drawn(tmp_path, gaussian_rows(4e-3))["rows"].title


def test_far_positions_are_named_and_unequal_rows_are_drawn(tmp_path) -> None:
    rows = gaussian_rows(1e-4, rows=30)
    for i, row in enumerate(rows):
        for at in range(2, 6):
            row["logp_trainer"][at] -= 1.0
        row["mask"] = [at >= 2 and at < 40 + i for at in range(80)]
    picture = drawn(tmp_path, rows)["rows"]
    assert picture.title.startswith("1 of 15 stretches of 4 tokens is 5 times farther apart")
    assert {len(row) for row in picture.data[0]["z"]} == {17}


@pytest.mark.parametrize(("far", "word"), [(range(40, 80), "grows"), (range(40), "falls")])
def test_a_far_half_is_named_and_small_gaps_are_visible(tmp_path, far, word) -> None:
    rows = gaussian_rows(1e-4, rows=30)
    for row in rows:
        for at in far:
            row["logp_trainer"][at] -= 1.0
    picture = drawn(tmp_path, rows)["rows"]
    assert picture.title.startswith(f"The gap {word} ")
    (trace,) = picture.data
    assert trace["colorscale"] == "Viridis"  # the page's own colours are what an ended row shows
    known = [cell for row in trace["z"] for cell in row if cell is not None]
    assert min(known) <= trace["zmin"] < trace["zmax"] <= max(known)  # the whole scale is used


def test_growth_along_the_answer_is_in_the_title_and_among_the_grounds(tmp_path) -> None:
    """The mean of the first 10 of 80 places is 0.01 nats, that of the last 10 is 0.115."""
    rows = gaussian_rows(1e-4, rows=30, length=82)
    for row in rows:
        for at in range(80):
            row["logp_trainer"][at + 2] = row["logp_rollout"][at + 2] - 0.01 - 0.015 * (at // 10)
    said = "The gap grows 11.5 times from the first eighth of the rows to the last"
    assert drawn(tmp_path, rows)["rows"].title == said
    console = Console(record=True, width=100)
    run_audit([tmp_path / "d.jsonl"], {}, None, console)
    assert f"  {said}.\n" in console.export_text()


def test_titles_follow_the_data(tmp_path) -> None:
    near = drawn(tmp_path, gaussian_rows(1e-4, rows=100))
    assert near["f"].title == "No token is off by more than a factor of 2"
    far = drawn(tmp_path, gaussian_rows(0.3, rows=100))["f"].title
    assert "% of the tokens are off by more than a factor of 2" in far
    assert not far.startswith("0% of")


def test_routers_of_an_audit_would_choose_otherwise(tmp_path) -> None:
    found = audit(write_jsonl(tmp_path / "d.jsonl", with_routes(gaussian_rows(4e-3, rows=12))), {})
    page = write_report(tmp_path / "out", [found])[1].read_text(encoding="utf-8")
    assert "Routes that would differ" in page
    assert "Routes that differ" not in page
