"""Output of commands and its places: any encoding, closed and full streams, folders that take no
files."""

import argparse
import ast
import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import pytest

from onepolicy.cli import main, process
from onepolicy.config import TrainingError, UsageError, resolve
from onepolicy.config.address import check_host, check_port, check_ray_address, check_url
from onepolicy.config.output_paths import (
    check_new_run_folder,
    check_output_folder,
    check_output_path,
    check_resumable,
    claim_run_folder,
)
from onepolicy.config.stored_config import check_trust
from onepolicy.run.run_folder import convert_write_errors
from support.paths import ROOT

SOURCE = ROOT / "src"
RECIPE = ROOT / "recipes" / "quickstart.toml"
CHAIN = {"task": {"kind": "chain"}, "steps": 1, "out": "x"}
PRINTS = f"""
from onepolicy.cli import main; import sys
sys.exit(main(['config', {str(RECIPE)!r}, 'out=r\u00fcns/\u2192']))
"""


def python(code, **settings):
    """Run a process with our source and return its result."""
    before = settings.pop("environment", {})
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **before}
    settings = {"stderr": subprocess.PIPE, **settings}
    return subprocess.run([sys.executable, "-c", code], env=environment, **settings)


@pytest.mark.process
def test_every_encoding_can_print_every_result():
    done = python(PRINTS, environment={"PYTHONIOENCODING": "ascii"}, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb'out = "r\xfcns/\u2192"' in done.stdout
    done = python(PRINTS, environment={"PYTHONIOENCODING": "utf-8"}, stdout=subprocess.PIPE)
    assert tomllib.loads(done.stdout.decode())["out"] == "r\u00fcns/\u2192"


@pytest.mark.process
def test_a_locale_without_utf8_is_named():
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    code = "import sys; from onepolicy.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "config", str(RECIPE), "out=r\u00fcns".encode()]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **plain}
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 2
    assert b"out: 'r\\udcc3\\udcbcns' cannot be read as text" in done.stderr
    assert b"PYTHONUTF8=1" in done.stderr


@pytest.mark.process
def test_a_full_disk_under_stdout_is_a_failure():
    with open("/dev/full", "wb") as full:
        done = python(PRINTS, stdout=full)
    assert done.returncode == 1
    lost = b"onepolicy: stdout: No space left on device; some of the output is lost\n"
    assert done.stderr == lost


def test_a_full_disk_is_seen_in_what_waits_in_the_buffer(monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    before = os.dup(1)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), 1)
    try:
        with process.tolerant_streams():
            print("few words")
            assert process.stdout_error() == os.strerror(errno.ENOSPC)
    finally:
        os.dup2(before, 1)
        os.close(before)


@pytest.mark.process
def test_a_full_disk_under_stderr_is_nothing():
    code = "import sys; from onepolicy.cli import main; sys.exit(main(['config', 'nowhere.toml']))"
    with open("/dev/full", "wb") as full:
        assert python(code, stderr=full).returncode == 2


@pytest.mark.process
def test_a_reader_that_has_enough_is_no_failure():
    reader, writer = os.pipe()
    os.close(reader)
    done = python(PRINTS, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_streams_are_given_back():
    before = sys.stdout, sys.stderr
    assert main(["config", "nowhere.toml"]) == 2
    assert (sys.stdout, sys.stderr) == before


def test_every_text_file_names_its_encoding():
    missing = []
    for path in sorted((SOURCE / "onepolicy").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"\bopen\(|(read|write)_text\(", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and _reads_text(node)
                and "encoding" not in {k.arg for k in node.keywords}
            ):
                missing.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert missing == []


def _reads_text(call):
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if isinstance(call.func, ast.Attribute) and name in ("read_text", "write_text"):
        return True
    constants = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    return name == "open" and any(
        mode in ("r", "w", "a", "x", "r+", "w+", "a+") for mode in constants
    )


def test_a_path_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for path, why in [
        (tmp_path / ("a" * 256), "longer than 255 bytes"),
        (tmp_path / "new" / ("\u00e9" * 128) / "x", "longer than 255 bytes"),
        (tmp_path / "file" / "x" / "y", "file is a file, not a folder"),
        (tmp_path / "link", "a symbolic link to nothing"),
    ]:
        for check in (check_output_path, check_output_folder):
            with pytest.raises(UsageError, match=f"^--out: .*{why}"):
                check("--out", path)
    monkeypatch.setattr(os, "fsencode", lambda name: str(name).encode("ascii"))
    with pytest.raises(UsageError, match="characters that this system's names of files lack"):
        check_output_path("--out", tmp_path / "\u65e5")
    monkeypatch.undo()
    check_output_path("--out", tmp_path / ("a" * 255))
    check_output_path("--out", tmp_path / "new" / "newer")
    with pytest.raises(UsageError, match=r"out: .*file cannot be written to: it is a file"):
        check_new_run_folder(tmp_path / "file")


@pytest.mark.process
@pytest.mark.needs("setpriv")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_somebody_elses_folder_is_refused_before_loading(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/") and folder.stat().st_uid == 0:
            folder.chmod(folder.stat().st_mode | 0o055)
    code = f"""
import sys; sys.path.insert(0, {str(SOURCE)!r})
from pathlib import Path
from onepolicy.config import UsageError
from onepolicy.config.output_paths import check_new_run_folder, check_resumable
new, old = {str(tmp_path / "new")!r}, {str(run)!r}
for check, path in ((check_new_run_folder, new), (check_resumable, old)):
    try: check(Path(path))
    except UsageError as error: print(error)
"""
    # whoever cannot read the sources themselves cannot run this test either
    command = ["setpriv", "--reuid", "12345", "--clear-groups", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No module named" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("this processor's Python is not readable by others")
    new, resumed = done.stdout.splitlines()
    assert "new cannot be made: " in new
    assert "permission denied" in new
    assert f"{run}: cannot be written to: permission denied" in resumed


def test_a_read_only_file_system_is_named(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(os, "access", lambda *a: False)
    monkeypatch.setattr(os, "statvfs", lambda path: argparse.Namespace(f_flag=os.ST_RDONLY))
    with pytest.raises(UsageError, match=r"cannot be written to: the file system is read-only"):
        check_resumable(tmp_path)
    with pytest.raises(UsageError, match=r"new cannot be made: .*: the file system is read-only"):
        check_new_run_folder(tmp_path / "new")


def test_the_first_free_sibling(tmp_path):
    out = tmp_path / "runs" / "r"
    for _ in range(2):  # the claim ends with its context
        with claim_run_folder(out) as free:
            assert free == out
        assert not out.exists()
    out.mkdir()
    (out / "config.json").write_text("")
    (tmp_path / "runs" / "r-2").write_text("")
    with claim_run_folder(out) as free:
        assert free.name == "r-3"
    assert sorted(os.listdir(out.parent)) == ["r", "r-2"]


def test_an_empty_folder_is_free_and_stays(tmp_path, monkeypatch):
    """It may be a mount, or the folder of a start that was killed."""
    out = tmp_path / "r"
    out.mkdir()
    (tmp_path / "link").symlink_to(out)
    for name in ("r", "link"):
        with claim_run_folder(tmp_path / name) as free, claim_run_folder(out) as second:
            assert (free.name, second.name) == (name, "r-2")
    assert sorted(os.listdir(tmp_path)) == ["link", "r"]
    monkeypatch.chdir(out)
    with claim_run_folder(Path()) as free, claim_run_folder(Path()) as second:
        assert (free, second) == (out, tmp_path / "r-2")


def test_simultaneous_starts_get_a_folder_each(tmp_path):
    out = tmp_path / "r"
    with (
        claim_run_folder(out) as first,
        claim_run_folder(out) as second,
        claim_run_folder(out) as third,
    ):
        assert [each.name for each in (first, second, third)] == ["r", "r-2", "r-3"]
        made = tmp_path / "made"
        made.mkdir()
        (made / "config.json").write_text("")
        made.rename(second)  # as a run is put there
        with claim_run_folder(out) as fourth:
            assert fourth.name == "r-4"
    assert os.listdir(tmp_path) == ["r-2"]
    assert os.listdir(second) == ["config.json"]


@pytest.mark.process
def test_many_simultaneous_processes_share_no_folder(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from onepolicy.config.output_paths import claim_run_folder\n"
        f"with claim_run_folder(Path({str(tmp_path / 'r')!r})) as out:\n"
        "    print(out.name, flush=True)\n"
        "    sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) for _ in range(3)
    ]
    try:
        names = {each.stdout.readline().strip() for each in running}
    finally:
        for each in running:
            each.communicate()
    assert names == {"r", "r-2", "r-3"}
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("restarts", [[], ["--restarts=1"]])
def test_a_starting_run_holds_its_folder(tmp_path, tmp_path_factory, monkeypatch, capsys, restarts):
    model = tmp_path_factory.mktemp("model")  # the tiny policy may not have been made yet
    (model / "config.json").write_text('{"model_type": "qwen3_moe"}')
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        RECIPE.read_text().replace(
            'out = "runs/quickstart"', f"out = {json.dumps(str(tmp_path / 'r'))}"
        )
    )
    starts = []

    def start(*arguments, **_):
        place = arguments[0] if restarts else arguments[0].out
        starts.append(Path(place).name)
        if len(starts) < 3:
            main(["train", str(recipe), f"model.path={model}", *restarts])
        raise UsageError("enough")

    monkeypatch.setattr(
        "onepolicy.cli.train.supervise" if restarts else "onepolicy.run.train.start_run",
        start,
    )
    assert main(["train", str(recipe), f"model.path={model}", *restarts]) == 2
    assert starts == ["r", "r-2", "r-3"]
    assert os.listdir(tmp_path) == ["r.toml"]


BAD_URLS = [
    *(f"http://127.0.0.1:{port}" for port in ("99999", "x", "0", "-1", "", "8_0", "8\u0660")),
    *("http://[::1", "http://::1:8000", "http://[::1]x:80", "http://[v1.a]:80"),
    *("http://[1::2::3]:80", "http://300.1.1.1:80", "127.0.0.1:8000", "localhost:8000"),
    *("//host:8000", "http:host", "ftp://host", "http://", "http:///path", "http://:80", ""),
    *("http://a b", "http://a..b", "http://" + 64 * "a", "http://host/a b", "http://host\n"),
    "http://*:80",
]
BAD_RAY = ["host", "host:0", "host:65536", "host:x", ":1", "::1:1", "ray://host:1", "h:9\u0669"]


def test_addresses_of_servers(subtests):
    for url, kind in product(BAD_URLS, ("vllm-server", "sglang")):
        engine = {"kind": kind, "url": url}
        with (
            subtests.test(url, kind=kind),
            pytest.raises(UsageError, match=r"^rollout\.engine\.url: "),
        ):
            resolve(CHAIN | {"model": {"path": "x"}, "rollout": {"engine": engine}})
    for url in (
        "http://127.0.0.1:8000",
        "https://host/v",
        "http://[::1]:1",
        "http://\u00fc.de:65535",
    ):
        check_url(url)


def test_a_secret_in_a_wrong_address_is_not_repeated():
    with pytest.raises(UsageError) as error:
        check_url("http://user:hunter2@host:99999")
    assert "hunter2" not in str(error.value)


def test_addresses_of_ray(subtests):
    for address in BAD_RAY:
        cluster = {"kind": "ray", "address": address}
        with subtests.test(address):
            with pytest.raises(UsageError, match=r"^cluster\.address: "):
                check_ray_address(address)
            with pytest.raises(UsageError, match=r"^cluster\.address: "):
                resolve(CHAIN | {"model": {"path": "x"}, "cluster": cluster})
    for address in ("auto", "host:6379", "[::1]:6379"):
        check_ray_address(address)


def test_host_and_port_of_engine_serve(capsys):
    for port in ("0", "-1", "65536", "99999"):
        assert main(["engine", "serve", "tiny", f"--port={port}"]) == 2
        assert f"--port: {port} is no port" in capsys.readouterr().err
    assert main(["engine", "serve", "tiny", "--host", 70 * "a"]) == 2
    assert "--host: " in capsys.readouterr().err
    check_host("::1", "--host")
    check_port(65535, "--port")


def test_a_place_of_torchrun_that_is_no_number(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "x")
            assert main(["train", str(RECIPE)]) == 2
        assert f"{name}: 'x' in the environment is no number" in capsys.readouterr().err


def test_an_error_of_the_file_system_is_one_line(monkeypatch, capsys):
    def fail(status):
        def run(arguments):
            raise OSError(status, os.strerror(status), "/some/file")

        monkeypatch.setattr("onepolicy.cli.show_config.run_config", run)
        return main(["config", "x"])

    assert (fail(errno.EACCES), fail(errno.ENAMETOOLONG), fail(errno.EIO)) == (2, 2, 1)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("onepolicy: /some/file: Permission denied; ")
    assert len(said) == 3


def test_nul_in_arguments_and_settings(capsys):
    with pytest.raises(SystemExit) as end:
        main(["config", "a\0b"])
    assert end.value.code == 2
    with pytest.raises(UsageError, match=r"^model\.path: .*NUL"):
        resolve(CHAIN | {"model": {"path": "a\0b"}})


@pytest.fixture
def run(tmp_path):
    """Make a run folder of 5 steps, as far as Ctrl-C reads it."""
    path = tmp_path / "my run"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 6)))
    return path


def test_ctrl_c_reports_the_cost_of_a_resume(run):
    resume = f"`onepolicy train --resume '{run}'`"
    assert process.describe_stop("Ctrl-C", run) == (
        f"stopped by Ctrl-C; {run} has no checkpoint yet: {resume} starts again where the run began"
    )
    (run / "checkpoints" / "step_00004").mkdir(parents=True)
    (run / "checkpoints" / ".step_00005.writing").mkdir()
    assert process.describe_stop("Ctrl-C", run) == (
        f"stopped by Ctrl-C; the last checkpoint of {run} is of step 4: {resume} continues; "
        "finished steps that it computes again: 1"
    )
    (run / "checkpoints" / "step_00005").mkdir()
    assert process.describe_stop("Ctrl-C", run).endswith(f"is of step 5: {resume} continues")
    assert process.describe_stop("SIGTERM", run.parent / "new") == (
        f"stopped by SIGTERM before the run folder {run.parent / 'new'} was made; nothing is lost"
    )
    (run / "metrics.jsonl").write_bytes(b"\x80")
    assert "is of step 5" in process.describe_stop("Ctrl-C", run)


def test_the_command_that_resumes_repeats_what_must_be_typed(run):
    url = 'rollout.engine.url=["https://a.example", "https://b.example"]'
    server = ["rollout.engine.kind=vllm-server", url, "rollout.engine.token_env=TOKEN"]
    model = ["model.path=m", "model.trust_remote_code=true"]
    config = resolve(CHAIN, [*model, *server])
    (run / "config.json").write_text(config.model_dump_json())
    said = process.describe_stop("SIGTERM", run)
    command = shlex.split(said.partition("`")[2].partition("`")[0])
    assert command[:4] == ["onepolicy", "train", "--resume", str(run)]
    check_trust(config, run, command[4:], "train")
    assert resolve(config.model_dump(), command[4:]) == config
    with pytest.raises(TrainingError) as failed, convert_write_errors(run):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert f"continue with `{shlex.join(command)}`" in str(failed.value)


def test_ctrl_c_of_other_commands_does_not_mention_resuming(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    arguments = argparse.Namespace(run=interrupt, command="measure")
    monkeypatch.setattr("onepolicy.cli.parse_arguments", lambda argv: arguments)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main([]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "\nonepolicy: stopped by Ctrl-C\n"


ENDING = """
import atexit, os, signal, sys
from onepolicy import cli
from onepolicy.cli import show_config

def run(arguments):
    os.kill(os.getpid(), signal.{signal})
    signal.pause()

def at_the_end():
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()

atexit.register(at_the_end)
show_config.run_config = run
sys.exit(cli.main(["config", "x"]))
"""


EARLY = """
import os, pkgutil, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == {first!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["onepolicy", "config", "nowhere.toml"]
{start}
"""


@pytest.mark.process
def test_ctrl_c_in_the_first_imports_is_one_line(subtests):
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    installed = f"sys.exit(pkgutil.resolve_name({project['scripts']['onepolicy']!r})())"
    module = "runpy.run_module('onepolicy', run_name='__main__')"
    for start, first in [
        (installed, "argparse"),
        (installed, "pydantic"),
        (installed, "onepolicy.config.run"),
        (module, "onepolicy.cli"),
    ]:
        done = python(EARLY.format(first=first, start=start))
        with subtests.test(start=start, first=first):
            assert (done.returncode, done.stderr) == (130, b"\nonepolicy: stopped by Ctrl-C\n")


@pytest.mark.process
def test_a_second_ctrl_c_ends_without_a_traceback():
    done = python(ENDING.format(signal="SIGINT"))
    assert (done.returncode, done.stderr) == (130, b"\nonepolicy: stopped by Ctrl-C\n")


@pytest.mark.process
def test_sigterm_is_reported_and_ends_as_usual():
    done = python(ENDING.format(signal="SIGTERM"))
    assert done.returncode == -signal.SIGTERM
    assert done.stderr == b"onepolicy: stopped by SIGTERM\n"
