"""A vLLM server's start command, its access rules, and the files of its weights."""

import contextlib
import errno
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
from onepolicy.rollout.servers.token import find_token
from onepolicy.rollout.vllm import serve
from onepolicy.rollout.vllm.guard import HOSTS_VARIABLE, TOKEN_VARIABLE, VOCAB_VARIABLE
from onepolicy.rollout.vllm.start import engine_args
from onepolicy.sync import weight_files
from onepolicy.sync.weight_files import INDEX, WeightFiles
from support.waiting import LIMIT_S, wait_until

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
    expected = {
        "--model": "/models/m",
        "--dtype": "bfloat16",
        "--max-model-len": "96",
        "--max-logprobs": "32",
        "--logprobs-mode": "processed_logprobs",
        "--enable-return-routed-experts": None,
        "--enable-prefix-caching": None,
        "--no-enable-chunked-prefill": None,
        "--enable-scale-out": None,
        "--enable-prompt-tokens-details": None,
        "--host": "127.0.0.1",
        "--worker-extension-cls": "onepolicy.rollout.vllm.worker.WorkerExtension",
    }
    assert expected.items() <= line.items()
    assert json.loads(line["--hf-overrides"]) == {"head_dtype": "float32"}
    assert not {"--block-size", "--trust-remote-code"} & line.keys()  # vLLM's choice; nobody asked
    assert line["--middleware"] == "onepolicy.rollout.vllm.guard.Guard"
    assert json.loads(line["--allowed-origins"]) == []


def test_a_server_that_takes_adapters_has_its_own_worker_and_variable(monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name)
    seen = {}

    @contextlib.contextmanager
    def run(command, environment):
        seen.update(command=command, environment=environment)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(serve, "_run_command", run)
    adapters = {"enable_lora": True, "max_lora_rank": 16, "lora_target_modules": ["q", "v"]}
    settings = {"max_len": 8, "vocab": 8, "return_routes": True, "cpu": True}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for given in (adapters, None):
        with pytest.raises(KeyboardInterrupt):
            serve.run_server(ServeConfig(), "m", adapters=given, port=port, **settings)
        line = flags(seen["command"])
        at = seen["environment"].get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
        assert ("--enable-lora" in line, at) == ((True, "1") if given else (False, None))
        if given:
            first = seen["command"].index("--lora-target-modules")
            assert seen["command"][first + 1 : first + 3] == ["q", "v"]
            assert line["--worker-cls"] == serve.CPU_ADAPTER_WORKER


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("quant=fp8", "lora_rank: 16, but runs with train.lora.sync = native refuse rollout.quan"),
        ("tensor_parallel_size=2", "adapters were never run with tensor_parallel_size = 2"),
    ],
)
def test_settings_that_adapters_were_never_run_with_are_refused(policy, setting, message, capsys):
    assert main(["engine", "serve", str(policy), "lora_rank=16", setting]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_environment_opens_the_endpoints_and_has_the_token(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    found = serve.server_environment("s3cret", hosts=["node-1"], vocab=32, cpu=True)
    assert found["VLLM_SERVER_DEV_MODE"] == "1"
    assert (found[TOKEN_VARIABLE], found["OMP_WAIT_POLICY"]) == ("s3cret", "active")
    assert (found[HOSTS_VARIABLE], found[VOCAB_VARIABLE]) == ('["node-1"]', "32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "--host: 0.0.0.0 is open to other machines"),
        ({"token_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE is not set"),
        ({"port": None}, "--port: 127.0.0.1:.* cannot be used: Address already in use"),
    ],
)
def test_servers_that_must_not_start(monkeypatch, settings, message):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = settings.get("port", 8000) or taken.getsockname()[1]
        with pytest.raises(UsageError, match=message):
            serve.run_server(
                ServeConfig(),
                "m",
                max_len=8,
                vocab=8,
                return_routes=True,
                cpu=True,
                **settings | {"port": port},
            )


def test_a_server_that_ends_at_its_start_gives_its_exit_status(monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(
        serve, "command_line", lambda *_, **__: [sys.executable, "-c", "import sys; sys.exit(3)"]
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said = []
    found = serve.run_server(
        ServeConfig(),
        "m",
        max_len=8,
        vocab=8,
        return_routes=True,
        cpu=True,
        port=port,
        log=said.append,
    )
    assert (found, [text for text in said if "ready" in text]) == (3, [])
    assert find_token("127.0.0.1", port) is None


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


def test_a_token_is_made_and_found_by_a_run_on_this_machine(monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(
        serve, "command_line", lambda _, host, port: [sys.executable, "-c", SERVER, str(port)]
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said, found = [], {}

    def say(text):
        said.append(text)
        if "ready after" in text:
            found["token"] = find_token("127.0.0.1", port)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve.run_server(
            ServeConfig(), "m", max_len=8, vocab=8, return_routes=True, cpu=True, port=port, log=say
        )
    assert f"127.0.0.1.{port}" in said[0]
    assert len(found["token"]) >= 32
    assert found["token"] not in "".join(said)
    assert find_token("127.0.0.1", port) is None


def test_the_servers_process_ends_with_ours():
    with serve._run_command(
        [sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ)
    ) as process:
        assert process.poll() is None
    assert process.returncode == -15


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
WRAPPER = """
import os, sys
from onepolicy.rollout.vllm import serve
serve.STOP_TIMEOUT_S = 0.2
with serve._run_command([sys.executable, sys.argv[1]], dict(os.environ)) as process:
    os.write(1, f"wrapper {os.getpid()}\\nreaper {process.pid}\\n".encode())
    raise SystemExit(process.wait() % 256)
"""


@pytest.fixture
def tree(tmp_path):
    """Start a wrapper and the processes below it, by name. The engine is the server's child."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    command = [sys.executable, str(tmp_path / "wrapper.py"), str(tmp_path / "stand_in.py")]
    wrapper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    lines = [wrapper.stdout.readline() for _ in range(4)]
    pids = {name: int(pid) for name, pid in map(str.split, lines)}
    yield wrapper, pids
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wrapper.wait()
    wrapper.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT]
)
def test_every_end_of_the_wrapper_ends_server_and_engine(tree, number):
    wrapper, pids = tree
    wrapper.send_signal(number)
    assert wrapper.wait(LIMIT_S) not in (0, None)
    wait_until_gone(pids.values())


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_killed_server_leaves_no_engine_and_is_reported(tree):
    wrapper, pids = tree
    os.kill(pids["server"], signal.SIGKILL)
    assert wrapper.wait(LIMIT_S) == 256 - signal.SIGKILL
    wait_until_gone(pids.values())


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_killed_reaper_takes_the_server_with_it(tree):
    wrapper, pids = tree
    os.kill(pids["reaper"], signal.SIGKILL)
    assert wrapper.wait(LIMIT_S) == 256 - signal.SIGKILL
    wait_until_gone([pids["server"]])


def wait_until_gone(pids):
    wait_until(lambda: not any(alive(pid) for pid in pids))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


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
    assert [path.name for path in files.folder.iterdir()] == ["version_2"]
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
    with pytest.raises(
        TrainingError, match=r"version 2: .*No space left.*sync_dir|sync_dir.*No space left"
    ):
        files.write_version(weights(2), 2)
    assert first.exists()
    assert not (files.folder / "version_2").exists()
    with pytest.raises(
        TrainingError,
        match=r"^cluster\.sync_dir: .* set cluster\.sync_dir to a folder with room",
    ):
        WeightFiles(str(tmp_path), "cluster.sync_dir").write_version(weights(2), 2)


def test_folders_of_ended_processes_are_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = socket.gethostname()
    for name in (
        f"{host}.{ended.pid}.x1",
        f"{host}.{os.getpid()}.x2",
        f"another-host.{ended.pid}.x3",
        "mine",
    ):
        (tmp_path / name).mkdir()
    files = WeightFiles(str(tmp_path))
    left = {path.name for path in tmp_path.iterdir()} - {files.folder.name}
    assert left == {f"{host}.{os.getpid()}.x2", f"another-host.{ended.pid}.x3", "mine"}
    files._remove()
    assert not files.folder.exists()


def test_an_unwritable_folder_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"rollout.engine.sync_dir: .*cannot be written to"):
        WeightFiles(str(tmp_path / "file"))
