"""Bad dumps of every format end with a message that names row and column, not a traceback."""

import copy
import json
import math
import os
import struct
import tempfile
import warnings
import zipfile
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from onepolicy.audit.accumulator import accumulate_dump
from onepolicy.audit.figures import audit_figures
from onepolicy.audit.report import audit_tree
from onepolicy.audit.run import audit
from onepolicy.cli import main
from onepolicy.config import UsageError
from onepolicy.record import formats
from onepolicy.record.export.slime import convert
from onepolicy.record.read import ReadLimits, read_dump
from onepolicy.record.schema import COLUMNS
from onepolicy.verdict.rules import mean_length
from support.audit_dumps import SUFFIXES, gaussian_rows, with_routes, write_dump, write_jsonl
from support.examples import examples

LOGPS = ("logp_rollout", "logp_trainer")


def rows_with_everything() -> list[dict]:
    rows = gaussian_rows(2e-3, rows=6, length=12, reward=0.5, step=3)
    for length, row in zip((12, 3, 12, 7, 12, 12), rows, strict=True):
        for name in ("tokens", "mask", *LOGPS):
            row[name] = row[name][:length]
        row |= {"version": [4] * length, "turn": [0] * length, "entropy": [1.0] * length}
        row |= {"routes_rollout": [0, 1] * length, "routes_trainer": [1, 2] * length}
        row |= {"trained_version": 4, "route_layers": 1, "route_top_k": 2}
        row |= {"support_ids": [5, 9] * length, "support_counts": [2] * length}
        row |= {"logp_vocabulary": row["logp_trainer"]}
    return rows


def test_every_format_gives_the_same_numbers(tmp_path, monkeypatch, subtests) -> None:
    rows = rows_with_everything()
    wanted = accumulate_dump(write_dump(tmp_path / "wanted.parquet", rows), {})
    numbers = {
        name: pytest.approx(value, rel=1e-4, abs=1e-6)
        for name, value in wanted.overall.statistics().items()
    }
    for module in ("formats", "arrays"):
        monkeypatch.setattr(f"onepolicy.record.{module}.BLOCK_TOKENS", 20)  # several blocks
    monkeypatch.setattr(formats, "BLOCK_ENTRIES", 380)  # 184 entries in the longest row
    absent = {"logp_native", "logp_previous", "logp_base", "tokens_rollout"}
    for suffix in SUFFIXES:
        with subtests.test(suffix):
            found = accumulate_dump(write_dump(tmp_path / f"dump{suffix}", rows), {})
            assert set(found.columns) == set(wanted.columns) == set(COLUMNS) - absent
            assert (found.rows, found.entries, mean_length(found.overall)) == (6, 58, 8)
            assert found.overall.statistics() == numbers
            assert found.routes.routers == wanted.routes.routers == 1.0
            assert (found.rewards[3].mean, found.rewards[3].tokens) == (0.5, 6)
            assert found.newest == {3: 4}
    blocks = read_dump(tmp_path / "dump.parquet", {})
    assert [len(block.lengths) for block in blocks] == [2, 2, 2]


def test_blocks_of_many_routes_are_small(tmp_path, monkeypatch, subtests) -> None:
    """A row has 15,462 entries. All rows together would be refused as too much memory."""
    rows = with_routes(gaussian_rows(2e-3, rows=20, length=20), layers=48, experts=16, k=8)
    monkeypatch.setattr("onepolicy.record.read.MEMORY_PER_ROUTE", 10_000)
    for suffix in (".jsonl", ".npz", ".safetensors", "padded.npz"):
        path = tmp_path / f"d{suffix}"
        with subtests.test(suffix):
            if suffix == "padded.npz":
                np.savez(path, **{name: np.array([row[name] for row in rows]) for name in rows[0]})
            else:
                write_dump(path, rows)
            words = r"rows 0 to 19: have 400 tokens and 307,240 ids of experts and supports"
            with pytest.raises(UsageError, match=words):
                list(read_dump(path, {}))
            with monkeypatch.context() as patch:
                for module in ("formats", "arrays"):
                    patch.setattr(f"onepolicy.record.{module}.BLOCK_ENTRIES", 80_000)
                sizes = [len(block.lengths) for block in read_dump(path, {})]
            assert sizes == ([6, 6, 6, 2] if suffix == ".jsonl" else [5, 5, 5, 5])


def test_the_files_of_a_dump_are_one_after_another(tmp_path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_dump(tmp_path / name, gaussian_rows(2e-3, rows=3, length=4))
    blocks = list(read_dump(tmp_path, {}))
    assert [(block.first_row, block.done) for block in blocks] == [(0, 0.5), (3, 1.0)]


def test_padded_arrays_and_half_precision(tmp_path, subtests) -> None:
    rows = gaussian_rows(2e-3, rows=5, length=12)
    whole = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    whole["mask"] = whole["mask"].float()  # as verl's response_mask
    half = whole | {"logp_trainer": whole["logp_trainer"].bfloat16()}
    np.savez(tmp_path / "d.npz", **{name: value.numpy() for name, value in whole.items()})
    torch.save(half, tmp_path / "d.pt")
    save_file(half, tmp_path / "d.safetensors")
    for suffix, arrays in ((".npz", whole), (".pt", half), (".safetensors", half)):
        with subtests.test(suffix):
            first, *_ = read_dump(tmp_path / f"d{suffix}", {})
            assert first.columns["mask"].sum() == 50
            assert np.array_equal(first.lengths, [12] * 5)
            expected = arrays["logp_trainer"].float().numpy().reshape(-1)
            assert first.columns["logp_trainer"] == pytest.approx(expected)


def test_positions_outside_the_mask_may_hold_anything(tmp_path) -> None:
    rows = gaussian_rows(1e-3, rows=2, length=10)
    rows[0]["logp_rollout"][1], rows[0]["logp_trainer"][0] = math.inf, 7.0
    assert audit(write_dump(tmp_path / "d.jsonl", rows), {}).accumulated.overall.tokens == 16


def test_a_certain_token_may_be_above_0(tmp_path) -> None:
    """By rounding in bfloat16, among values below 0; alone they are no log-probabilities."""
    rows = gaussian_rows(1e-3, rows=4, length=12)
    rows[2]["logp_trainer"][9] = 4e-3
    assert audit(write_dump(tmp_path / "d.parquet", rows), {}).verdict.action == "unclear"
    for row in rows:
        row["logp_trainer"] = [4e-3] * 12
    with pytest.raises(UsageError, match="between 0 and 1"):
        audit(write_dump(tmp_path / "e.parquet", rows), {})


def _set(name: str, row: int, entry: int, value: object):
    return lambda rows: rows[row][name].__setitem__(entry, value)


def _all(name: str, value: object):
    return lambda rows: [row.update({name: [value] * len(row["tokens"])}) for row in rows]


BAD_VALUES = [
    (_set("logp_trainer", 2, 9, 0.7), "row 2, column logp_trainer", "9 is 0.7", "never above 0"),
    (_set("logp_trainer", 2, 9, -1e9), "row 2, column logp_trainer", "masked out"),
    (_set("entropy", 0, 7, -1.0), "row 0, column entropy", "entry 7 is -1"),
    (_all("logp_rollout", 0.5), "row 0, column logp_rollout", "probabilities instead of their log"),
    (lambda rows: rows[0].update(reward=math.nan), "row 0, column reward"),
    (_all("mask", False), "column mask: selects none"),
]


def test_bad_values(tmp_path, capsys, subtests) -> None:
    rows = gaussian_rows(1e-3, rows=6, length=12, entropy=[1.0] * 12, reward=1.0)
    for suffix, (change, *parts) in product((".parquet", ".jsonl", ".safetensors"), BAD_VALUES):
        with subtests.test(suffix=suffix, parts=parts):
            spoilt = copy.deepcopy(rows)
            change(spoilt)
            path = write_dump(tmp_path / f"d{suffix}", spoilt)
            assert main(["audit", str(path)]) == 2
            error = capsys.readouterr().err
            assert f"\nonepolicy: {path}: " in error  # after the lines that say what is being done
            assert [part for part in parts if part not in error] == []


def test_wrong_lengths(tmp_path, subtests) -> None:
    for suffix, name in product((".parquet", ".jsonl"), ("mask", "logp_trainer", "version")):
        rows = gaussian_rows(1e-3, rows=70, length=12)
        for row in rows:
            row["version"] = [1] * 12
        rows[67][name].pop()
        said = f"row 67, column {name}: has 11 entries, tokens has 12"
        with subtests.test(suffix=suffix, name=name), pytest.raises(UsageError, match=said):
            audit(write_dump(tmp_path / f"d{suffix}", rows), {})


def test_missing_empty_and_truncated(tmp_path) -> None:
    rows = gaussian_rows(1e-3, rows=20)
    (tmp_path / "folder.parquet").mkdir()
    for name, fault in {
        "none.parquet": "cannot be opened",
        "folder.parquet": "no dump in this folder",
        "dump.csv": "unknown kind of dump",
        "batch.pkl": r"a pickle, .*export\.verl\.export",
    }.items():
        with pytest.raises(UsageError, match=f"{name}: .*{fault}"):
            audit(tmp_path / name, {})
    for suffix in SUFFIXES:
        whole = write_dump(tmp_path / f"whole{suffix}", rows)
        for share in (0.0, 0.3, 0.9):
            cut = tmp_path / f"cut{suffix}"
            cut.write_bytes(whole.read_bytes()[: int(share * whole.stat().st_size)])
            with pytest.raises(UsageError, match=r"cut\.\w+: "):
                audit(cut, {})
        lacking = [{name: v for name, v in row.items() if name != "mask"} for row in rows]
        if suffix != ".parquet":
            with pytest.raises(UsageError, match="column mask is missing; it has"):
                audit(write_dump(tmp_path / f"lacking{suffix}", lacking), {})
    three = pa.table({"tokens": [[1]], "mask": [[1]], "logp_rollout": [[-1.0]]})
    none = pq.read_table(tmp_path / "whole.parquet").slice(0, 0)
    for table, fault in (
        (three, "column logp_trainer is missing; it has logp_rollout, mask, tokens"),
        (none, r"d\.parquet: empty"),
        (
            pa.table({"tokens": [[1]], "old_log_probs": [[-1.0]], "logp_rollout": [[-1.0]]}),
            "columns mask, logp_trainer are missing; it has logp_rollout, old_log_probs, tokens; "
            "--columns mask=THEIRS --columns logp_trainer=THEIRS name others",
        ),
    ):
        pq.write_table(table, tmp_path / "d.parquet")
        with pytest.raises(UsageError, match=fault):
            audit(tmp_path / "d.parquet", {})


def test_an_array_of_rows_is_no_jsonl(tmp_path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps([{"tokens": [1]}]))
    words = "line 1 holds list; expected an object: write one row a line, not an array of all"
    with pytest.raises(UsageError, match=words):
        audit(path, {})


def test_foreign_parquet_types(tmp_path) -> None:
    good = {"tokens": [[1, 2]], "mask": [[1.0, 1.0]]} | {name: [[-1.0, -2.0]] for name in LOGPS}
    large = {name: pa.array(v, pa.large_list(pa.float64())) for name, v in good.items()}
    pq.write_table(pa.table(large), tmp_path / "d.parquet")
    assert audit(tmp_path / "d.parquet", {}).accumulated.overall.max_dlogp == 0
    for column, value, part in [
        ("mask", [["yes", "no"]], "holds string"),
        ("mask", [[1.0, 0.5]], "entry 1 is 0.5; expected 0 or 1"),
        ("tokens", [None], "row 0, column tokens: is null"),
        ("tokens", [3], "one value per row"),
        ("tokens", [[1.5, 2]], "entry 0 is 1.5; expected whole numbers"),
    ]:
        pq.write_table(pa.table(good | {column: value}), tmp_path / "d.parquet")
        with pytest.raises(UsageError, match=part):
            audit(tmp_path / "d.parquet", {})
    newer = pa.table(good).replace_schema_metadata({b"onepolicy_audit_schema": b"2"})
    pq.write_table(newer, tmp_path / "d.parquet")
    with pytest.raises(UsageError, match="schema version '2'"):
        audit(tmp_path / "d.parquet", {})


class _Evil:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_pickles_are_not_executed(tmp_path, capsys) -> None:
    torch.save({"tokens": _Evil()}, tmp_path / "d.pt")
    evil = np.array([_Evil()], dtype=object)
    np.savez(tmp_path / "d.npz", **dict.fromkeys(("tokens", "mask", *LOGPS), evil))
    for name in ("d.pt", "d.npz"):
        with pytest.raises(UsageError, match=r"tensors only|plain arrays"):
            audit(tmp_path / name, {})
    assert "unpickled" not in capsys.readouterr().out


def _survives(path: Path) -> None:
    """Check that the dump is judged, or refused with its path. Any other error is a traceback."""
    message = ""
    try:
        audit(path, {})
    except UsageError as error:
        message = str(error)
    assert message.startswith(str(path)) or not message


logp = st.floats(-1e6, 1e-3)
triples = st.lists(st.tuples(logp, logp, st.floats(0, 99)), min_size=1, max_size=50)


@given(logps=triples, repeat=st.sampled_from([1, 40]), version=st.integers(-3, 3))
@examples(30)
def test_fuzz_of_extreme_log_probabilities(logps, repeat, version) -> None:
    """A dump that passes the checks can be judged, down to every number of the report."""
    rollout, trainer, entropy = (list(column) * repeat for column in zip(*logps, strict=True))
    count = len(rollout)
    row = {"tokens": [1] * count, "mask": [True] * count, "logp_rollout": rollout}
    row |= {"logp_trainer": trainer, "entropy": entropy}
    row["version"] = [version, 0] * (count // 2) + [0] * (count % 2)
    with tempfile.TemporaryDirectory() as folder:
        each = audit(write_jsonl(Path(folder) / "d.jsonl", [row]), {})
    json.dumps(audit_tree(each), allow_nan=False)
    audit_figures([each])


plain = [[[1, 2], [3]], [[-1.0, -2.0], [-3.0]], [[-1.0, None], [-3.0]], [[True, True], [True]]]
plain += [[[1.0, 0.0], [1.0]], [[1, 2], None], [[[1], [2]], [[3]]], [["a", "b"], ["c"]]]
plain += [[[None, None], [None]], [None, None], [1, 2], [0.5, math.nan], [{"a": 1}, {"a": 2}]]
plain += [[2**60, -(2**60)], [b"1", b"2"]]
arrow_values = st.sampled_from(
    [
        *map(pa.array, plain),
        pa.array([[], []], pa.list_(pa.float32())),
        pa.array([[1, 2], [3, 4]], pa.list_(pa.uint64(), 2)),
        pa.array(["x", "y"]).dictionary_encode(),
        pa.array([list(np.float16([0.5, 1.5])), [np.float16(2.5)]], pa.list_(pa.float16())),
    ]
)


@given(columns=st.dictionaries(st.sampled_from(sorted(COLUMNS)), arrow_values), good=st.booleans())
@examples(80)
def test_fuzz_of_arrow_types(columns, good) -> None:
    logp = pa.array([[-1.0, -2.0], [-3.0]])
    base = {"tokens": pa.array([[1, 2], [3]]), "mask": pa.array([[1, 1], [1]])}
    base |= dict.fromkeys(LOGPS, logp)
    columns = (base if good else {}) | columns
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.parquet"
        pq.write_table(pa.table(columns), path)
        _survives(path)


ours = "logp_rollout logp_trainer logp_trainer_native entropy version tokens segment"
tensors = st.dictionaries(
    st.sampled_from([*ours.split(), "routes_rollout", "routes_trainer"]),
    st.sampled_from(
        [
            *(torch.zeros(0), -torch.ones(4), torch.tensor(1.0), torch.arange(4)),
            *(torch.full((4,), math.nan), torch.zeros(2, 2), torch.full((9, 1, 2), -7)),
            *(torch.zeros(4, 1, 2, dtype=torch.int32), torch.ones(4, dtype=torch.bool)),
            -torch.ones(4).bfloat16(),
        ]
    ),
)


@given(tensors=tensors, good=st.booleans())
@examples(60)
def test_fuzz_of_our_probes(tensors, good) -> None:
    base = dict.fromkeys(LOGPS, -torch.ones(4)) | {"entropy": torch.ones(4)}
    base |= dict.fromkeys(("version", "tokens", "segment"), torch.arange(4))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "probes").mkdir()
        for file in ("metrics.jsonl", "config.json"):
            (folder / file).write_text("{}")
        chosen = (base if good else {}) | tensors
        own = {key: value.clone() for key, value in chosen.items()}
        save_file(own, folder / "probes" / "step_00001.safetensors")
        _survives(folder)


leaves = [None, 1, -1.5, "x", "7"]
leaves += [torch.arange(3), -torch.ones(2), torch.tensor(1), torch.zeros(0)]
theirs = """samples rollout_data rollout_id rank cp_size tokens loss_masks log_probs
rollout_log_probs entropy weight_versions sample_index sample_indices"""
payloads = st.recursive(
    st.sampled_from(leaves),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(theirs.split()), inner, max_size=6)
    ),
    max_leaves=12,
)


@given(payload=payloads, sample=st.booleans())
@examples(80)
def test_fuzz_of_slime_dumps(payload, sample) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save({"samples": [payload]} if sample else payload, folder / "0.pt")
        message = ""
        try:
            convert(folder, folder / "out")
        except UsageError as error:
            message = str(error)
        assert message.startswith(str(folder)) or not message


def test_a_name_that_is_there_twice_is_refused(tmp_path, subtests) -> None:
    """A join in pandas makes two columns of one name; which of them a reader takes is its whim."""
    rows = gaussian_rows(1e-3, rows=3, length=8)
    table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
    double = table.append_column("mask", table.column("mask"))
    pq.write_table(double, tmp_path / "d.parquet")
    line = json.dumps(rows[0])
    (tmp_path / "d.jsonl").write_text(line[:-1] + ', "mask": [1]}\n')
    write_dump(tmp_path / "d.npz", rows)
    with zipfile.ZipFile(tmp_path / "d.npz", "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr("mask.npy", archive.read("mask.npy"))
    data = write_dump(tmp_path / "d.safetensors", rows).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + size].rstrip()
    again = header[:-1] + b', "mask":' + json.dumps(json.loads(header)["mask"]).encode() + b"}"
    (tmp_path / "d.safetensors").write_bytes(
        struct.pack("<Q", len(again)) + again + data[8 + size :]
    )
    for suffix in (".parquet", ".jsonl", ".npz", ".safetensors"):
        with (
            subtests.test(suffix),
            pytest.raises(UsageError, match=rf"d\{suffix}.*: column mask: is there twice"),
        ):
            audit(tmp_path / f"d{suffix}", {})
    other = table.append_column("x", [[1, 1, 1]]).append_column("x", [[1, 1, 1]])
    pq.write_table(other, tmp_path / "d.parquet")
    assert audit(tmp_path / "d.parquet", {}).accumulated.rows == 3


def test_numbers_of_four_bits_are_named(tmp_path) -> None:
    names = ("tokens", "mask", *LOGPS)
    header = {
        name: {"dtype": "F4", "shape": [2, 4], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    path = tmp_path / "d.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with pytest.raises(UsageError, match=r"d\.safetensors: column tokens: holds F4; expected"):
        audit(path, {})


def test_infinity_in_half_precision_is_no_whole_number(tmp_path, recwarn) -> None:
    rows = gaussian_rows(2e-3, rows=1, length=4)
    arrays = {name: np.array(value) for name, value in rows[0].items()} | {"length": np.array([4])}
    for values in ([5, 6, 7, 8], [5, np.inf, 7, 8]):
        np.savez(tmp_path / "d.npz", **arrays | {"tokens": np.array(values, np.float16)})
        if values[1] == 6:
            (block,) = read_dump(tmp_path / "d.npz", {})
            assert block.columns["tokens"].tolist() == values
    with pytest.raises(UsageError, match="column tokens: entry 1 is inf; expected whole numbers"):
        list(read_dump(tmp_path / "d.npz", {}))
    assert not recwarn.list


def test_a_pipe_and_a_device_are_not_waited_for(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.npz").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "zero.npz"):
        with pytest.raises(UsageError, match=rf"{name}: is a device or a pipe"):
            audit(tmp_path / name, {})


def test_a_file_name_that_is_not_utf_8(tmp_path) -> None:
    path = write_dump(tmp_path / "d.jsonl", gaussian_rows(1e-3, rows=20, length=30))
    path = path.rename(tmp_path / "d\udc80.jsonl")
    assert main(["audit", str(path), "--out", str(tmp_path / "out")]) == 0
    assert "d\\udc80" in (tmp_path / "out" / "audit.json").read_text()


def test_a_column_name_that_is_no_text(tmp_path) -> None:
    path = write_dump(tmp_path / "d.parquet", gaussian_rows(1e-3, rows=3, length=8))
    path.write_bytes(path.read_bytes().replace(b"tokens", b"\x80okens"))
    with pytest.raises(UsageError, match=r"d\.parquet: not a complete Parquet file"):
        audit(path, {})


def test_limits_grow_with_the_sizes_of_the_files(monkeypatch) -> None:
    sizes = {"none": 0, "half": 2**29, "one": 2**30}
    monkeypatch.setattr("onepolicy.bounded.size_of_data", lambda path: sizes[path.name])
    limits = {name: ReadLimits().of([Path(name)]) for name in sizes}
    assert (limits["none"].memory, limits["none"].seconds) == (2**30, 60)
    assert (limits["one"].memory, limits["one"].seconds) == (17 * 2**30, 60 + 4096)
    assert [limits[name].cpu_seconds for name in sizes] == [4, 4 + 2048, 4 + 4096]
    both = ReadLimits().of([Path("half"), Path("one")])  # one file at a time
    assert (both.memory, both.seconds) == (17 * 2**30, 60 + 6144)
    given = ReadLimits(2, 5).of([Path("one")])
    assert (given.memory, given.seconds, given.cpu_seconds) == (2 * 2**30, 5, 5)
