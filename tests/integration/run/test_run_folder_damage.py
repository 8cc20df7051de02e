"""A run folder with damage in any byte or any JSON value: it is read as it was written, or refused
by a message that names the file. It never gives another exception, nor a number that JSON's types
do not allow there."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from onepolicy.audit.claims import describe_bit_equality
from onepolicy.config import UsageError
from onepolicy.config.stored_config import read_stored_config
from onepolicy.record.probes import read_run
from onepolicy.report.run import load_run
from onepolicy.report.run_page import page_of
from onepolicy.report.terminal import summary_parts
from onepolicy.run import resume
from onepolicy.run.log import read_metrics, truncate_after
from onepolicy.run.summary import summarise
from onepolicy.train import checkpoint
from support.fuzz import SLOW, survives
from support.report_run import make_fixture_run, own_probe

STRANGE = (
    *(None, True, False, "", "x", "1", "\ud800", "\0", "../..", "/etc", [], [1], {}, {"x": 1}),
    *(0, -1, 1, 7, 10**9, 10**18, 10**400, -(10**400), 0.5, -0.5, 1e99, 1e300, -1e300, 5e-324),
    *(float("nan"), float("inf"), float("-inf")),
)
"""NaN and infinity are written as Python does, which is no JSON."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Make a small run with every file that is read again, including a checkpoint without
    weights."""
    path = make_fixture_run(
        tmp_path_factory.mktemp("damage") / "run", steps=12, tokens=40, turns=True
    )
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    aged = {"staleness/max": 1.0, "staleness/mean": 0.5}
    aged |= {"mismatch/k3_staleness@0": 1e-6, "staleness/tokens@0": 9.0}
    rows = [row | aged if row["step"] else row for row in rows]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = {"fingerprint": {"numerics": "fast", "torch": "x"}}
    about |= {"quant": None, "parent": None, "started": "2026"}
    (path / "run.json").write_text(json.dumps(about))
    summary = json.loads((path / "summary.json").read_text())
    summary |= {"parent": {"run": "x", "step": 2}, "k3_cuts": [1.0, 2.0]}
    summary |= {"asynchronous": {"staleness_mean": 1.0}}
    (path / "summary.json").write_text(json.dumps(summary))
    saved = checkpoint.checkpoint_folder(path, 12)
    saved.mkdir(parents=True)
    (saved / "weights").write_text("weights")
    state = {"step": 12, "updates": 12, "skipped": 0, "files": {"weights": 7}, "parent": None}
    state["sha256"] = {"weights": checkpoint._file_checksum(saved / "weights")}
    # without its own checksum, as older versions wrote it
    (saved / "state.json").write_text(json.dumps(state))
    (path / "probes" / "step_00010.safetensors").unlink()  # lacks what `onepolicy audit` reads
    own_probe(path / "probes" / "step_00012.safetensors")
    return path


def read_report(run):
    """Read as write_report does, without filling in the page."""
    loaded = load_run(run)
    page_of(loaded, "run")
    summary_parts(loaded.summary)


def read_rows(run):
    """Read the rows as the end of a run does."""
    rows = read_metrics(run)
    assert all(type(v) in (int, float, type(None)) for row in rows for v in row.values())
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    summary = summarise(CONFIG, rows, run, None)
    json.dumps(summary, allow_nan=False)
    summary_parts(summary)


def read_state(run):
    state = checkpoint.verify(checkpoint.latest_checkpoint(run))
    assert type(state["step"]) is type(state["updates"]) is int
    assert state["updates"] >= 0


def read_about(run):
    resume.resume_origin(run)
    resume.build_difference(run, json.dumps({"numerics": "fast"}))


def read_dump(run):
    list(read_run(run, {}))
    describe_bit_equality(run)


def read_samples(run):
    truncate_after(run, 12)


CONFIG = None
READERS = [
    *(("metrics.jsonl", read_rows, 20), ("samples.jsonl", read_samples, 20)),
    *(("summary.json", read_report, 7), ("run.json", read_about, 20)),
    *(
        ("config.json", read_stored_config, 20),
        ("checkpoints/step_00012/state.json", read_state, 10),
    ),
    *(("checkpoints/step_00012/state.json", read_about, 10),),
    ("probes/step_00012.safetensors", read_dump, 20),
    *(("metrics.jsonl", read_report, 1), ("samples.jsonl", read_report, 1)),
    *(("run.json", read_report, 1), ("config.json", read_report, 1)),
    ("probes/step_00012.safetensors", read_report, 1),
]
"""File, reader, and how often it is tried. The report takes ten times as long as the others."""


def other_bytes(rng, data):
    """Return the file with a few bytes changed, cut off, doubled or put in."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                value = rng.choice((0x80, 0x00, 0xFF, 0x22, 0x7B, rng.randrange(256)))
                data[at : at + 1] = bytes([value])
            case 1:
                data[at : at + rng.randrange(1, 9)] = b""
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 3:
                data[at:] = b""
            case 4:
                data[at:at] = data[at : at + rng.randrange(1, 99)]
        if not data:
            break
    return bytes(data)


def other_value(rng, data):
    """Return the file with one JSON value, key or line changed."""
    lines = data.decode().rstrip("\n").split("\n") if data.count(b"\n{") else [data.decode()]
    at = rng.randrange(len(lines))
    tree = json.loads(lines[at])
    places = list(positions(tree))
    node, key = rng.choice(places)
    match rng.randrange(6):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            names = "step mismatch/k3_turn@x x@ mismatch/k3_staleness@9 __class__"
            node[rng.choice(names.split())] = node[key]
        case 2:
            lines.insert(at, lines[rng.randrange(len(lines))])
        case _:
            node[key] = rng.choice(STRANGE)
    lines[at] = json.dumps(tree)
    return "\n".join(lines).encode() + b"\n"


def positions(tree):
    """Return (container, key) of every value."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, child in items:
        yield tree, key
        if isinstance(child, dict | list):
            yield from positions(child)


def other_header(rng, data):
    """Return a safetensors file with one value of its header changed, still framed right."""
    size = int.from_bytes(data[:8], "little")
    head = other_value(rng, data[8 : 8 + size]).rstrip()
    return len(head).to_bytes(8, "little") + head + data[8 + size :]


def damaged(damage, whole):
    """Return a file, one of its readers, and other bytes for it."""
    rng = damage.random
    ((name, reader, _),) = rng.choices(READERS, [often for *_, often in READERS])
    by_value = other_value
    if name.endswith(".safetensors"):
        by_value = other_header
    change = rng.choice((by_value, other_bytes))
    return name, reader, change(rng, whole[name])


@pytest.fixture
def copy(run):
    """Copy the run, into memory where the system has that: on a disk, opening new files takes most
    of the time."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as made:
        yield shutil.copytree(run, Path(made) / "run")


def test_a_summary_without_a_number_is_read_or_refused(copy):
    """Each entry is null once, and left out once."""
    whole = json.loads((copy / "summary.json").read_text())
    read, refused = 0, []
    for name in whole:
        left_out = {key: value for key, value in whole.items() if key != name}
        for changed in (whole | {name: None}, left_out):
            (copy / "summary.json").write_text(json.dumps(changed))
            try:
                read_report(copy)
                read += 1
            except UsageError as error:
                refused.append(str(error))
    assert read > len(whole)
    assert all("summary.json" in said for said in refused)


@pytest.mark.full
@pytest.mark.parametrize(
    "inputs",
    [pytest.param(5000, id="fast"), pytest.param(SLOW, id="slow", marks=pytest.mark.slow)],
)
def test_damages(copy, inputs):
    """Most of the damaged files are read and refused."""
    global CONFIG
    CONFIG = read_stored_config(copy)
    whole = {name: (copy / name).read_bytes() for name, *_ in READERS}
    for _, reader, _ in READERS:
        reader(copy)  # undamaged

    def read(given):
        name, reader, data = given
        (copy / name).write_bytes(data)
        try:
            reader(copy)
        except UsageError as error:
            if str(copy) not in str(error):
                raise AssertionError("it names no file") from error
            raise
        finally:
            (copy / name).write_bytes(whole[name])

    survives(
        "run folder",
        inputs,
        lambda damage: damaged(damage, whole),
        read,
        lambda _: None,
        UsageError,
        between=(0.1, 0.6),
    )
