"""Runs that sample while they learn: old tokens that are declared are not taken for a bug."""

import pytest

from onepolicy.audit.report import audit_tree
from onepolicy.audit.run import audit
from onepolicy.config import UsageError
from onepolicy.record.schema import write_parquet
from support.audit_dumps import gaussian_rows, moved_routes, with_routes, world_rows


def audited(tmp_path, rows):
    write_parquet(tmp_path / "dump.parquet", rows)
    return audit(tmp_path / "dump.parquet", {})


def trained(rows, version):
    return [row | {"trained_version": version} for row in rows]


def test_declared_age_is_not_a_bug(tmp_path):
    """Half of a step's tokens are one update old, with most of the gap; then all of them are."""
    newest = gaussian_rows(1e-5, rows=20, seed=1, step=0, version=4)
    older = gaussian_rows(4e-3, rows=20, seed=2, step=0, version=3)
    assert audited(tmp_path, newest + older).verdict.causes == ("stale",)
    declared = trained(newest + older, 4)
    found = audited(tmp_path, declared)
    assert (found.verdict.action, found.verdict.causes) == ("correct", ("age",))
    assert found.verdict.setting == "correction.preset=tis"
    assert "rollout.max_staleness" in found.verdict.sentence
    (note,) = (note for note in found.notes if "by age" in note)
    assert "at 0 (50% of the tokens), 4.09e-3 at 1 (50% of the tokens)" in note
    ages = audit_tree(found)["k3_by_age"]
    assert [(each["age"], each["tokens"]) for each in ages] == [(0, 1560), (1, 1560)]
    assert audited(tmp_path, declared[20:]).verdict.causes == ("age",)
    assert audited(tmp_path, trained(newest, 4)).verdict.action == "nothing"
    far = trained(gaussian_rows(3.0, rows=20, seed=2, version=1), 4)
    assert audited(tmp_path, far).verdict.action == "unclear"


def test_a_bug_is_named_though_most_tokens_are_old(tmp_path):
    rows = world_rows(1, temperature=0.7, entropy=True)
    rows += world_rows(2, temperature=0.7, noise=0.6, entropy=True)
    for i, row in enumerate(rows):
        row["version"] = int(2 * i < len(rows))
    assert audited(tmp_path, trained(rows, 1)).verdict.causes == ("temperature",)
    assert audited(tmp_path, trained(rows, 2)).verdict.causes == ("age",)


@pytest.mark.parametrize("fault", ["end", "resumed", "moved"])
def test_a_bug_in_old_tokens_alone_is_named(tmp_path, fault):
    """Without it age explains the gap. The newest tokens are enough for a diagnosis, and sound."""
    rows = world_rows(1, entropy=True)
    rows += world_rows(2, noise=0.4, entropy=True)
    for i, row in enumerate(rows):
        row["version"] = int(2 * i < len(rows))
    declared = trained(rows, 1)
    assert audited(tmp_path, declared).verdict.causes == ("age",)
    for row in declared[len(rows) // 2 :]:
        values = list(row["logp_rollout"])
        half = len(values) // 2
        if fault == "end":
            values[-1] = 0.0
        elif fault == "resumed":
            values[:half] = [0.0] * half
        else:
            values[half:] = values[half - 1 : -1]
        row["logp_rollout"] = values
    found = audited(tmp_path, declared).verdict
    cause = "shift" if fault == "moved" else "fill"
    assert (found.action, found.causes) == ("bug", (cause,))


def test_exact_new_tokens_beside_noisy_old_ones_are_no_copies(tmp_path):
    """Of an engine that is equal to the bit, sampling while it learns."""
    rows = gaussian_rows(1e-4, rows=40, seed=1, length=40)
    for i, row in enumerate(rows):
        row["version"] = int(i < 20)
        if i < 20:
            row["logp_rollout"] = list(row["logp_trainer"])
    found = audited(tmp_path, trained(rows, 1)).verdict
    assert found.action != "bug"


def test_certain_first_words_in_old_tokens_are_no_fill(tmp_path):
    """Their entropy says so, of old tokens too."""
    rows = world_rows(1, entropy=True) + world_rows(2, noise=0.4, entropy=True)
    for i, row in enumerate(rows):
        row["version"] = int(2 * i < len(rows))
        for name in ("logp_rollout", "logp_trainer", "entropy"):
            row[name] = [0.0] * 5 + list(row[name][5:])
        for at in (7, 9):
            for name in ("logp_rollout", "logp_trainer"):
                row[name][at] = -1e-4
            row["entropy"][at] = 1e-3
    assert audited(tmp_path, trained(rows, 1)).verdict.causes == ("age",)


def test_routes_that_agree_with_nothing_may_be_old(tmp_path):
    rows = moved_routes(with_routes(world_rows(1)), "row")
    assert "too old" not in audited(tmp_path, rows).verdict.text()
    old = trained([row | {"version": 1} for row in rows], 4)
    assert "too old: by up to 3 updates" in audited(tmp_path, old).verdict.text()


def test_weights_that_trained_before_they_sampled_are_refused(tmp_path):
    """Two counters that start one apart made every token old, and temperatures invisible."""
    rows = world_rows(1, temperature=0.7, entropy=True)
    rows = trained([row | {"version": 5} for row in rows], 5)
    assert audited(tmp_path, rows).verdict.causes == ("temperature",)
    rows[3]["version"] = 6
    words = r"dump\.parquet: row 3, column trained_version: entry 0 is 5: below `version` there"
    with pytest.raises(UsageError, match=words):
        audited(tmp_path, rows)
    rows[3]["mask"] = [False] * len(rows[3]["tokens"])
    assert audited(tmp_path, rows).verdict.causes == ("temperature",)


def test_old_tokens_in_which_no_temperature_is_seen_are_said(tmp_path):
    """From step 55 on all tokens are an update old, but age is not most of the gap of all."""
    rows = []
    for step in range(60):
        kl = 1e-3 if step < 55 else 6e-3
        rows += gaussian_rows(kl, rows=3, seed=step, step=step, version=min(step, 54))
        rows[-3:] = trained(rows[-3:], min(step, 55))
    found = audited(tmp_path, rows)
    assert (found.onset, found.verdict.action) == (55, "unclear")
    said = "ewer than 32 tokens of the weights that trained, too few to see a temperature"
    assert said in found.verdict.sentence
    assert any(check.endswith(said) for check in found.not_checked)


def test_newest_tokens_of_few_rows_stand_for_no_search(tmp_path):
    """The last 2 tokens of each row are of the weights that trained: none shows an odd row."""
    rows = gaussian_rows(4e-3, rows=40, seed=1)
    for row in rows:
        row["version"] = [3] * 78 + [4] * 2
    found = audited(tmp_path, trained(rows, 4)).verdict
    assert found.action == "unclear"
    assert "0 rows of 40 with tokens of the weights that trained" in found.text()
    for row in rows:
        row["version"] = [3] * 40 + [4] * 40
    assert audited(tmp_path, trained(rows, 4)).verdict.action == "correct"
