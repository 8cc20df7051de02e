"""`onepolicy train --restarts N`: which runs are started again, how often, and which never are."""

import asyncio
import contextlib
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from subprocess import PIPE

import pytest

from onepolicy.cli import main
from onepolicy.launch import restarts as supervise
from onepolicy.rollout.remote.client import EngineClient
from onepolicy.run import train as loop_run
from support.waiting import LIMIT_S, wait_until

FIRST, RESUME = ["train", "recipe"], ["train", "--resume", "run"]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return run([(exit status, begun step or None), ...], restarts) -> status, started commands,
    waits, texts.

    The run folder does not exist before the first begun step.
    """
    out = tmp_path / "run"

    def go(ends, restarts):
        commands, waits, texts, left = [], [], [], list(ends)

        def end(command):
            commands.append(command[command.index("onepolicy") + 1 :])
            status, step = left.pop(0)
            if step is not None:
                out.mkdir(exist_ok=True)
                (out / "config.json").write_text("{}")
                (out / supervise.BEGUN).write_text(str(step))
            return status

        monkeypatch.setattr(supervise, "_run_command", end)
        status = supervise.supervise(out, FIRST, RESUME, restarts, texts.append, waits.append)
        assert not left
        return status, commands, waits, texts

    return go


def test_a_run_that_dies_is_resumed_until_it_has_finished(run):
    status, commands, waits, texts = run([(-9, 2), (1, 5), (-6, 5), (0, 9)], restarts=4)
    assert status == 0
    assert commands == [FIRST, RESUME, RESUME, RESUME]
    assert waits == [1, 1, 2]
    assert "ended by SIGKILL in step 2; restart 1 of 4 in 1 s" in texts[0]
    assert "exit status 1 in step 5" in texts[1]


def test_without_a_run_folder_it_is_started_anew(run):
    assert run([(-9, None), (-9, 1), (0, 3)], restarts=2)[1] == [FIRST, FIRST, RESUME]


def test_ends_that_are_never_restarted(run):
    for status in (0, 2, 130, 143):
        found = run([(status, 1)], restarts=5)
        assert found[:2] == (status, [FIRST])
        assert [text.endswith("not restarted") for text in found[3]] == [True] * (status != 0)


def test_a_fault_of_one_step_is_given_up(run):
    status, _, waits, texts = run([(1, 7)] * 3, restarts=50)
    assert (status, waits) == (1, [1, 2])
    assert "in step 7, where it has ended 3 times; not restarted" in texts[-1]


@pytest.mark.parametrize(
    ("newest", "missing", "starts"),
    [(9, None, 1), (8, None, 2), (9, "report.html", 2), (9, "summary.json", 2)],
)
def test_a_run_that_dies_after_its_summary_has_finished(
    newest, missing, starts, tmp_path, monkeypatch
):
    """Not one whose last checkpoint, summary or report is missing: a resume makes that."""
    statuses, texts = [-9, 0], []

    def end(_):
        (tmp_path / "config.json").write_text('{"steps": 9, "log": {"report": true}}')
        (tmp_path / supervise.CHECKPOINTS / f"step_{newest:05d}").mkdir(parents=True, exist_ok=True)
        for name in {"summary.json", "report.html"} - {missing}:
            (tmp_path / name).touch()
        return statuses.pop(0)

    monkeypatch.setattr(supervise, "_run_command", end)
    assert supervise.supervise(tmp_path, FIRST, RESUME, 5, texts.append, lambda _: None) == 0
    assert 2 - len(statuses) == starts
    if starts == 1:
        assert texts == [f"{tmp_path}: ended by SIGKILL after its summary; it has finished"]


def test_an_older_summary_does_not_end_the_supervision(tmp_path, monkeypatch):
    """A finished run that is trained on, and dies before it has begun."""
    (tmp_path / "config.json").write_text('{"steps": 9, "log": {"report": false}}')
    (tmp_path / supervise.CHECKPOINTS / "step_00009").mkdir(parents=True)
    (tmp_path / "summary.json").touch()
    statuses = [-9, 0]
    monkeypatch.setattr(supervise, "_run_command", lambda _: statuses.pop(0))
    texts = []
    assert supervise.supervise(tmp_path, RESUME, RESUME, 5, texts.append, lambda _: None) == 0
    assert statuses == []


def test_trouble_at_the_start_is_retried(run):
    """It does not count as a fault of the step before it, and the waits grow to a minute."""
    none, late = [(1, None)], [(supervise.ServiceUnavailable.EXIT, None)]
    status, _, waits, texts = run([(-9, 7), *8 * none, (-9, 7), *late, (0, 9)], restarts=20)
    assert status == 0
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]
    assert "exit status 1 before any step; restart 2 of 20 in 2 s" in texts[1]
    assert "what it needs is not there (yet) before any step" in texts[-1]
    assert run([*4 * none, (1, 8), *2 * none, (0, 9)], restarts=20)[2] == [1, 2, 4, 8, 1, 2, 4]


def test_a_run_that_never_gets_to_a_step_is_given_up(run):
    status, _, waits, texts = run([(1, None)] * supervise.MAX_CRASHES_BEFORE_STEP, restarts=50)
    assert (status, sum(waits)) == (1, 243)
    assert "before any step, 10 times in a row; not restarted" in texts[-1]


def test_faults_of_one_step_count_across_failed_starts(run):
    texts = run([(1, 7), (1, None), (1, 7), (1, None), (1, 7)], 50)[3]
    assert "in step 7, where it has ended 3 times" in texts[-1]
    assert run([(1, 7), (1, 7), (1, 8), (1, 7), (1, 7), (0, 9)], restarts=50)[0] == 0


@pytest.mark.parametrize("steps", [(5, 4), (5, 6, 7), (7, 6, 5, 4), (2, 9, 3)])
def test_a_run_without_progress_is_given_up(run, steps):
    """The steps that it dies in do not matter, and the waits grow."""
    ends = [(1, step) for step in steps * 50]
    stalled = supervise.MAX_STALLED + steps.index(max(steps)) + 1
    status, _, waits, texts = run(ends[:stalled], restarts=100)
    assert (status, waits[-3:]) == (1, [8, 16, 32])
    assert f"came no further than step {max(steps)}; not restarted" in texts[-1]


def test_progress_without_a_checkpoint_is_given_up(run):
    """Every restart begins at the same step as the first start."""
    deaths = [(1, step) for step in range(1, supervise.MAX_UNSAVED + 1)]
    status, _, _, texts = run(deaths, restarts=100)
    assert status == 1
    assert "left no new checkpoint (checkpoint.every); not restarted" in texts[-1]


def test_a_run_that_leaves_checkpoints_is_not_given_up(run, tmp_path, monkeypatch):
    """This holds even if each death is in an earlier step than one before, because a restart begins
    at the checkpoint."""
    folder, begun = tmp_path / "run" / supervise.CHECKPOINTS, supervise.step_begun

    def writes_one(out):
        if step := begun(out):
            (folder / f"step_{made.pop(0):05d}").mkdir(parents=True)
        return step

    made = list(range(10, 300, 10))
    deaths = [9 + 10 * i + extra for i in range(12) for extra in (8, 3)]
    monkeypatch.setattr(supervise, "step_begun", writes_one)
    status, _, waits, _ = run([*((1, step) for step in deaths), (0, None)], restarts=100)
    assert (status, set(waits)) == (0, {1})


def test_a_step_that_cannot_be_read_is_none(tmp_path):
    path = tmp_path / supervise.BEGUN
    strange = [b"", b"\n", b"x", b"-3", b"0", b"1.5", b"\xff\xfe", b"1_0", b"7" * 99]
    for text in [*strange, "\u0665".encode()]:
        path.write_bytes(text)
        assert supervise.step_begun(tmp_path) is None, text
    path.write_bytes(b"12\n")
    assert supervise.step_begun(tmp_path) == 12
    path.unlink()
    path.mkdir()
    assert supervise.step_begun(tmp_path) is None


def test_a_damaged_run_folder_does_not_end_the_supervision(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / supervise.CHECKPOINTS).write_text("")
    statuses = [1, 1, 0]

    def damaged(_):
        (tmp_path / supervise.BEGUN).mkdir(exist_ok=True)
        return statuses.pop(0)

    monkeypatch.setattr(supervise, "_run_command", damaged)
    assert supervise.supervise(tmp_path, FIRST, RESUME, 5, lambda _: None, lambda _: None) == 0


def test_restarts_are_counted(run):
    status, commands, _, texts = run([(-9, 1), (-9, 2), (-9, 3)], restarts=2)
    assert (status, len(commands)) == (1, 3)
    assert "all 2 restarts are used up" in texts[-1]


SLEEP = f"import time; time.sleep({10 * LIMIT_S})"


@pytest.mark.process
def test_sigterm_ends_the_run_and_its_supervision(tmp_path):
    """The signal is sent once the run exists, so its supervisor already handles it."""
    there = tmp_path / "there"
    code = f"import pathlib; pathlib.Path({str(there)!r}).touch(); {SLEEP}"

    def terminate():
        wait_until(there.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    terminating = threading.Thread(target=terminate)
    terminating.start()
    assert supervise._run_command([sys.executable, "-c", code]) == 143  # 0 had it slept to its end
    terminating.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.process
def test_a_signal_during_a_process_start_reaches_the_process(monkeypatch):
    popen = subprocess.Popen

    def start(command):
        os.kill(os.getpid(), signal.SIGTERM)
        return popen(command)

    monkeypatch.setattr(supervise.subprocess, "Popen", start)
    assert supervise._run_command([sys.executable, "-c", SLEEP]) == 143


CTRL_C = '''
import signal, sys
from onepolicy.launch import restarts
# a script ignores the signal in its background processes
signal.signal(signal.SIGINT, signal.default_int_handler)
code = """import os, signal, time
came = []
# not print(), and no print() is interrupted either
signal.signal(signal.SIGINT, lambda *_: came.append(os.write(1, b'interrupted\\\\n')))
os.write(1, b'there\\\\n')
while not came:
    time.sleep(0.01)
# A second signal would be on its way by now.
# Under load this may miss it, but never sees a false one.
time.sleep(0.5)
raise SystemExit(1)"""
print(restarts._run_command([sys.executable, "-c", code]))
'''


@pytest.mark.few(1)
@pytest.mark.process
@pytest.mark.parametrize("how", ["no terminal", "typed", "killed in the foreground"])
def test_ctrl_c_reaches_the_run_once(how):
    """Ctrl-C is sent to the supervisor alone, without a terminal and in a terminal's foreground,
    and typed at the terminal of both."""
    terminal_there = how != "no terminal"
    if terminal_there:
        pid, terminal = pty.fork()
        if not pid:
            os.execv(sys.executable, [sys.executable, "-c", CTRL_C])
        stop, out = partial(os.write, terminal, b"\x03"), os.fdopen(terminal, errors="replace")
        if how != "typed":
            stop = partial(os.kill, pid, signal.SIGINT)
    else:
        process = subprocess.Popen(
            [sys.executable, "-c", CTRL_C], stdout=PIPE, text=True, start_new_session=True
        )
        stop, out = partial(process.send_signal, signal.SIGINT), process.stdout
    lines = [out.readline()]
    stop()
    with contextlib.suppress(OSError):  # how the end of a terminal reads
        lines += out
    assert re.findall(r"\w+", "".join(lines).replace("^C", "")) == ["there", "interrupted", "130"]
    out.close()
    os.waitpid(pid, 0) if terminal_there else process.wait()


@pytest.mark.process
def test_the_signal_that_ended_a_run_is_its_status():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert supervise._run_command([sys.executable, "-c", code]) == -signal.SIGKILL
    assert supervise._run_command([sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_settings_that_cannot_take_effect(capsys, monkeypatch, tmp_path):
    (tmp_path / "recipe.toml").write_text("optim.lrr = 1")
    train = ["train", str(tmp_path / "recipe.toml"), "--restarts"]
    assert main([*train, "3", f"out={tmp_path}"]) == 2
    assert "optim.lrr" in capsys.readouterr().err
    assert main([*train, "-1"]) == 2
    assert "--restarts: -1; give 0 or more" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*train, "3"]) == 2
    assert "--max-restarts" in capsys.readouterr().err


def test_a_server_that_is_not_up_yet_has_its_own_exit_status(monkeypatch, capsys, tmp_path):
    """The status is not 2, which is final."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

    def start(*_, **__):
        with (client := EngineClient(url, retries=0, server="the server")).startup_errors():
            asyncio.run(client.get("/health"))

    monkeypatch.setattr(loop_run, "start_run", start)
    text = 'out = "x"\nsteps = 1\nmodel.path = "org/m"\ntask.kind = "chain"'
    (tmp_path / "recipe.toml").write_text(text)
    assert main(["train", str(tmp_path / "recipe.toml")]) == supervise.ServiceUnavailable.EXIT == 75
    assert "Is the server running there" in capsys.readouterr().err


@pytest.mark.process
def test_importing_it_loads_no_torch():
    code = "import sys, onepolicy.launch.restarts; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
