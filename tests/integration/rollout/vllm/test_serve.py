"""A vLLM server's start command, its access rules, and the files of its weights."""

import contextlib
import errno
import functools
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from onepolicy.cli import main
from onepolicy.config import TrainingError, UsageError, VLLMEngineConfig
from onepolicy.config.serve import ServeConfig
from onepolicy.rollout.remote.token import find_token
from onepolicy.rollout.vllm import reaper, serve
from onepolicy.rollout.vllm.guard import HOSTS_VARIABLE, TOKEN_VARIABLE, VOCAB_VARIABLE
from onepolicy.rollout.vllm.start import engine_args
from onepolicy.sync import weight_files
from onepolicy.sync.weight_files import INDEX, WeightFiles
from support.own_processes import gone, wait_until_gone

SETTINGS = engine_args(
    VLLMEngineConfig(dtype="bfloat16", lm_head="float32"),
    "/models/m",
    max_len=96,
    top_logprobs=32,
    return_routes=True,
    cpu=True,
    trust_remote_code=False,
)


def flags(command):
    """Return --name value and --name as a dict."""
    found = {}
    for i, word in enumerate(command):
        if word.startswith("--"):
            following = command[i + 1] if i + 1 < len(command) else "--"
            found[word] = None if following.startswith("--") else following
    return found


def test_the_command_line_equals_the_engine_in_this_process():
    line = flags(serve.command_line(SETTINGS, "127.0.0.1", 8000))
    expected = {"--model": "/models/m", "--dtype": "bfloat16", "--max-model-len": "96"}
    expected |= {"--max-logprobs": "32", "--logprobs-mode": "processed_logprobs"}
    expected |= {"--host": "127.0.0.1", "--middleware": "onepolicy.rollout.vllm.guard.Guard"}
    expected |= {"--worker-extension-cls": "onepolicy.rollout.vllm.worker.WorkerExtension"}
    alone = ("enable-return-routed-experts", "enable-prefix-caching", "no-enable-chunked-prefill")
    alone += ("enable-scale-out", "enable-prompt-tokens-details")
    expected |= dict.fromkeys(f"--{name}" for name in alone)
    assert expected.items() <= line.items()
    assert json.loads(line["--hf-overrides"]) == {"head_dtype": "float32"}
    assert not {"--block-size", "--trust-remote-code"} & line.keys()  # vLLM's choice; nobody asked
    assert json.loads(line["--allowed-origins"]) == []


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture
def run_server(monkeypatch):
    """Return run_server of a machine that seems to have vLLM, for a small model."""
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name)
    settings = {"max_len": 8, "vocab": 8, "return_routes": True, "cpu": True}
    return functools.partial(serve.run_server, ServeConfig(), "m", **settings)


def test_a_server_that_takes_adapters_has_its_own_worker_and_variable(
    run_server, port, monkeypatch
):
    seen = {}

    @contextlib.contextmanager
    def run(command, environment):
        seen.update(command=command, environment=environment)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(serve, "_run_command", run)
    adapters = {"enable_lora": True, "max_lora_rank": 16, "lora_target_modules": ["q", "v"]}
    for given in (adapters, None):
        with pytest.raises(KeyboardInterrupt):
            run_server(adapters=given, port=port)
        line = flags(seen["command"])
        at = seen["environment"].get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
        assert ("--enable-lora" in line, at) == ((True, "1") if given else (False, None))
        if given:
            first = seen["command"].index("--lora-target-modules")
            assert seen["command"][first + 1 : first + 3] == ["q", "v"]
            assert line["--worker-cls"] == serve.CPU_ADAPTER_WORKER


def test_settings_that_adapters_were_never_run_with_are_refused(policy, capsys):
    for setting, message in (
        ("quant=fp8", "lora_rank: 16, but runs with train.lora.sync = native refuse rollout.quan"),
        ("tensor_parallel_size=2", "adapters were never run with tensor_parallel_size = 2"),
    ):
        assert main(["engine", "serve", str(policy), "lora_rank=16", setting]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_the_environment_opens_the_endpoints_and_has_the_token(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    found = serve.server_environment("s3cret", hosts=["node-1"], vocab=32, cpu=True)
    assert found["VLLM_SERVER_DEV_MODE"] == "1"
    assert (found[TOKEN_VARIABLE], found["OMP_WAIT_POLICY"]) == ("s3cret", "active")
    assert (found[HOSTS_VARIABLE], found[VOCAB_VARIABLE]) == ('["node-1"]', "32")


def test_servers_that_must_not_start(run_server, port):
    with pytest.raises(UsageError, match=r"--host: .* is open to other machines"):
        run_server(host="0.0.0.0", port=port)
    with pytest.raises(UsageError, match="NOT_SET_ANYWHERE is not set"):
        run_server(token_env="NOT_SET_ANYWHERE", port=port)
    in_use = "--port: 127.0.0.1:.* cannot be used: Address already in use"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match=in_use):
        run_server(port=taken.getsockname()[1])


@pytest.mark.process
def test_a_server_that_ends_at_its_start_gives_its_exit_status(run_server, port, monkeypatch):
    command = [sys.executable, "-c", "import sys; sys.exit(3)"]
    monkeypatch.setattr(serve, "command_line", lambda *_, **__: command)
    said = []
    found = run_server(port=port, log=said.append)
    assert (found, [text for text in said if "ready" in text]) == (3, [])
    assert find_token("127.0.0.1", port) is None


@pytest.mark.process
def test_a_signal_is_no_exit_status_of_a_server():
    for line, status in (("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 1)):
        with subprocess.Popen(["sh", "-c", line]) as process:
            assert serve.exit_status(process) == status


SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers.get("authorization") == "Bearer " + os.environ["VLLM_API_KEY"]
        self.send_response(200 if right else 401)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.process
def test_a_token_is_made_and_found_by_a_run_on_this_machine(run_server, port, monkeypatch):
    command = [sys.executable, "-c", SERVER, str(port)]
    monkeypatch.setattr(serve, "command_line", lambda *_, **__: command)
    said, found = [], {}

    def say(text):
        said.append(text)
        if "ready after" in text:
            found["token"] = find_token("127.0.0.1", port)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_server(port=port, log=say)
    assert f"127.0.0.1.{port}" in said[0]
    assert [text for text in said if "warm-up" in text] == ["warm-up: the first request"]
    assert len(found["token"]) >= 32
    assert found["token"] not in "".join(said)
    assert find_token("127.0.0.1", port) is None


STAND_IN = """
import os, signal, subprocess, sys, time
role = sys.argv[1] if len(sys.argv) > 1 else "server"
if role == "engine":  # deaf, and not of the server's process group
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    subprocess.Popen([sys.executable, __file__, "engine"])
os.write(1, f"{role} {os.getpid()}\\n".encode())
time.sleep(600)
"""
WRAPPERS = """
import os, sys
from onepolicy.rollout.vllm import reaper, serve
serve.STOP_TIMEOUT_S = 0.2
for _ in sys.stdin:
    if not (pid := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
os.setsid()
command = [sys.executable, sys.argv[1]]
with reaper.adopted_children_end(), serve._run_command(command, dict(os.environ)) as process:
    os.write(1, f"wrapper {os.getpid()}\\nreaper {process.pid}\\n".encode())
    raise SystemExit(serve.exit_status(process))
"""
ENDS = [
    *(("wrapper", getattr(signal, name), None) for name in ("SIGTERM", "SIGHUP", "SIGINT")),
    ("wrapper", signal.SIGKILL, -signal.SIGKILL),
    ("server", signal.SIGKILL, 1),
    ("reaper", signal.SIGKILL, 1),
]
"""(who is sent a signal, the signal, exit status of the wrapper; None: any but 0)."""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.process
def test_no_end_leaves_the_server_or_its_engine(tmp_path, subtests):
    """The engine is the server's child. A killed reaper takes the server with it, and its starter
    ends the engine."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    command = [sys.executable, "-c", WRAPPERS, str(tmp_path / "stand_in.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as wrappers:
        for name, number, status in ENDS:
            wrappers.stdin.write("next\n")
            wrappers.stdin.flush()
            lines = [wrappers.stdout.readline() for _ in range(4)]
            pids = {role: int(pid) for role, pid in map(str.split, lines)}
            with subtests.test(name=name, number=number):
                try:
                    os.kill(pids[name], number)
                    ended = int(wrappers.stdout.readline())
                    assert ended == status or (status is None and ended != 0)
                    wait_until_gone(pids.values())
                finally:
                    for pid in pids.values():
                        if not gone(pid):
                            os.kill(pid, signal.SIGKILL)
        wrappers.stdin.close()


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_children_that_a_process_had_before_live_on():
    sleeper = ["sleep", "600"]
    with subprocess.Popen(sleeper) as before:
        with reaper.adopted_children_end():
            inside = subprocess.Popen(sleeper)
        assert (gone(before.pid), gone(inside.pid)) == (False, True)
        before.kill()


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 4, generator=generator)
    yield "a", base[:3]  # two views of one storage, as unfused experts are
    yield "b", base[3:]
    yield "c", base.T
    yield "d", torch.ones(2, dtype=torch.bfloat16)


def test_weights_arrive_whole_and_only_the_newest_files_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 64)
    files = WeightFiles(str(tmp_path / "sync"))
    first = files.write_version(weights(1), 1)
    second = files.write_version(weights(2), 2)
    assert not first.exists()
    assert [path.name for path in files.folder.glob("[!.]*")] == ["version_2"]
    index = json.loads((second / INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 1
    assert {path.name for path in second.glob("*.safetensors")} == set(index.values())
    for name, tensor in weights(2):
        assert torch.equal(load_file(second / index[name])[name], tensor)
    assert files.folder.stat().st_mode & 0o077 == 0  # nobody else's business
    again = files.write_version(weights(3), 2)
    assert torch.equal(load_file(again / index["a"])["a"], dict(weights(3))["a"])


def test_an_interrupted_write_leaves_the_version_before(tmp_path, monkeypatch):
    files = WeightFiles(str(tmp_path))
    first = files.write_version(weights(1), 1)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weight_files, "save_file", full)
    left = r"version 2: .*No space left.*sync_dir|sync_dir.*No space left"
    with pytest.raises(TrainingError, match=left):
        files.write_version(weights(2), 2)
    assert first.exists()
    assert not (files.folder / "version_2").exists()
    of_server = WeightFiles(str(tmp_path), "TMPDIR")
    with pytest.raises(TrainingError, match=r"^TMPDIR: .* set TMPDIR to"):
        of_server.write_version(weights(2), 2)


@pytest.mark.process
def test_folders_of_ended_processes_are_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = socket.gethostname()
    kept = {f"{host}.{os.getpid()}.x2", f"another-host.{ended.pid}.x3", "mine"}
    for name in {f"{host}.{ended.pid}.x1"} | kept:
        (tmp_path / name).mkdir()
    files = WeightFiles(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} - {files.folder.name} == kept
    of_container = files.folder.rename(tmp_path / f"{host}.{ended.pid}.x4")  # a pid of elsewhere
    WeightFiles(str(tmp_path))
    assert of_container.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"rollout.engine.sync_dir: .*cannot be written to"):
        WeightFiles(str(tmp_path / "file"))
