"""The audit reads supports in every format, and names what is wrong with them or with the values
over them."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from onepolicy.audit.run import audit
from onepolicy.config import UsageError
from onepolicy.record.read import read_dump
from onepolicy.run.probe_file import save_counterfactual
from onepolicy.support.trace import SupportTrace
from support.audit_dumps import SUFFIXES, write_dump, write_jsonl
from support.audit_faults import MOE, SMALL
from support.objective_batches import batch
from support.support_faults import PLANTED, rows_of, supported_world

COLUMNS = ("support_ids", "support_counts")


@pytest.mark.parametrize("gap", [SMALL, pytest.param(MOE, marks=pytest.mark.full)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_planted_faults_are_named_and_clean_supports_are_not_accused(
    tmp_path, subtests, gap, seed
) -> None:
    clean = audit(write_dump(tmp_path / "clean.parquet", rows_of(*supported_world(seed, gap))), {})
    assert clean.verdict.action in ("nothing", "correct"), clean.verdict.text()
    assert any("on average (supports)" in note for note in clean.notes)
    w, sets = supported_world(seed, gap)  # ids need not ascend
    other = audit(
        write_dump(tmp_path / "b.parquet", rows_of(w, [each[::-1] for each in sets])), {}
    ).verdict
    assert other.text() == clean.verdict.text()
    for fault, (arguments, move, cause, words) in PLANTED.items():
        with subtests.test(fault):
            w, sets = supported_world(seed, gap, **arguments)
            dump = write_dump(tmp_path / "dump.parquet", rows_of(w, move(w, sets)))
            found = audit(dump, {}).verdict
            assert (found.action, found.causes) == ("bug", (cause,)), found.text()
            assert words in found.text()


def test_without_the_trainers_scores_over_the_vocabulary_lone_tokens_tell_raw_values(
    tmp_path,
) -> None:
    w, sets = supported_world(0, engine_raw=True)
    rows = rows_of(w, sets)
    for row in rows:
        del row["logp_vocabulary"], row["entropy"]
    found = audit(write_dump(tmp_path / "dump.jsonl", rows), {}).verdict
    assert found.causes == ("support",)
    assert "alone in their support" in found.text()
    assert "the engine's values are over the whole vocabulary" in found.text()


def test_every_format_gives_the_same_sets(tmp_path, monkeypatch, subtests) -> None:
    for module in ("formats", "arrays"):
        monkeypatch.setattr(f"onepolicy.record.{module}.BLOCK_TOKENS", 300)  # several blocks
    rows = rows_of(*supported_world(0))[:12]
    ids = np.concatenate([row["support_ids"] for row in rows])
    counts = np.concatenate([row["support_counts"] for row in rows])
    paths = [write_dump(tmp_path / f"dump{suffix}", rows) for suffix in SUFFIXES]
    paths.append(padded(tmp_path / "padded.npz", rows))
    for path in paths:
        with subtests.test(path.name):
            blocks = list(read_dump(path, {}))
            assert len(blocks) > 1 or path.suffix == ".parquet"
            found = [np.concatenate([b.columns[name] for b in blocks]) for name in COLUMNS]
            assert np.array_equal(found[0], ids)
            assert np.array_equal(found[1][found[1] > 0], counts[counts > 0])  # but for padding
            assert blocks[0].columns["support_ids"].dtype == np.int32


def padded(path, rows):
    """Write [S, T] arrays; what is behind a row's own ids is junk."""
    arrays = {}
    for name in rows[0]:
        parts = [np.atleast_1d(row[name]) for row in rows]
        if not isinstance(rows[0][name], list):
            arrays[name] = np.concatenate(parts)
            continue
        fill = 7 if name == "support_ids" else 0
        made = np.full((len(rows), max(map(len, parts))), fill, parts[0].dtype)
        for row, part in enumerate(parts):
            made[row, : len(part)] = part
        arrays[name] = made
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"support_ids": [1, 2]}, "row 1, column support_ids: has 2 entries, but the sum"),
        ({"support_ids": [1, -2, 3]}, "row 1, column support_ids: entry 1 is -2"),
        ({"support_counts": [0, 4, -1]}, "row 1, column support_counts: entry 2 is -1"),
        ({"logp_vocabulary": [0.0, 0.3, 0.0]}, "row 1, column logp_vocabulary"),
    ],
)
def test_sets_that_are_none_are_refused(tmp_path, change, message) -> None:
    row = {"tokens": [4, 1, 2], "mask": [0, 1, 1], "logp_rollout": [0.0, -0.5, -0.5]}
    row |= {"logp_trainer": row["logp_rollout"], "support_ids": [1, 2, 2]}
    row |= {"support_counts": [0, 2, 1], "logp_vocabulary": [0.0, -0.7, -0.7]}
    with pytest.raises(UsageError, match=message):
        list(read_dump(write_jsonl(tmp_path / "dump.jsonl", [row, row | change]), {}))
    del row["support_ids"]
    with pytest.raises(UsageError, match="supports need support_ids, support_counts"):
        list(read_dump(write_jsonl(tmp_path / "dump.jsonl", [row]), {}))


@pytest.mark.parametrize(("mask", "fault"), [([0, 1, 1], False), ([1, 1, 1], True)])
def test_an_id_that_stands_twice_is_a_fault_of_sampled_tokens_alone(tmp_path, mask, fault) -> None:
    row = {"tokens": [4, 1, 2], "mask": mask, "logp_rollout": [-0.5] * 3}
    row |= {"logp_trainer": [-0.6] * 3, "support_ids": [4, 4, 1, 2, 2], "logp_vocabulary": [-1] * 3}
    row |= {"support_counts": [2, 2, 1]}
    found = audit(write_jsonl(tmp_path / "dump.jsonl", [row] * 40), {})
    assert (found.accumulated.supports.twice > 0) is fault


def test_a_probe_of_a_run_has_the_sets_of_its_trained_tokens(tmp_path) -> None:
    trainable = torch.tensor([False, True, True, False, True])
    sets = [[], [3, 8], [4], [], [0, 5, 9]]
    whole = batch([3, 2], trainable, [0.0, 1.0]).replace(
        target_ids=torch.tensor([1, 8, 4, 1, 5]),
        logp_old=torch.tensor([0.0, -0.5, 0.0, 0.0, -1.0]),
        entropy=torch.zeros(5),
        support=SupportTrace.from_sets(sets),
        logp_vocabulary=torch.tensor([0.0, -0.7, -0.1, 0.0, -1.5]),
    )
    path = tmp_path / "probes" / "step_1.safetensors"
    save_counterfactual(path, whole, None, "{}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    (block,) = read_dump(tmp_path, {})
    assert block.columns["support_ids"].tolist() == [3, 8, 4, 0, 5, 9]
    assert block.columns["support_counts"].tolist() == [2, 1, 3]
    assert block.columns["logp_vocabulary"] == pytest.approx([-0.7, -0.1, -1.5])
    tensors = load_file(path)
    save_file(tensors | {"support_ids": tensors["support_ids"][1:]}, path)
    with pytest.raises(UsageError, match="support_ids are not as many as support_counts says"):
        list(read_dump(tmp_path, {}))
