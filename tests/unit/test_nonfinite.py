"""Values that are not finite: one parameter, one count and one sentence everywhere."""

import copy
import json
import math

import pytest
import torch

import onepolicy as op
from onepolicy.audit.accumulator import accumulate_dump
from onepolicy.audit.run import audit, run_audit
from onepolicy.cli import main
from onepolicy.console import Console
from onepolicy.nonfinite import LeftOut
from onepolicy.record.schema import write_parquet
from support.audit_dumps import gaussian_rows, write_jsonl

NAN, INF = math.nan, math.inf
OLD = torch.tensor([[-1.0, NAN, -2.0, -1.0], [-3.0, -1.0, NAN, -1.0]])
ROLLOUT = torch.tensor([[-1.5, -INF, -2.0, NAN], [INF, -1.0, NAN, -1.0]])
MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])
"""Masked-in: NaN and -inf in one slot, and an infinite rollout in another. The other two that are
not finite are outside the mask."""
SENTENCE = (
    "2 of 5 tokens are left out: a value is NaN, infinite or null (logp_old 1, logp_rollout 1)"
)
ALLOWED = op.preset("tis", max_nonfinite=1.0)


def test_the_rest_is_measured_and_the_others_are_counted():
    """Left are three slots with log rho = 0.5, 0, 0."""
    found = op.mismatch(OLD, ROLLOUT, MASK)
    assert found.tokens == 3
    assert found.k3 == pytest.approx((math.exp(0.5) - 1.5) / 3)
    assert found.nonfinite.count == 2
    assert str(found.nonfinite) == SENTENCE
    applied = op.reweight(OLD, ROLLOUT, MASK, ALLOWED)
    assert applied.keep.tolist() == [[True, False, True, False], [False, True, False, False]]
    assert applied.weight[0].tolist() == pytest.approx([math.exp(0.5), 0, 1, 0])
    assert applied.denominator == 5  # rejecting some never makes the others louder
    assert str(applied.nonfinite) == SENTENCE


def calls(old, rollout, mask):
    """Return a call of each function that takes both sides."""
    segment = torch.zeros_like(mask[0]).long()
    live = op.preset("pg-tis").live_part
    return {
        "mismatch": lambda **more: op.mismatch(old, rollout, mask, **more),
        "diagnose": lambda **more: op.diagnose(old, rollout, mask, **more),
        "reweight": lambda **more: op.reweight(old, rollout, mask, ALLOWED, **more),
        "live_weights": lambda **more: op.live_weights(old, rollout, mask, live, **more),
        "slots": lambda **more: op.slots(old[0], rollout[0], mask[0], segment=segment, **more),
    }


def test_raise_names_the_first_value_and_skip_is_the_default(subtests):
    for name, call in calls(OLD, ROLLOUT, MASK).items():
        with subtests.test(name):
            call()
            call(nonfinite="skip")
            side = r"logp_\w+ is not finite on 1 of [35] masked-in slots, first .*1.*: nan"
            with pytest.raises(op.UsageError, match=f"{name}: {side}"):
                call(nonfinite="raise")
            with pytest.raises(op.UsageError, match=f"{name}: nonfinite is 'drop', expected 'sk"):
                call(nonfinite="drop")
    fine = OLD.nan_to_num(-1.0), ROLLOUT.nan_to_num(-1.0, -1.0, -1.0)
    for name, call in calls(*fine, MASK).items():
        with subtests.test(f"{name}, all finite"):
            call(nonfinite="raise")
    outside = MASK & OLD.isfinite() & ROLLOUT.isfinite()
    for name, call in calls(OLD, ROLLOUT, outside).items():
        with subtests.test(f"{name}, outside the mask"):
            call(nonfinite="raise")


def test_probabilities_in_the_place_of_their_logarithms_are_refused(subtests):
    """A slot outside the mask may hold anything. A diagnosis names probabilities as the cause."""
    old, rollout = torch.full((1, 9), 0.25), torch.full((1, 9), 0.5)
    few = torch.tensor([[False, *[True] * 4, *[False] * 4]])
    high = torch.full((1, 9), -1.0)
    high[0, 4] = 0.2
    small, every = torch.full((1, 9), 0.02), torch.full((1, 9), True)
    logarithm = "a log-probability is never above 0"
    cases = {
        "four": (old, rollout, few, 1, "0.25: all values are between 0 and 1: probabilities"),
        "small": (small, small, every, 0, "0.02: all values are between 0 and 1: probabilities"),
        "one": (high, old - 2, every, 4, f"0.2: {logarithm}; mend what returned it, or clear the"),
        "-log p": (high, 4 * rollout, few, 4, f"0.2: {logarithm}; mend what returned it"),
        "negated": (-high - 2, rollout * 3, few, 1, f"1.5: {logarithm}; negative log-likel"),
    }
    for case, (left, right, mask, slot, words) in cases.items():
        for name, call in calls(left, right, mask).items():
            if name != "diagnose":
                where = rf"{name}: logp_\w+ \[(0, )?{slot}\] is {words}"
                with subtests.test(name, case=case), pytest.raises(op.UsageError, match=where):
                    call()


def test_probabilities_that_have_a_gradient_are_refused_without_a_warning(recwarn):
    old = torch.full((1, 9), 0.25, requires_grad=True)
    for name, call in calls(old, torch.full((1, 9), 0.5), torch.full((1, 9), True)).items():
        if name != "diagnose":
            with pytest.raises(op.UsageError, match="all values are between 0 and 1"):
                call()
    assert [str(each.message) for each in recwarn] == []


def test_rounding_and_log_ratios_are_not_refused(subtests):
    """Rounding leaves certain tokens just above 0, in bfloat16 by 1e-3 and more."""
    certain = torch.tensor([[9.0, *[2e-3] * 3, *[0.0] * 5], [9.0, 0.09, *[-1.0] * 7]])
    mask = torch.tensor([[False, *[True] * 6, False, False], [False, *[True] * 8]])
    fine = {
        "rounding": (certain, certain.flip(1), mask & mask.flip(1)),
        "a log-ratio": (certain + 3, torch.zeros(2, 9), mask),
        "its inverse": (torch.zeros(2, 9), certain + 3, mask),
        "nothing above": (torch.zeros(2, 9), torch.zeros(2, 9), mask),
    }
    for case, (left, right, here) in fine.items():
        for name, call in calls(left, right, here).items():
            with subtests.test(name, case=case):
                found = call()
                if name == "diagnose" and case == "rounding":
                    assert not found.findings


def test_nothing_left_is_an_error():
    words = r"mismatch: 5 of 5 tokens are left out.*\(logp_rollout 5\); there is nothing to compare"
    with pytest.raises(op.UsageError, match=words):
        op.mismatch(torch.zeros(2, 4), torch.full((2, 4), NAN), MASK)


def test_counts_add_up_and_name_the_first_column():
    parts = LeftOut(10, {"a": 2}) + LeftOut(5, {"b": 1, "a": 1})
    assert (parts.tokens, parts.count, dict(parts.columns)) == (15, 4, {"a": 3, "b": 1})
    assert (parts.share("a"), parts.share("a", "b", "c")) == (0.2, 4 / 15)
    assert LeftOut().share("a") == 0


def pairs(count=400):
    generator = torch.Generator().manual_seed(0)
    logp = -2 - 3 * torch.rand(count, generator=generator).double()
    noise = 0.1 * torch.randn(count, generator=generator).double()
    return logp, logp + noise, torch.ones(count, dtype=torch.bool), torch.arange(count) // 20


FEW_AND_MANY = [(400, 4, []), (400, 6, ["fill"]), (700, 7, []), (700, 8, ["fill"])]


@pytest.mark.parametrize(("count", "broken", "causes"), [*FEW_AND_MANY, (400, 200, ["fill"])])
def test_more_than_single_tokens_are_a_finding(count, broken, causes):
    """More than 1% of the slots, and 6 or more of them."""
    trainer, rollout, mask, segment = pairs(count)
    at = torch.arange(count) < broken
    clean = op.diagnose(trainer, rollout, mask & ~at, segment=segment)
    found = op.diagnose(trainer, rollout.masked_fill(at, NAN), mask, segment=segment)
    assert [each.cause for each in found.findings] == causes
    assert found.gap == clean.gap
    assert found.marks == clean.marks  # the rest is judged as if the others were not there
    assert found.nonfinite.count == broken
    assert str(found.nonfinite) in found.text()


def test_a_few_tokens_of_a_short_batch_are_no_finding():
    trainer, rollout, mask, segment = pairs(40)
    few, many = (torch.arange(40) < count for count in (5, 6))
    found = op.diagnose(trainer.masked_fill(few, -INF), rollout, mask, segment=segment)
    assert not found.bug
    found = op.diagnose(trainer.masked_fill(many, -INF), rollout, mask, segment=segment)
    assert [each.cause for each in found.findings] == ["fill"]
    nothing = op.diagnose(trainer * NAN, rollout, mask, segment=segment)
    assert [each.cause for each in nothing.findings] == ["fill"]
    assert math.isnan(nothing.gap)


def test_a_missing_entropy_accuses_and_clears_no_cause():
    trainer, rollout, mask, segment = pairs()
    entropy = -trainer.clone()
    entropy[:40] = NAN
    found = op.diagnose(trainer, rollout, mask, segment=segment, entropy=entropy)
    mask &= entropy.isfinite()
    rest = op.diagnose(trainer, rollout, mask, segment=segment, entropy=entropy)
    assert (found.findings, found.marks, found.gap) == (rest.findings, rest.marks, rest.gap)
    assert dict(found.nonfinite.columns) == {"entropy": 40}
    with pytest.raises(op.UsageError, match=r"360 of 360 .*\(entropy 360\); .*leave the argument"):
        op.diagnose(trainer, rollout, mask, segment=segment, entropy=entropy * NAN)


# --- audits ---------------------------------------------------------------------------------------

NOTE = "3 of 3,900 tokens are left out: a value is NaN, infinite or null"


def broken_rows(value=None):
    """Return rows of which three tokens lack a value. Prompts lack theirs, outside the mask."""
    rows = gaussian_rows(4e-3)
    rows[3]["logp_rollout"][20] = rows[9]["logp_trainer"][2] = rows[9]["entropy"][5] = value
    return rows


def written(path, rows):
    if path.suffix == ".jsonl":
        return write_jsonl(path, rows)
    write_parquet(path, rows)
    return path


def test_an_audit_judges_the_rest(tmp_path, subtests):
    """The verdict is that of a dump whose mask is cleared there."""
    cleared = gaussian_rows(4e-3)
    for row, entry in ((3, 20), (9, 2), (9, 5)):
        cleared[row]["mask"][entry] = False
    wanted = audit(write_jsonl(tmp_path / "wanted.jsonl", cleared), {})
    cases = ((".jsonl", None), (".jsonl", NAN), (".parquet", None), (".parquet", -INF))
    for suffix, value in cases:
        with subtests.test(suffix=suffix, value=value):
            found = audit(written(tmp_path / f"d{suffix}", broken_rows(value)), {})
            assert found.verdict.sentence == wanted.verdict.sentence
            assert found.verdict.action == "correct"
            assert found.accumulated.overall.tokens == 3897
            columns = {"logp_rollout": 1, "logp_trainer": 1, "entropy": 1}
            assert dict(found.accumulated.nonfinite.columns) == columns
            assert [note for note in found.notes if note.startswith(NOTE)]
            assert not [note for note in wanted.notes if "left out" in note]


def test_blocks_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr("onepolicy.record.formats.BLOCK_TOKENS", 200)
    path = write_jsonl(tmp_path / "d.jsonl", broken_rows())
    left = accumulate_dump(path, {}).nonfinite
    assert (left.tokens, left.count) == (3900, 3)


def test_every_report_says_it(tmp_path):
    console = Console(record=True, width=200)
    path = write_jsonl(tmp_path / "d.jsonl", broken_rows())
    run_audit([path], {}, tmp_path / "out", console)
    assert NOTE in console.export_text()
    assert NOTE in (tmp_path / "out" / "audit.html").read_text()
    tree = json.loads((tmp_path / "out" / "audit.json").read_text())
    columns = {"logp_rollout": 1, "logp_trainer": 1, "entropy": 1}
    assert tree["nonfinite"] == {"tokens": 3, "columns": columns}


def test_an_audit_that_is_strict_names_the_first(tmp_path, capsys):
    path = write_jsonl(tmp_path / "d.jsonl", broken_rows(-INF))
    assert main(["audit", str(path), "--nonfinite", "raise"]) == 2
    error = capsys.readouterr().err
    assert f"{path}: row 3, column logp_rollout: entry 20 is -inf: not a finite number" in error
    assert "--nonfinite skip" in error
    assert main(["audit", str(path)]) == 0
    assert main(["audit", "--conformance", "kit", "--nonfinite", "raise"]) == 2
    assert "takes no dump, --columns, --from, --format, --nonfinite" in capsys.readouterr().err


def test_an_audit_of_many_missing_values_is_a_bug_and_judges_the_rest(tmp_path):
    rows = gaussian_rows(4e-3)
    clean = audit(write_jsonl(tmp_path / "clean.jsonl", rows), {})
    for row in rows:
        row["logp_trainer"][40] = None
    found = audit(write_jsonl(tmp_path / "d.jsonl", rows), {})
    assert found.verdict.causes == ("fill",)
    evidence = "50 of 3,900 log-probabilities are NaN, infinite or null, more than single tokens"
    assert evidence in found.verdict.basis[0]
    assert found.accumulated.overall.tokens == 3850
    assert found.verdict.sentence.startswith("A bug, not mismatch: log-probabilities are missing")
    assert clean.verdict.action == "correct"


def test_a_dump_without_a_finite_token_is_refused(tmp_path):
    rows = copy.deepcopy(gaussian_rows(4e-3, rows=2))
    for row in rows:
        row["logp_trainer"] = [None] * 80
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    with pytest.raises(op.UsageError, match=r"156 of 156 tokens are left out.*logp_trainer 156"):
        audit(path, {})
