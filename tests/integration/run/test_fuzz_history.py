"""The history of a run with lines that are lost, doubled, moved or another run's, and checkpoints
beside it under odd names: a resume refuses it, or says which file is not as it was."""

import io
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from onepolicy.config import UsageError
from onepolicy.console import Console
from onepolicy.files import refuse_links_out
from onepolicy.report.jsonl import read_samples
from onepolicy.report.run_page import write_report
from onepolicy.report.terminal import summary_parts
from onepolicy.run import resume
from onepolicy.run.log import RunLog, read_metrics, truncate_after
from onepolicy.run.log_digest import digest_log, find_damage
from onepolicy.train import checkpoint
from support.fuzz import HEAVY, JUNK, survives
from support.odd_dumps import MARKUP, ODD_NAMES, TERMINAL
from support.report_run import make_fixture_run

STEP = 12  # of the newest checkpoint, after which the run took two steps more
LOGS = ("metrics.jsonl", "samples.jsonl")
STATE = f"checkpoints/step_{STEP:05d}/state.json"
BESIDE = (
    *("step_00008", ".step_00013.writing", ".step_00009.deleting", "step_abc", "step_", "step_-1"),
    *("step_00012 ", "step_99999999999999999999", "step_\uff10\uff10013", "STEP_00013"),
    *("step_00013.tmp", "step_\x1b[2J", "step_\udcff", "step_1e3", "13", "step_000012"),
)
"""Folders beside the checkpoint. The last is the same step in other digits."""


def whole_files(run):
    return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = make_fixture_run(tmp_path_factory.mktemp("history") / "run", steps=STEP, tokens=20)
    log = digest_log(path)
    with RunLog(path) as more:
        for step in (STEP + 1, STEP + 2):
            more.write(step, {"train/reward": 0.5})
            more.write_sample({"step": step, "response": "1"})
    (path / "run.json").write_text(json.dumps({"parent": None, "id": "a", "started": "2026"}))
    saved = path / "checkpoints" / f"step_{STEP:05d}"
    saved.mkdir(parents=True)
    (saved / "weights").write_text("weights")
    sums = {"weights": checkpoint._file_checksum(saved / "weights")}
    state = {"step": STEP, "updates": STEP, "skipped": 0, "log": log, "parent": None}
    state |= {"files": {"weights": 7}, "sha256": sums}
    (saved / "state.json").write_text(json.dumps(state))
    shutil.rmtree(path / "probes")
    return path


@pytest.fixture
def copy(run):
    """Copy the run, into memory where the system has that."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as made:
        yield shutil.copytree(run, Path(made) / "run")


def is_row(line):
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def other_lines(pick, data):
    """Return a log with one to three lines lost, doubled, moved, joined, cut or of another step."""
    lines = data.splitlines(keepends=True)
    for _ in range(pick.randint(1, 3)):
        at, other = pick.randrange(len(lines)), pick.randrange(len(lines))
        match pick.randrange(9):
            case 0:
                del lines[at]
            case 1:
                lines.insert(other, lines[at])
            case 2:
                lines[at], lines[other] = lines[other], lines[at]
            case 3:
                lines[at] = lines[at].rstrip(b"\n")
            case 4:
                lines[at] = lines[at][: pick.randrange(len(lines[at]) + 1)]
            case 5:
                lines[at:] = lines[at : at + 1]
            case 6:
                row = json.loads(lines[at])
                row["step"] = pick.choice((*JUNK[:10], 0, 5, 13, 10**15, 12.0, "12", None))
                lines[at] = json.dumps(row).encode() + b"\n"
            case 7:
                name = json.dumps(pick.choice(ODD_NAMES))
                value = json.dumps(pick.choice((0.5, None, "x", 1e99, [1], TERMINAL)))
                twice = f', {name}: {value}, "step": {pick.choice((1, 12, 99))}}}\n'
                lines[at] = lines[at].rstrip(b"}\n") + twice.encode(errors="surrogatepass")
            case 8:
                lines[at] = pick.choice(
                    (b"\n", b"\0" * 99 + b"\n", b"\xef\xbb\xbf", b"[]\n", b"\r")
                )
        if not lines:
            break
        lines = b"".join(lines).splitlines(keepends=True)
        if not all(map(is_row, lines)):  # the cases take whole rows
            break
    return b"".join(lines)


def other_state(pick, data):
    """Return a checkpoint's state whose record of the log is another, older or none."""
    state = json.loads(data)
    name, field = pick.choice(LOGS), pick.choice(("bytes", "sha256"))
    match pick.randrange(6):
        case 0:
            del state["log"][name]
        case 1:
            state["log"][name][field] = pick.choice((*JUNK, 10**15, "0" * 64))
        case 2:
            state["log"][pick.choice(("x", "../metrics.jsonl", "", TERMINAL))] = state["log"][name]
        case 3:
            state["log"] = pick.choice((*JUNK[:9], {}, {name: None}))
        case 4:
            state["step"] = pick.choice((STEP - 1, STEP + 1, 0, 10**15, float(STEP), str(STEP)))
        case 5:
            state["parent"] = pick.choice(({"run": TERMINAL, "step": 1}, {"run": 3}, "x", [1]))
    if pick.random() < 0.3:
        state[checkpoint.STATE_CHECKSUM] = checkpoint._state_checksum(state)
    return json.dumps(state).encode()


def make_history(damage, whole):
    """Return what a file, or a folder beside the checkpoint, is replaced by: bytes, None to leave
    it out, or a link's target."""
    pick = damage.random
    name = pick.choice((*LOGS, *LOGS, STATE, "beside"))
    if name == "beside":
        return f"checkpoints/{pick.choice(BESIDE)}", pick.choice(("folder", "file", "copy", "link"))
    data = whole[Path(name)]
    match pick.randrange(8):
        case 0:
            return name, pick.choice((None, b"", "link", "folder"))
        case 1:
            return name, damage.data(data)
    if name == STATE:
        return name, other_state(pick, data)
    return name, other_lines(pick, data)


def put(run, name, what):
    path = run / name
    if not name.startswith("checkpoints/") or name == STATE:
        path.unlink()
    match what:
        case bytes():
            path.write_bytes(what)
        case "folder":
            path.mkdir()
        case "file":
            path.write_bytes(b"{}")
        case "copy":
            shutil.copytree(run / STATE.rpartition("/")[0], path)
        case "link":
            path.symlink_to(run.parent)


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


INPUTS = [
    pytest.param(100, id="few"),
    pytest.param(2000, id="fast", marks=pytest.mark.full),
    pytest.param(HEAVY, id="slow", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("inputs", INPUTS)
def test_histories(copy, inputs):
    """What stood in the log at the checkpoint is there to the byte, or its file is named."""
    whole = whole_files(copy)
    digests = json.loads(whole[Path(STATE)])["log"]

    def read(given):
        name, what = given
        put(copy, name, what)
        try:
            refuse_links_out(copy, "the run's")
            origin = resume.resume_origin(copy)
            named = {path.name for path in find_damage(copy, origin.log or {})}
            changed = {
                log
                for log, saved in digests.items()
                if not (copy / log).is_file()
                or (copy / log).read_bytes()[: saved["bytes"]] != whole[Path(log)][: saved["bytes"]]
            }
            truncate_after(copy, origin.step)
            with RunLog(copy):
                read_samples(copy)
            if (copy / LOGS[0]).exists():
                steps = [row["step"] for row in read_metrics(copy)]
                assert steps == sorted({*steps})
                assert max(steps, default=0) <= origin.step
            return named, changed, origin.log == digests
        except UsageError as error:
            if str(copy) not in str(error) or not str(error).isprintable():
                raise AssertionError("it names no file") from error
            raise
        finally:
            if name not in (*LOGS, STATE):
                remove(copy / name)
            for log in (*LOGS, STATE):
                remove(copy / log)
                (copy / log).write_bytes(whole[Path(log)])

    def check(found):
        named, changed, known = found
        assert not known or named == changed

    def make(damage):
        return make_history(damage, whole)

    survives("history", inputs, make, read, check, UsageError, between=(0.1, 0.9))


def texts(tree):
    """Yield (container, key) of every string in a JSON value."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, child in items:
        if isinstance(child, str):
            yield tree, key
        elif isinstance(child, dict | list):
            yield from texts(child)


@pytest.mark.parametrize("inputs", [pytest.param(10, id="few"), *INPUTS[1:]])
def test_texts_of_a_run(run, tmp_path, inputs):
    """Odd texts in every file of a run reach neither the terminal nor the page as they are."""
    copy = shutil.copytree(run, tmp_path / f"run {TERMINAL.replace('/', '')} [bold] <x1>")
    names = ("run.json", "config.json", "summary.json", "samples.jsonl")
    whole = {name: (copy / name).read_bytes() for name in names}

    def make(damage):
        pick, changed = damage.random, {}
        for name in pick.sample(names, pick.randint(1, len(names))):
            lines = [whole[name]]
            if name == "samples.jsonl":
                lines = whole[name].splitlines()
            rows = [json.loads(line) for line in lines]
            for row in rows:
                for of, key in list(texts(row)):
                    if pick.random() < 0.3:
                        of[key] = pick.choice((*ODD_NAMES[:20], MARKUP, TERMINAL))
                if pick.random() < 0.3:
                    row[pick.choice(ODD_NAMES)] = pick.choice((MARKUP, TERMINAL))
            changed[name] = "\n".join(map(json.dumps, rows)).encode() + b"\n"
        return changed

    def read(changed):
        for name, data in (whole | changed).items():
            (copy / name).write_bytes(data)
        assert "<x1>" not in write_report(copy).read_text("utf-8")
        shown = io.StringIO()
        summary = json.loads((copy / "summary.json").read_text())
        Console(file=shown, width=80).print(*summary_parts(summary))
        return shown.getvalue()

    def check(text):
        assert text.replace("\n", "").isprintable()

    survives("run texts", inputs, make, read, check, UsageError, between=(0.0, 1.1))
