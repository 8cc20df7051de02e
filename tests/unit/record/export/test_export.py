"""Dumps of several files, our run folders, and the dumps of slime, miles and prime-rl."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from onepolicy.audit.run import audit
from onepolicy.cli import main
from onepolicy.config import UsageError
from onepolicy.record.export import slime, verl, write_step
from onepolicy.record.schema import parse_columns
from onepolicy.record.trainers import TRAINERS
from support.audit_dumps import gaussian_rows, world_rows, write_jsonl

capability = pytest.mark.capability


def test_a_folder_is_one_dump(tmp_path):
    rows = [gaussian_rows(1e-3, rows=4, seed=step, step=step) for step in range(3)]
    for step, part in enumerate(rows):
        write_step(tmp_path / "dump", step, part[:2])
        write_step(tmp_path / "dump", step, part[2:], rank=1)
    (tmp_path / "dump" / "step_00009_0.writing").write_text("of a killed run")
    whole = write_jsonl(tmp_path / "whole.jsonl", [row for part in rows for row in part])
    found, wanted = (audit(path, {}).accumulated for path in (tmp_path / "dump", whole))
    assert (found.rows, sorted(found.steps)) == (12, [0, 1, 2])
    assert found.overall.statistics() == pytest.approx(wanted.overall.statistics(), rel=1e-4)
    assert [row.dump_row for row in found.sample.rows(None)] == list(range(12))
    write_step(tmp_path / "dump", 5, gaussian_rows(1e-3, rows=1))
    with pytest.raises(UsageError, match=r"step_00005_0\.parquet: column step: in some files"):
        audit(tmp_path / "dump", {})
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no dump in this folder"):
        audit(tmp_path / "empty", {})


def test_a_step_that_is_written_again_keeps_the_older_files(tmp_path, caplog):
    """Also those of ranks that a restart no longer has, of this step alone."""
    old, new = gaussian_rows(1e-3, rows=2), gaussian_rows(1e-3, rows=2, seed=1)
    for step, rank in ((4, 3), (5, 0), (5, 1), (5, 2)):
        write_step(tmp_path, step, old, rank=rank, ranks=4, keep_older=True)
    assert not caplog.messages
    write_step(tmp_path, 5, new, rank=1, ranks=2, keep_older=True)
    write_step(tmp_path, 5, new, rank=0, ranks=2, keep_older=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_00004_3.parquet",
        "step_00005_0.parquet",
        "step_00005_0.parquet.1",
        "step_00005_1.parquet",
        "step_00005_1.parquet.1",
        "step_00005_2.parquet.1",
    ]
    assert caplog.messages[0].endswith("written before; the older is step_00005_1.parquet.1")
    found = audit(tmp_path, {}).accumulated
    assert (found.rows, sorted(found.steps)) == (6, [4, 5])


@capability("prime-rl", "dump", how="contract")
def test_prime_rl_token_exports_by_their_names(tmp_path, capsys):
    """trainer.enable_token_export writes token_exports/step_N/rank_R.jsonl, with inference_logprobs
    0 for prompts."""
    for step in range(2):
        rows = gaussian_rows(5e-3, rows=6, seed=step, entropy=[1.0] * 80)
        for row in rows:
            row["logp_rollout"][:2] = row["logp_trainer"][:2] = [0.0, 0.0]
        renamed = [
            {TRAINERS["prime-rl"].names.get(k, k): v for k, v in row.items()} for row in rows
        ]
        extra = {"schema_version": 1, "rank": 0, "env_name": "math", "step": step}
        extra["is_masked"] = [None] * 80
        folder = tmp_path / "token_exports" / f"step_{step}"
        folder.mkdir(parents=True)
        write_jsonl(folder / "rank_0.jsonl", [row | extra for row in renamed])
    assert main(["audit", str(tmp_path / "token_exports"), "--columns", "prime-rl"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "correct it with tis" in said
    assert "tis is [trainer.loss] with import_path" in said
    found = audit(tmp_path / "token_exports", parse_columns(["prime-rl"]))
    assert sorted(found.accumulated.steps) == [0, 1]
    assert found.accumulated.overall.tokens == 2 * 6 * 78
    with pytest.raises(UsageError, match="tokens is already mapped to token_ids"):
        parse_columns(["prime-rl", "tokens=x"])


def test_a_null_in_prime_rls_export_is_left_out(tmp_path):
    """A value that is not finite is null there. A row of another loss has no rewards."""
    names = TRAINERS["prime-rl"].names
    rows = [{names.get(k, k): v for k, v in row.items()} for row in gaussian_rows(5e-3, rows=12)]
    rows[3] |= {"rewards": [None] * 80}
    rows[3]["inference_logprobs"][20] = None
    found = audit(write_jsonl(tmp_path / "rank_0.jsonl", rows), names).accumulated
    assert (found.rows, found.nonfinite.count) == (12, 1)


def test_nemo_rl_training_data(tmp_path):
    """train_data_stepN.jsonl has lists of one sample's values, padded."""
    rows = gaussian_rows(5e-3, rows=12)
    names = dict(TRAINERS["nemo-rl"].names)
    theirs = [
        {theirs: [[*row[ours], 0]] for ours, theirs in names.items()} | {"rewards": [1.0], "idx": i}
        for i, row in enumerate(rows)
    ]
    path = write_jsonl(tmp_path / "train_data_step1.jsonl", theirs)
    with pytest.raises(UsageError, match=r"step1\.jsonl: is NeMo-RL's.*--columns nemo-rl"):
        audit(path, {})
    found = audit(path, names | {"reward": "rewards"}).accumulated
    wanted = audit(write_jsonl(tmp_path / "wanted.jsonl", rows), {}).accumulated
    assert found.overall.statistics() == pytest.approx(wanted.overall.statistics())
    assert (found.rewards[0].mean, found.rewards[0].tokens) == (1.0, 12)
    for i, value in enumerate((0, [0.0], [1.0])):  # of a sample that is not trained on, or is
        theirs[i]["sample_loss_mask"] = value
    masked = audit(write_jsonl(path, theirs), names).accumulated
    assert masked.overall.tokens == 10 * 78
    theirs[0]["sample_loss_mask"] = [1.0, 0.0]
    with pytest.raises(UsageError, match=r"row 0, column sample_loss_mask: is .*expected 0 or 1"):
        audit(write_jsonl(path, theirs), names)


def test_several_steps_of_nemo_rl(tmp_path):
    """The step is in the name of the file alone. Steps differ in noise: that is no second kind."""
    for step, noise in ((1, 0.1), (2, 0.3)):
        rows = world_rows(step, noise=noise, entropy=True)
        write_jsonl(tmp_path / f"train_data_step{step}.jsonl", rows)
    found = audit(tmp_path, {})
    assert (found.verdict.action, found.verdict.causes) == ("correct", ())
    assert {step: stats.sequences for step, stats in found.accumulated.steps.items()} == {
        1: 24,
        2: 24,
    }
    told = "Steps are those in the names of the files: the dump has no column step."
    assert told in found.notes
    (tmp_path / "train_data_step2.jsonl").rename(tmp_path / "second.jsonl")
    found = audit(tmp_path, {})  # files are no steps: each may be a server's
    assert found.verdict.causes == ("stale",)
    assert "onset of divergence: no column step" in found.not_checked
    assert told not in found.notes


def test_sglangs_triples(tmp_path):
    rows = gaussian_rows(5e-3, rows=12)
    wanted = audit(write_jsonl(tmp_path / "wanted.jsonl", rows), {}).accumulated
    for row in rows:
        pairs = zip(row["logp_rollout"], row["tokens"], strict=True)
        row["logp_rollout"] = [[logp, token, None] for logp, token in pairs]
    found = audit(write_jsonl(tmp_path / "d.jsonl", rows), {}).accumulated
    assert found.overall.statistics() == wanted.overall.statistics()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"input": "q", "output": "a", "gts": "4", "score": 1.0},
            r"verl's text log.*export",
        ),
        ({"prompt": "q", "completion": "a", "reward": 1.0}, r"TRL's text log.*attach\("),
        ({"token_ids": [1], "inference_logprobs": [0], "trainer_logprobs": [0]}, "prime-rl"),
        ({"batch": {"responses": [[1]]}}, r"a batch of verl.*export\.verl"),
        ({"text": "a", "meta_info": {}}, "SGLang"),
    ],
)
def test_a_layout_that_lacks_a_side_is_named(tmp_path, row, said):
    with pytest.raises(UsageError, match=rf"d\.jsonl: is .*{said}"):
        audit(write_jsonl(tmp_path / "d.jsonl", [row]), {})


def test_it_is_named_in_the_kind_of_file_that_the_trainer_writes(tmp_path):
    table = pa.table({"prompt": ["q"], "completion": ["a"], "reward": [1.0]})
    pq.write_table(table, tmp_path / "completions.parquet")
    with pytest.raises(UsageError, match=r"TRL's text log.*attach\("):
        audit(tmp_path / "completions.parquet", {})
    torch.save({"batch": {"responses": torch.ones(1, 3)}}, tmp_path / "batch.pt")
    with pytest.raises(UsageError, match=r"a batch of verl.*export\.verl"):
        audit(tmp_path / "batch.pt", {})


def _samples(count, seed=0):
    """Return what both frameworks hold of a sample: all its tokens, lists of its response."""
    for i, row in enumerate(gaussian_rows(5e-3, rows=count, length=42, seed=seed)):
        made = {"tokens": torch.arange(60), "weight_versions": ["3", "4"], "sample_index": i}
        made |= {"entropy": torch.full((40,), 13.0), "loss_masks": torch.ones(40, dtype=torch.int)}
        made["log_probs"] = torch.tensor(row["logp_trainer"][2:])
        made["rollout_log_probs"] = torch.tensor(row["logp_rollout"][2:])
        yield made


def _shape(accumulated):
    return accumulated.rows, sorted(accumulated.steps), accumulated.overall.tokens


@capability("slime", "dump", how="contract")
def test_slime_training_dump(tmp_path):
    for rollout in range(2):
        payload = {"format_version": 2, "rollout_id": rollout, "rank": 0, "dp_shards": [{}]}
        payload["samples"] = list(_samples(10, rollout))
        torch.save(payload, tmp_path / f"{rollout}.pt")
    with pytest.raises(UsageError, match=r"python -m onepolicy\.record\.export\.slime"):
        audit(tmp_path / "0.pt", {})
    assert slime.convert(tmp_path, tmp_path / "out") == 20
    found = audit(tmp_path / "out", {})
    assert _shape(found.accumulated) == (20, [0, 1], 800)
    assert found.accumulated.newest == {0: 3, 1: 3}
    row = found.accumulated.sample.rows(None)[0].columns
    assert row["tokens"].tolist() == list(range(20, 60))
    wanted = next(_samples(1))["log_probs"].numpy()
    assert row["logp_trainer"] == pytest.approx(wanted, rel=1e-6)
    assert found.verdict.setting == "correction.preset=tis"


@capability("miles", "dump", how="contract")
def test_miles_training_dump_leaves_copies_out(tmp_path):
    columns = {"sample_indices": []}
    for sample in _samples(6):
        columns["sample_indices"].append(sample.pop("sample_index"))
        for name, value in sample.items():
            columns.setdefault(name, []).append(value)
    first_stage = {k: v for k, v in columns.items() if k not in ("log_probs", "entropy")}

    def save(rollout, rank, data, cp_size=1):
        payload = {"rollout_id": rollout, "rank": rank, "rollout_data": data, "cp_size": cp_size}
        torch.save(payload, tmp_path / f"{rollout}_{rank}.pt")

    for rank in (0, 1):  # tensor parallelism
        save(0, rank, columns)
    save(0, 2, first_stage)
    assert slime.convert(tmp_path, tmp_path / "out") == 6
    assert audit(tmp_path / "out", {}).accumulated.rows == 6
    save(1, 0, columns, cp_size=2)
    with pytest.raises(UsageError, match=r"1_0\.pt: holds one rank's slices of context parallel"):
        slime.convert(tmp_path, tmp_path / "out")
    torch.save({"something": 1}, tmp_path / "1_0.pt")
    with pytest.raises(UsageError, match=r"1_0\.pt: neither samples nor rollout_data"):
        slime.convert(tmp_path, tmp_path / "out")
    with pytest.raises(UsageError, match=r"no sample with log_probs in 0 \*\.pt"):
        slime.convert(tmp_path / "none", tmp_path / "out")


def _of_two_ages():
    """Return 10 samples of weights 5, and 10 of weights 4 that are farther from the trainer."""
    for age, kl in ((0, 1e-5), (1, 5e-3)):
        for row in gaussian_rows(kl, rows=10, length=42, seed=age):
            yield {name: values[2:] for name, values in row.items()}, 5 - age


def _is_age(found):
    assert found.accumulated.columns.count("trained_version") == 1
    assert found.accumulated.ages.by_age.keys() == {0, 1}
    assert (found.verdict.action, found.verdict.causes) == ("correct", ("age",))


def test_an_asynchronous_run_of_slime_is_no_bug(tmp_path):
    """Ranks of a rollout have one newest version, though one rank has older samples only."""
    for rank in range(2):
        samples = []
        for i, (row, version) in enumerate(list(_of_two_ages())[10 * rank :][:10]):
            made = {"tokens": torch.arange(40) + rank, "loss_masks": torch.ones(40)}
            made |= {"log_probs": row["logp_trainer"], "rollout_log_probs": row["logp_rollout"]}
            made |= {"entropy": row["entropy"], "weight_versions": [str(version)]}
            samples.append(made | {"sample_index": 10 * rank + i})
        torch.save({"rollout_id": 7, "rank": rank, "samples": samples}, tmp_path / f"7_{rank}.pt")
    assert slime.convert(tmp_path, tmp_path / "out") == 20
    _is_age(audit(tmp_path / "out", {}))


@pytest.mark.parametrize("unknown", [0, 1])
def test_versions_are_of_all_samples_of_miles_or_of_none(unknown, tmp_path, capsys):
    """A sample whose turns name none, first or later: rows of a dump have the same columns."""
    samples = list(_samples(10))
    samples[unknown]["weight_versions"] = []
    torch.save({"rollout_id": 0, "rank": 0, "samples": samples}, tmp_path / "0.pt")
    torch.save({"rollout_id": 1, "rank": 0, "samples": list(_samples(10, 1))}, tmp_path / "1.pt")
    assert slime.convert(tmp_path, tmp_path / "out") == 20
    assert "version" not in audit(tmp_path / "out", {}).accumulated.columns
    assert "not all samples have weight_versions" in capsys.readouterr().out
    samples = [{**each, "weight_versions": []} for each in _samples(10, 2)]
    torch.save({"rollout_id": 2, "rank": 0, "samples": samples}, tmp_path / "2.pt")
    for name in ("0.pt",):
        (tmp_path / name).unlink()
    with pytest.raises(UsageError, match="rollout 2: samples have no weight_versions"):
        slime.convert(tmp_path, tmp_path / "other")


def test_an_asynchronous_run_of_verl_is_no_bug(tmp_path):
    rows, versions = zip(*_of_two_ages(), strict=True)
    names = TRAINERS["verl"].names
    tensors = {theirs: torch.tensor([row[ours] for row in rows]) for ours, theirs in names.items()}
    tensors["responses"] = torch.arange(40).expand(20, -1)
    extra = {"min_global_steps": np.array(versions, object)}
    verl.export(SimpleNamespace(batch=tensors, non_tensor_batch=extra), tmp_path, 6)
    _is_age(audit(tmp_path, {}))
    extra["max_global_steps"] = np.array([None, 7, *versions[2:]], object)
    (row, *_) = verl.batch_rows(SimpleNamespace(batch=tensors, non_tensor_batch=extra), 6)
    assert (row["version"], row["trained_version"]) == (5, 7)
    extra["min_global_steps"][3] = None  # of an agent loop that does not say it
    (row, *_) = verl.batch_rows(SimpleNamespace(batch=tensors, non_tensor_batch=extra), 6)
    assert not {"version", "trained_version"} & row.keys()


@pytest.mark.parametrize("columns", ["version and trained_version", "trained_version"])
def test_without_ages_stale_may_be_sampling_while_learning(tmp_path, columns):
    rows = [dict(row, version=version) for row, version in _of_two_ages()]
    if columns != "trained_version":
        rows = [{name: value for name, value in row.items() if name != "version"} for row in rows]
    found = audit(write_jsonl(tmp_path / "d.jsonl", rows), {}).verdict
    assert found.causes == ("stale",)
    assert found.sentence.endswith(f"Or the run samples while it learns: then add {columns}.")


def test_samples_of_one_index_are_copies_only_if_they_are_equal(tmp_path, capsys):
    """A history that was made shorter has the index of the long one."""
    samples = [sample | {"sample_index": i // 2} for i, sample in enumerate(_samples(6))]
    for rank, kept in ((0, samples), (1, samples[:4])):
        torch.save({"rollout_id": 0, "rank": rank, "samples": kept}, tmp_path / f"0_{rank}.pt")
    assert slime.convert(tmp_path, tmp_path / "out") == 6
    assert capsys.readouterr().out == "4 left out: copies of other ranks' samples\n"
    assert audit(tmp_path / "out", {}).accumulated.rows == 6


ROUTES = torch.stack([torch.arange(60) % 7, torch.arange(60) % 5 + 7], 1).reshape(60, 1, 2)


def _run(folder, **tensors):
    probes = folder / "probes"
    probes.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "config.json"):
        (folder / name).write_text(json.dumps({}))
    for step in (5, 10):
        rollout = -torch.rand(60, generator=torch.Generator().manual_seed(step)) * 3 - 1
        found = {"logp_rollout": rollout, "logp_trainer": rollout - 0.01}
        found |= {"entropy": torch.ones(60), "version": torch.full((60,), step - 1)}
        found |= {"tokens": torch.arange(60), "segment": torch.arange(60) // 20}
        found |= {"routes_rollout": ROUTES[:40], "routes_trainer": ROUTES[:40].clone()} | tensors
        save_file(found, probes / f"step_{step:05d}.safetensors")
    return folder


def test_own_run_folder(tmp_path):
    found = audit(_run(tmp_path / "run"), {})
    assert _shape(found.accumulated) == (6, [5, 10], 120)
    assert found.accumulated.overall.statistics()["k1"] == pytest.approx(0.01, rel=1e-4)
    assert (found.accumulated.routes.slots, found.accumulated.routes.routers) == (80, 0.0)
    with pytest.raises(UsageError, match="leave --columns out"):
        audit(tmp_path / "run", {"mask": "x"})


def test_late_routes_in_a_run_folder(tmp_path):
    shifted = ROUTES.roll(1, 0)[:40].contiguous()
    late = audit(_run(tmp_path / "late", routes_rollout=shifted), {})
    assert late.verdict.causes == ("routes",)
    assert "routes are one row late" in late.verdict.text()


def test_a_run_that_replays_is_not_advised_to(tmp_path):
    rollout = -2.5 - torch.rand(60, generator=torch.Generator().manual_seed(1))
    sign = 1 - 2 * (torch.arange(60) % 2)
    scores = {"logp_rollout": rollout, "entropy": torch.full((60,), 3.0)}
    scores["logp_trainer"] = rollout + (0.2 * sign).log1p()  # mean rho is 1
    scores["logp_trainer_native"] = rollout + (0.4 * sign).log1p()
    scores["segment"] = torch.arange(60) // 5
    other = ROUTES[:40].clone()
    other[::8, 0, 0] = 13
    found = audit(_run(tmp_path / "run", routes_rollout=other, **scores), {})
    assert found.accumulated.routes.routers > 0
    assert (found.verdict.action, found.verdict.causes) == ("correct", ("numerics",))
    k3 = -math.log(1 - 0.4**2) / 2
    assert found.notes[0].startswith(f"Without replay k3 is {k3:.3g} nats a token")
    # 1 - log(1 - 0.2^2) / log(1 - 0.4^2)
    assert found.notes[0].endswith("; replay takes off 77% of it.")


def test_a_damaged_probe_is_refused(tmp_path):
    for tensors, words in (
        ({"tokens": torch.arange(3)}, "its tensors differ in length"),
        ({"routes_trainer": torch.zeros(5, dtype=torch.int64)}, "routes of shapes"),
        ({"logp_trainer": torch.full((60,), 3.0)}, "a log-probability is never above 0"),
    ):
        with pytest.raises(UsageError, match=words):
            audit(_run(tmp_path / "run", **tensors), {})
    (tmp_path / "run" / "probes" / "step_00005.safetensors").write_bytes(b"x")
    with pytest.raises(UsageError, match="not a readable safetensors file"):
        audit(tmp_path / "run", {})
    for path in (tmp_path / "run" / "probes").iterdir():
        path.unlink()
    with pytest.raises(UsageError, match="a run without probes"):
        audit(tmp_path / "run", {})
