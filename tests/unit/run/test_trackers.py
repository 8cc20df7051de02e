"""Trackers get every row, a resumed run goes on in the same one, and what is missing is named."""

import importlib.util
import json
import math
import resource
import struct
import sys
from types import SimpleNamespace

import pytest

from onepolicy.config import TrainingError, UsageError, resolve
from onepolicy.run import trackers
from onepolicy.run.log import RunLog, read_metrics, truncate_after
from onepolicy.run.trackers import TensorBoard, check_log, trackers_of


def config(**log):
    """Return the settings of a run that is logged so, without TensorBoard and report."""
    run = {"out": "runs/one", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
    return resolve(run | {"log": {"tensorboard": False, "report": False, **log}})


@pytest.fixture
def wandb_variables(monkeypatch, tmp_path):
    """Forget what W&B read from its variables before, here and after the test."""
    import wandb

    wandb.teardown()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    yield monkeypatch.setenv
    wandb.teardown()


@pytest.fixture
def folder(tmp_path):
    """Return a run folder with the file that says which run it is."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.json").write_text('{"parent": null, "id": "0123abcd"}')
    return tmp_path / "one"


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, round(event.value, 5)) for event in events.Scalars(tag)]


def test_tensorboard_drops_recomputed_steps(tmp_path):
    with RunLog(tmp_path, [TensorBoard]) as log:
        for step in (1, 2, 3):
            log.write(step, {"train/reward": 0.1})
    assert scalars(tmp_path, "train/reward") == [(1, 0.1), (2, 0.1), (3, 0.1)]
    truncate_after(tmp_path, 1)
    with RunLog(tmp_path, [TensorBoard]) as log:
        log.write(2, {"train/reward": 0.2})
    assert scalars(tmp_path, "train/reward") == [(1, 0.1), (2, 0.2)]


IN_ITS_THREAD = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""TensorBoard's own thread fails too."""


def end_on_a_full_disk(folder, error=None):
    """Open a log with TensorBoard, write a row, and close it, or raise, where no file may grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with RunLog(folder, [TensorBoard]) as log:
            log.write(1, {"train/reward": 0.1})
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
            if error is not None:
                raise error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@IN_ITS_THREAD
@pytest.mark.parametrize("error", [TrainingError("the step failed"), KeyboardInterrupt("Ctrl-C")])
def test_the_runs_own_error_comes_before_a_full_disk_of_tensorboard(tmp_path, error):
    with pytest.raises(type(error)) as said:
        end_on_a_full_disk(tmp_path, error)
    assert said.value is error


@IN_ITS_THREAD
def test_a_full_disk_as_tensorboard_is_closed_names_the_run(tmp_path):
    words = rf"{tmp_path}: cannot be written to: File too large.*Make room.*--resume {tmp_path}"
    with pytest.raises(TrainingError, match=words):
        end_on_a_full_disk(tmp_path)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


MISSING = [
    ({"report": True}, "plotly", r"onepolicy\[report\].*log\.report=false"),
    ({"tensorboard": True}, "tensorboard", r"onepolicy\[report\].*log\.tensorboard=false"),
    ({"wandb": "p"}, "wandb", r"onepolicy\[wandb\].*no log\.wandb"),
    ({"trackio": "p"}, "trackio", r"onepolicy\[trackio\].*no log\.trackio"),
]


def test_a_missing_package_is_named_at_the_start(monkeypatch, subtests):
    find, missing = importlib.util.find_spec, set()
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else find(name)
    )
    for log, package, words in MISSING:
        missing.clear()
        missing.add(package)
        with subtests.test(package), pytest.raises(UsageError, match=words):
            check_log(config(**log))
    check_log(config())  # asks for no package
    assert trackers_of(config(), print) == []


@pytest.mark.process
def test_wandb_without_a_key_is_refused_at_the_start(wandb_variables):
    wandb_variables("WANDB_MODE", "online")
    with pytest.raises(UsageError, match=r"log\.wandb: .*WANDB_API_KEY.*WANDB_MODE=offline"):
        check_log(config(wandb="mismatch"))


def offline_records(path):
    """Yield the records of a file that `wandb sync` sends: a header, then LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2 as protocol

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:  # no record begins in the last bytes of a block
            at += left
            continue
        size, part = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):  # whole, or the last part
            yield protocol.Record.FromString(record)
            record = b""


def offline_runs(folder):
    """Return each offline run of W&B in this folder, in order: rows, its names, exit codes."""
    runs = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        rows, names, exit_codes = [], set(), []
        for record in offline_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                names.add((record.run.run_id, record.run.project, record.run.display_name))
            elif kind == "exit":
                exit_codes.append(record.exit.exit_code)
            elif kind == "history":
                items = record.history.item
                rows.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
        runs.append((rows, names, exit_codes))
    return runs


def fail_in_step_3(folder, settings):
    with RunLog(folder, trackers_of(settings, print)) as log:
        log.write(3, {"train/reward": 0.75})
        raise KeyError("the step failed")


@pytest.mark.full
@pytest.mark.process
def test_wandb_offline_gets_every_row_and_a_resumed_run_is_the_same(wandb_variables, folder):
    """Read back from the files that `wandb sync` sends."""
    import wandb

    wandb_variables("WANDB_MODE", "offline")
    settings = config(wandb="mismatch")
    check_log(settings)
    with RunLog(folder, trackers_of(settings, print)) as log:
        log.write(1, {"train/reward": 0.25, "mismatch/k3": math.nan})
        log.write(2, {"train/reward": 0.5})
    with pytest.raises(KeyError, match="the step failed"):
        fail_in_step_3(folder, settings)
    wandb.teardown()  # W&B's process has written everything when it ends
    first, second = offline_runs(folder)
    assert [(row["_step"], row["train/reward"]) for row in first[0]] == [(1, 0.25), (2, 0.5)]
    assert [(row["_step"], row["train/reward"]) for row in second[0]] == [(3, 0.75)]
    [(run_id, project, name)] = first[1]
    assert second[1] == {(run_id, project, name)}
    assert (project, name, len(run_id)) == ("mismatch", "one", 8)
    assert (first[2], second[2]) == ([0], [1])  # W&B shows the second as failed


def test_what_wandb_is_told(monkeypatch, folder):
    """The run is named by its folder and its id, which a resume finds again; no secret is sent."""
    told, rows = [], []
    run = SimpleNamespace(
        log=lambda row, step: rows.append((step, row)), finish=lambda code: rows.append(code)
    )
    fake = SimpleNamespace(
        init=lambda **how: told.append(how) or run,
        Settings=lambda **how: how,
        errors=SimpleNamespace(),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    task = {"kind": "gym", "name": "products", "params": {"api_key": "s", "size": 4}}
    settings = config(wandb="mismatch").model_dump(exclude_unset=True) | {"task": task}
    settings = resolve(settings)
    for step in (1, 2):
        with RunLog(folder, trackers_of(settings, print)) as log:
            log.write(step, {"train/reward": 0.25})
    with pytest.raises(KeyError, match="the step failed"):
        fail_in_step_3(folder, settings)
    names = {(how["project"], how["name"], how["id"], how["resume"], how["dir"]) for how in told}
    assert names == {("mismatch", "one", "0123abcd", "allow", folder)}
    assert told[0]["config"]["task"]["params"] == {"api_key": "hidden", "size": 4}
    assert told[0]["config"]["steps"] == 3
    first, second = ((step, {"train/reward": 0.25}) for step in (1, 2))
    assert rows == [first, 0, second, 0, (3, {"train/reward": 0.75}), 1]


class Lost:
    """A tracker in place of W&B's. It raises in one of its calls."""

    def __init__(self, at, monkeypatch):
        self.at, self.rows, self.failed = at, [], None
        monkeypatch.setattr(trackers, "Wandb", self.open)

    def open(self, config, folder):
        self.fail("open")
        return self

    def write(self, step, values):
        self.fail(f"step {step}")
        self.rows.append(step)

    def close(self, failed):
        self.failed = failed
        self.fail("close")

    def fail(self, at):
        if at == self.at:
            raise ConnectionResetError("the network is gone")


@pytest.mark.parametrize(
    ("at", "rows"), [("open", []), ("step 2", [1]), ("close", [1, 2, 3]), ("never", [1, 2, 3])]
)
def test_a_tracker_that_fails_is_noted_once_and_the_run_goes_on(tmp_path, monkeypatch, at, rows):
    lost, notes = Lost(at, monkeypatch), []
    with RunLog(tmp_path, trackers_of(config(wandb="p"), notes.append)) as log:
        for step in (1, 2, 3):
            log.write(step, {"train/reward": 0.5})
    assert lost.rows == rows
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert len(notes) == (at != "never")
    assert all("log.wandb" in note and "the network is gone" in note for note in notes)


@pytest.mark.parametrize("at", ["close", "never"])
def test_the_runs_own_error_comes_before_a_trackers(folder, monkeypatch, at):
    lost = Lost(at, monkeypatch)
    with pytest.raises(KeyError, match="the step failed"):
        fail_in_step_3(folder, config(wandb="p"))
    assert lost.failed


def test_runs_have_ids_of_their_own_and_texts_under_names_of_secrets_are_not_sent(
    tmp_path, monkeypatch
):
    opened = []
    trackio = SimpleNamespace(init=lambda **run: opened.append(run), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    ours = {"cluster": {"auth": "token"}}
    task = {"params": {"api_key": "x", "max_tokens": 5}, "env": [{"TOKEN": "y"}]}
    tree = ours | {"task": task}
    settings = SimpleNamespace(log=config(trackio="p").log, model_dump=lambda mode: tree)
    folders = [tmp_path / "one", tmp_path / "other" / "one", tmp_path / "new"]
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"parent": None, "id": f"{number}123abcd"}))
        with RunLog(folder, trackers_of(settings, pytest.fail)):
            pass
    assert [run["name"] for run in opened] == ["one-0123abcd", "one-1123abcd", "new-2123abcd"]
    hidden = {"params": {"api_key": "hidden", "max_tokens": 5}, "env": [{"TOKEN": "hidden"}]}
    assert opened[0]["config"] == ours | {"task": hidden}
