"""Small files that ask for much: what parses them is a child with limits, and the audit goes on."""

import json
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from onepolicy import bounded
from onepolicy.bounded import GIB, Limits, StoppedError
from onepolicy.cli import main
from onepolicy.config import UsageError
from onepolicy.record.export import slime
from onepolicy.record.read import ReadLimits, read_dump
from onepolicy.record.schema import BLOCK_ROWS, write_parquet
from support.audit_dumps import gaussian_rows, write_jsonl
from support.own_processes import children_of, wait_until_gone
from support.waiting import wait_until

pytestmark = pytest.mark.process
NAMES = ("tokens", "mask", "logp_rollout", "logp_trainer")
SMALL = ReadLimits(memory_gib=2**-4)
ROWS = gaussian_rows(1e-3, rows=5, length=12)


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in ROWS]) for name in NAMES}


def write_npz(path: Path) -> None:
    np.savez(path, **{name: tensor.numpy() for name, tensor in tensors().items()})


WRITERS = {
    ".jsonl": lambda path: write_jsonl(path, ROWS),
    ".npz": write_npz,
    ".parquet": lambda path: write_parquet(path, ROWS),
    ".pt": lambda path: torch.save(tensors(), path),
    ".safetensors": lambda path: save_file(tensors(), path),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("suffix", WRITERS)
def test_a_child_reads_what_its_parent_would(tmp_path, suffix):
    path = tmp_path / f"d\udc80\u00e9 {suffix}"  # not UTF-8
    WRITERS[suffix](tmp_path / f"d{suffix}")
    (tmp_path / f"d{suffix}").rename(path)
    (block,) = read_dump(path, {})
    assert block.lengths.tolist() == [12] * 5
    for name in NAMES:
        wanted = np.concatenate([row[name] for row in ROWS])
        assert block.columns[name] == pytest.approx(wanted, rel=1e-6, nan_ok=True)


def doubling(path: Path) -> None:
    """Write a .pt whose pickle doubles a text 20 times by a function that torch allows."""
    words = [pickle.PROTO, b"\x02c_codecs\nencode\nq\x00X", struct.pack("<I", 1024), b"A" * 1024]
    words += [b"X\x06\x00\x00\x00latin1\x86R"]
    words += [b"q\x02h\x00h\x02X\x03\x00\x00\x00hex\x86R"] * 20
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"".join([*words, b"."]))
        archive.writestr("x/byteorder", "little")
        archive.writestr("x/version", "3\n")


def repacked(path: Path, **more: torch.Tensor) -> None:
    """Write a deflated .pt, ended by a zip record that torch skips and Python takes for the end."""
    torch.save(tensors() | more, path)
    with zipfile.ZipFile(path) as stored:
        members = {name: stored.read(name) for name in stored.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    path.write_bytes(path.read_bytes() + b"PK\x05\x06")


def zeros_npz(path: Path) -> None:
    np.savez_compressed(path, **dict.fromkeys(NAMES, np.zeros((1, 2**23), np.int8)))


def zeros_parquet(path: Path) -> None:
    row = pa.array([np.zeros(2**23, np.int8)], pa.list_(pa.int8()))
    pq.write_table(pa.table(dict.fromkeys(NAMES, row)), path)


BOMBS = {
    "doubling.pt": doubling,
    "deflated.pt": lambda path: repacked(path, more=torch.zeros(2**24)),
    "zeros.npz": zeros_npz,
    "zeros.parquet": zeros_parquet,
    "lists.jsonl": lambda path: path.write_text("[" + "[]," * 2**20 + "[]]"),
}
ENDS = {"zeros.npz": "row 0: has 8,388,608 tokens .*, more than any sample"}
"""What is said of a bomb whose row is refused before it is unpacked whole."""


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_its_child_only(tmp_path, capfd, monkeypatch, name):
    """The parent would take its message, so the limit is the child's."""
    monkeypatch.setattr(bounded, "SHARE_OF_MESSAGE", 2**-10)
    path = tmp_path / name
    BOMBS[name](path)
    assert path.stat().st_size < 2**25
    said = ENDS.get(name, "(needs more|its reader died)")
    with pytest.raises(UsageError, match=rf"{name}: {said}.*--memory-limit"):
        list(read_dump(path, {}, SMALL))
    assert capfd.readouterr() == ("", "")


def test_rows_without_end_pass_the_time_limit(tmp_path, capsys):
    path = tmp_path / "d.pt"
    values = {name: -torch.ones(1) for name in NAMES} | {"tokens": torch.ones(1)}
    values["mask"] = torch.ones(1)
    torch.save({name: value.expand(2**22, 2**18) for name, value in values.items()}, path)
    limits = ["--time-limit", "0.5", "--memory-limit", "2"]
    assert main(["audit", str(path), *limits]) == 2
    assert f"{path}: took longer than" in capsys.readouterr().err


def long_global() -> bytes:
    """Return a pickle that torch refuses in a text with its 60 KB, which it then searches."""
    return b"\x80\x02c" + b"a" * 60_000 + b"\nb\n."


def tuples_of_tuples() -> bytes:
    """Return a pickle of 200 bytes that torch refuses in a text with 2^40 brackets."""
    pairs = [b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(40)]
    return b"\x80\x02]q\x00" + b"".join(pairs) + b")R."


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(long_global(), id="search"),
        pytest.param(tuples_of_tuples(), id="text", marks=pytest.mark.full),
    ],
)
def test_what_a_library_says_of_a_file_has_a_limit(tmp_path, data, monkeypatch):
    """The time of a disk or a busy machine does not count."""
    monkeypatch.setattr("onepolicy.record.read.CPU_SECONDS", 1.0)
    path = tmp_path / "d.pt"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"d\.pt: took longer than 1 s of a CPU; .* --time-limit"):
        list(read_dump(path, {}))


def test_a_limit_can_be_raised(tmp_path):
    path = tmp_path / "d.npz"
    ones = dict.fromkeys(NAMES[:2], np.ones((2**9, 2**11)))
    np.savez_compressed(path, **ones, **dict.fromkeys(NAMES[2:], -ones["tokens"]))
    with pytest.raises(UsageError, match=r"needs more than 0\.02 GiB .* raise --memory-limit"):
        list(read_dump(path, {}, ReadLimits(memory_gib=0.02)))
    assert sum(len(block.lengths) for block in read_dump(path, {})) == 2**9


@pytest.mark.full
def test_training_dumps_are_read_in_a_child(tmp_path):
    sample = {"tokens": torch.arange(4), "loss_masks": torch.ones(2), "weight_versions": ["3"]}
    sample |= dict.fromkeys(("log_probs", "rollout_log_probs"), -torch.ones(2))
    torch.save({"samples": [sample]}, tmp_path / "0.pt")
    assert slime.convert(tmp_path, tmp_path / "out") == 1
    (block,) = read_dump(tmp_path / "out", {})
    assert block.columns["tokens"].tolist() == [2, 3]
    assert block.columns["version"].tolist() == [3, 3]


def test_a_crash_ends_the_child_only():
    limits = Limits(GIB, 60)
    with pytest.raises(StoppedError, match=r"its reader died \(SIGABRT\)"):
        list(bounded.stream("os:abort", {}, limits))
    with pytest.raises(StoppedError, match=r"AttributeError: .*no_such_task.*damaged"):
        list(bounded.stream("os:no_such_task", {}, limits))


@pytest.mark.process
def test_a_child_answers_only_under_the_limits_that_it_was_started_with():
    """The template takes 200 MiB: too much for the first child, nothing for the second."""
    template = "{{ ('x' * 200000000)[:3] }}"
    question = {"chat_template": template, "conversations": [[]], "tools": None}

    def ask(limits, template="small"):
        given = question | {"chat_template": template}
        return bounded.ask("onepolicy.chat_templates:answer", given, limits)

    small, large = Limits(2**26, 30), Limits(GIB, 30)
    ask(small)  # it waits for the next question
    assert ask(large, template).arrays["text"].tobytes() == b"xxx"
    with pytest.raises(StoppedError, match=r"needs more than 0\.0625 GiB"):
        ask(small, template)


@pytest.fixture
def taken_over(monkeypatch):
    """Return a function that puts Python code in the place of the child, after its `ready`."""
    start, ready = subprocess.Popen, framed({"kind": "ready", "arrays": []})

    def take(code: str) -> None:
        code = f"import os, sys, time; sys.stdin.readline(); os.write(1, {ready!r}); {code}"

        def start_other(command, **more):
            return start([sys.executable, "-c", code], **more)

        monkeypatch.setattr(bounded.subprocess, "Popen", start_other)

    return take


def framed(info: object, data: bytes = b"") -> bytes:
    text = json.dumps(info).encode()
    return struct.pack("<I", len(text)) + text + data


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (framed([]), "nonsense"),
        (framed({"kind": "message"}), "nonsense"),
        (framed({"kind": "message", "arrays": [["a", "|O", 1]]}, bytes(8)), "nonsense"),
        (framed({"kind": "message", "arrays": [["a", "<f8", -1]]}), "nonsense"),
        (framed({"kind": "message", "arrays": [["a", "<f8", 2**40]]}), "needs more than 1 GiB"),
        (b"\xff\xff\xff\xff", "nonsense"),
        (framed({"kind": "message", "arrays": [["a", "<f8", 4]]}, bytes(8)), "died"),
    ],
)
def test_a_child_that_its_file_took_over_is_not_believed(taken_over, reply, said):
    taken_over(f"os.write(1, {reply!r})")
    with pytest.raises(StoppedError, match=said):
        list(bounded.stream("os:abort", {}, Limits(GIB, 60)))


@pytest.mark.parametrize("info", [{}, {"file": 7}, {"file": "a"}])
def test_a_block_that_names_no_file_of_the_dump_is_nonsense(taken_over, tmp_path, info):
    taken_over(f"os.write(1, {framed({'kind': 'message', 'arrays': [], **info})!r})")
    write_npz(tmp_path / "d.npz")
    with pytest.raises(UsageError, match=r"d\.npz: its reader answered nonsense"):
        list(read_dump(tmp_path / "d.npz", {}))


def test_a_child_of_the_child_ends_with_it(taken_over):
    """It holds the pipe on which the parent waits. Left alone, it answers after a minute."""
    answer = framed({"kind": "refused", "text": "was not ended", "arrays": []})
    taken_over(f"os.fork(); time.sleep(60); os.write(1, {answer!r})")
    with pytest.raises(StoppedError, match="took longer than 1 s"):
        list(bounded.stream("os:abort", {}, Limits(GIB, 1)))


ORPHAN = """
from onepolicy import bounded
arguments = {"object_list": [], "timeout": 600}
list(bounded.stream("multiprocessing.connection:wait", arguments, bounded.Limits(2**30, 600)))
"""


def test_a_child_that_sleeps_ends_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", ORPHAN]) as parent:
        (child,) = wait_until(lambda: children_of(parent.pid))
        wait_until(lambda: "poll" in Path(f"/proc/{child}/wchan").read_text())
        parent.kill()
    wait_until_gone([child])


def test_holes_raise_no_limit(tmp_path):
    path = tmp_path / "d.jsonl"
    write_jsonl(path, ROWS)
    before = bounded.size_of_data(path)
    assert path.stat().st_size <= before < 2**16
    with path.open("ab") as file:
        file.truncate(2**40)
    assert bounded.size_of_data(path) <= before + 2**12
    with path.open("r+b") as file:
        file.seek(2**39)
        file.write(bytes(2**20))
    assert 2**20 <= bounded.size_of_data(path) <= before + 2**20 + 2**13
    assert ReadLimits().of([path]).memory < 2 * GIB
    assert ReadLimits().of([path]).seconds < 100


def test_rows_without_tokens_come_in_many_blocks(tmp_path):
    none = dict.fromkeys(NAMES, np.zeros(0))
    np.savez(tmp_path / "d.npz", **none, length=np.zeros(BLOCK_ROWS + 1, np.int64))
    counts = [len(block.lengths) for block in read_dump(tmp_path / "d.npz", {})]
    assert counts == [BLOCK_ROWS, 1]
