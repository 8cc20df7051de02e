"""The conformance kit: the audit gives its verdicts and numbers, and a difference is named."""

import json
import math
import os
import shutil

import pyarrow.parquet as pq
import pytest

from onepolicy.audit.conformance import EXPECTED, check_conformance
from onepolicy.cli import main
from onepolicy.config import UsageError
from onepolicy.verdict.scored_tokens import CAUSES
from support.paths import ROOT

KIT = ROOT / "conformance"


@pytest.fixture
def kit(tmp_path):
    """Return a kit of three dumps of ours."""
    expected = json.loads((KIT / EXPECTED).read_text())
    names = ["embedded_bfloat16.parquet", "clean_small.parquet", "one_token_late.parquet"]
    for name in names:
        shutil.copy(KIT / name, tmp_path)
    (tmp_path / EXPECTED).write_text(json.dumps({name: expected[name] for name in names}))
    return tmp_path


def test_every_dump_conforms():
    outcomes = check_conformance(KIT)
    assert {outcome.dump for outcome in outcomes} == {path.name for path in KIT.glob("*.parquet")}
    assert [outcome for outcome in outcomes if not outcome.conforms] == []
    found = {outcome.found for outcome in outcomes}
    assert {"nothing", "correct", "unclear", "refused"} <= found


def test_a_pipeline_ends_at_the_verdicts_that_it_names(capsys):
    hot, sound = str(KIT / "temperature.parquet"), str(KIT / "clean_small.parquet")
    assert main(["audit", hot, "--fail-on", "correct"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Divide the trainer's logits by the sampling temperature. If it does that" in said
    assert main(["audit", hot, sound, "--fail-on", "unclear", "--fail-on", "bug"]) == 1
    assert main(["audit", sound, "--fail-on", "bug"]) == 0


def test_expectations_in_a_pipe_are_refused(tmp_path):
    os.mkfifo(tmp_path / EXPECTED)
    with pytest.raises(UsageError, match="is a folder, a device or a pipe"):
        check_conformance(tmp_path)


def test_every_cause_has_a_dump():
    """Probabilities in the place of logarithms are refused before there is a verdict."""
    expected = json.loads((KIT / EXPECTED).read_text())
    bugs = [each["causes"] for each in expected.values() if each["action"] == "bug"]
    causes = {cause for found in bugs for cause in found}
    assert causes == set(CAUSES) - {"not_log"}
    assert "probabilities" in expected["probabilities.parquet"]["refused"]


def test_a_real_engine_has_a_gap_that_replay_closes():
    expected = json.loads((KIT / EXPECTED).read_text())
    without, replayed = (
        expected[f"other_experts{name}.parquet"]["numbers"]["k3"] for name in ("", "_replayed")
    )
    assert without > 1e-3 > 1e-4 > replayed > 0
    found = expected["other_experts.parquet"]
    assert (found["action"], found["causes"]) == ("replay", ["routing"])


def test_a_dump_that_must_be_refused_and_is_not_is_an_error(kit, capsys):
    path = kit / EXPECTED
    expected = json.loads(path.read_text())
    expected["clean_small.parquet"] |= {"action": "refused", "numbers": {}, "refused": "logarithm"}
    path.write_text(json.dumps(expected))
    assert main(["audit", "--conformance", str(kit)]) == 1
    assert "refused" in capsys.readouterr().out
    shutil.copy(KIT / "probabilities.parquet", kit / "clean_small.parquet")
    assert main(["audit", "--conformance", str(kit)]) == 0
    expected["clean_small.parquet"]["refused"] = "another reason"
    path.write_text(json.dumps(expected))
    assert main(["audit", "--conformance", str(kit)]) == 2


def test_the_numbers_are_those_of_the_page():
    """The definitions of docs/audit.md, in plain Python."""
    name = "embedded_int8.parquet"
    expected = json.loads((KIT / EXPECTED).read_text())[name]["numbers"]
    log_ratios = [
        trainer - rollout
        for row in pq.read_table(KIT / name).to_pylist()
        for kept, trainer, rollout in zip(
            row["mask"], row["logp_trainer"], row["logp_rollout"], strict=True
        )
        if kept
    ]
    n, ratios = len(log_ratios), [math.exp(value) for value in log_ratios]
    squares = sum(ratio**2 for ratio in ratios)
    assert expected["tokens"] == n
    assert expected["k1"] == pytest.approx(-sum(log_ratios) / n, rel=1e-5)
    assert expected["k3"] == pytest.approx(
        sum(math.expm1(value) - value for value in log_ratios) / n, rel=1e-5
    )
    assert expected["chi2"] == pytest.approx(squares / n - 1, rel=1e-5)
    assert expected["ess"] == pytest.approx(sum(ratios) ** 2 / (n * squares), rel=1e-5)
    far = sum(max(ratio, 1 / ratio) > 1.25 for ratio in ratios)
    assert expected["f1.25"] == pytest.approx(far / n)


def test_another_verdict_and_another_number_are_named(kit, capsys):
    assert main(["audit", "--conformance", str(kit)]) == 0
    assert "3 of 3 dumps conform" in capsys.readouterr().out
    path = kit / EXPECTED
    expected = json.loads(path.read_text())
    expected["clean_small.parquet"]["action"] = "replay"
    expected["one_token_late.parquet"]["numbers"]["k3"] *= 1.001
    path.write_text(json.dumps(expected))
    assert main(["audit", "--conformance", str(kit)]) == 1
    text = capsys.readouterr().out
    assert "1 of 3 dumps conform" in text
    assert "k3" in text


def test_what_is_no_kit_is_named(kit, capsys):
    assert main(["audit", "--conformance", str(kit / "other")]) == 2
    assert "expected.json" in capsys.readouterr().err
    (kit / EXPECTED).write_text("{}]")
    assert main(["audit", "--conformance", str(kit)]) == 2
    assert main(["audit", "--conformance", str(kit), "--png"]) == 2
    assert main(["audit"]) == 2
    assert "give a file or folder" in capsys.readouterr().err
