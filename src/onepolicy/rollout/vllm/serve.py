"""`onepolicy engine serve`: a vLLM server for rollout/remote/dialects/vllm.py."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from onepolicy.config import UsageError
from onepolicy.config.address import is_loopback
from onepolicy.config.serve import ServeConfig
from onepolicy.rollout.remote.client import EngineClient
from onepolicy.rollout.remote.token import create_token_file, remove_token_file, token_from_env
from onepolicy.rollout.vllm import quant as vllm_quant
from onepolicy.rollout.vllm import reaper
from onepolicy.rollout.vllm.guard import HOSTS_VARIABLE, TOKEN_VARIABLE, VOCAB_VARIABLE, Guard
from onepolicy.rollout.vllm.served_adapter import ADAPTERS_VARIABLE
from onepolicy.rollout.vllm.start import UNBOUND, engine_args
from onepolicy.rollout.vllm.worker import WorkerExtension
from onepolicy.telemetry import OPT_OUT

START_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 30.0
CPU_ADAPTER_WORKER = "onepolicy.rollout.vllm.adapter_worker.AdapterCPUWorker"
RESERVED_FLAGS = (
    "--aux-output-config",
    "--allow-credentials",
    "--allowed-headers",
    "--allowed-methods",
    "--allowed-origins",
    "--api-key",
    "--api-server-count",
    "--config",
    "--host",
    "--middleware",
    "--port",
    "--root-path",
    "--trust-remote-code",
    "--uds",
    "--worker-extension-cls",
)
"""vLLM's arguments that decide who reaches the server, whose code it runs, or the guard's rules.

`--aux-output-config` would make its store of routes (0.31 and newer) smaller than its cache, which
is the default: routes of cached prefixes would be dropped, and requests with these prefixes fail.
"""


def run_server(
    config: ServeConfig,
    path: str,
    *,
    max_len: int,
    vocab: int,
    return_routes: bool,
    cpu: bool,
    trust_remote_code: bool = False,
    adapters: dict[str, Any] | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_env: str | None = None,
    names: Sequence[str] = (),
    extra: Sequence[str] = (),
    log: Callable[[str], None] = print,
) -> int:
    """Run a server until it ends or this process gets a signal. Return its exit status.

    adapters: EngineArgs of `adapter.server_args`, for a server that runs send LoRA adapters to.
    token_env: environment variable with the bearer token of every request; a token is needed
    because the endpoints that load weights run code. None, for a loopback address only: make a
    token in a file that this user's runs find. names: further host names that requests may use.
    extra: further arguments for vLLM. log: called with each line of progress.
    """
    vllm_quant.check_quant_device(config.quant, cpu=cpu)
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(
            "engine serve: vllm is not installed; run `make vllm` (CPU) or pip install "
            "'onepolicy[vllm]'"
        )
    token = _given_token(host, token_env)
    _check_extra(extra)
    _check_port(host, port)
    settings = engine_args(
        config,
        path,
        max_len=max_len,
        top_logprobs=vocab,
        return_routes=return_routes,
        cpu=cpu,
        trust_remote_code=trust_remote_code,
        quant=config.quant,
    )
    if adapters is not None:
        settings |= adapters
        if cpu:
            settings["worker_cls"] = CPU_ADAPTER_WORKER
    command = [*command_line(settings, host, port), *extra]
    started = time.monotonic()
    with _server_token(token, host, port, log) as server_token:
        hosts = allowed_hosts(host, names)
        variables = server_environment(server_token, hosts=hosts, vocab=vocab, cpu=cpu)
        if adapters is not None:
            variables[ADAPTERS_VARIABLE] = "1"
        if cpu and config.tensor_parallel_size > 1:
            variables |= UNBOUND
        url = _client_url(host, port)
        client = EngineClient(url, token_env=token_env, retries=0, server="the vLLM server")
        with reaper.adopted_children_end(), _run_command(command, variables) as process:
            if asyncio.run(_warm_up(client, process, started, log)):
                seconds = time.monotonic() - started
                log(
                    f"ready after {seconds:.0f} s: rollout.engine.kind=vllm-server "
                    f"rollout.engine.url={url}"
                )
            return exit_status(process)


def _given_token(host: str, token_env: str | None) -> str | None:
    """Return the token of the environment variable, None to make one."""
    if token_env is not None:
        return token_from_env(token_env, "--token-env")
    if not is_loopback(host):
        raise UsageError(
            f"--host: {host} is open to other machines, and whoever reaches the server can load "
            "weights into it; set a variable to a secret and name it with --token-env"
        )
    return None


@contextmanager
def _server_token(
    token: str | None, host: str, port: int, log: Callable[[str], None]
) -> Iterator[str]:
    """Yield the token, or a new one that is stored in a file."""
    if token is None:
        with create_token_file(host, port) as (new_token, path):
            log(f"the server's token is new; runs of this user on this machine find it in {path}")
            yield new_token
        return
    if is_loopback(host):
        remove_token_file(host, port)
    yield token


def _client_url(host: str, port: int) -> str:
    """Return the URL of this server for a client on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"


def command_line(settings: dict[str, Any], host: str, port: int) -> list[str]:
    """Return the server's command.

    settings: EngineArgs; None leaves one to vLLM.
    """
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", host, "--port", str(port)]
    for name, value in settings.items():
        command += _flag(name.replace("_", "-"), value)
    command += ["--worker-extension-cls", _qualified_name(WorkerExtension)]
    command += ["--enable-scale-out"]  # /inference/v1/generate: token ids in, token ids out
    command += ["--enable-prompt-tokens-details"]  # number of cached prompt tokens
    command += ["--disable-uvicorn-access-log"]
    command += ["--middleware", _qualified_name(Guard)]
    command += ["--allowed-origins", "[]"]  # vLLM's default is every web page
    return command


def _flag(name: str, value: Any) -> list[str]:
    if value is None or value == {}:
        return []
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [f"--no-{name}"]
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value)]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"


def allowed_hosts(host: str, names: Sequence[str]) -> list[str]:
    """Return the Hosts that requests may have beside the loopback's names."""
    if is_loopback(host):
        return [*names]
    return sorted({host, socket.gethostname(), socket.getfqdn(), *names})


def server_environment(
    token: str, *, hosts: Sequence[str], vocab: int, cpu: bool
) -> dict[str, str]:
    """Return the environment of the server's process."""
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_WAIT_POLICY": "passive"}
    fixed = {
        "VLLM_SERVER_DEV_MODE": "1",  # pause, weights and worker calls over HTTP
        **OPT_OUT,
        TOKEN_VARIABLE: token,
        HOSTS_VARIABLE: json.dumps(list(hosts)),
        VOCAB_VARIABLE: str(vocab),
    }
    if cpu:  # otherwise the first request compiles one comparison for 5 to 15 s
        fixed["TORCHDYNAMO_DISABLE"] = "1"
    return defaults | dict(os.environ) | fixed


async def _warm_up(
    client: EngineClient,
    process: subprocess.Popen[bytes],
    started: float,
    log: Callable[[str], None],
) -> bool:
    """Wait until the server answers, and send the slow first request.

    Return False if the server ended instead.
    """
    with client.startup_errors():
        if not await _wait_until_healthy(client, process, started, log):
            return False
        log("warm-up: the first request")
        sampling_params = {"max_tokens": 4, "detokenize": False}
        request = {"token_ids": [0, 1, 2, 3], "sampling_params": sampling_params}
        await client.post("/inference/v1/generate", request)
    return True


async def _wait_until_healthy(
    client: EngineClient,
    process: subprocess.Popen[bytes],
    started: float,
    log: Callable[[str], None],
) -> bool:
    """Return whether the server answers. False: it has ended."""
    logged = 0.0
    while process.poll() is None:
        waited = time.monotonic() - started
        try:
            await client.get("/health")
            break
        except UsageError as error:
            if waited > START_TIMEOUT_S:
                raise UsageError(
                    f"engine serve: no answer within {START_TIMEOUT_S:g} s; last: {error}"
                ) from error
        if waited - logged >= 5:
            logged = waited
            log(f"vLLM is starting, {waited:.0f} s")
        await asyncio.sleep(0.25)
    return process.poll() is None


@contextmanager
def _run_command(
    command: list[str], environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command under the reaper, which ends all its processes when this one ends."""
    reaper_command = [sys.executable, "-I", "-S", str(Path(reaper.__file__)), *command]
    process = subprocess.Popen(reaper_command, env=environment, stdin=subprocess.PIPE)
    assert process.stdin is not None
    handled = [
        each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, _exit_on_signal) for number in handled}
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        process.stdin.close()  # the reaper then kills the remaining processes
        process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_status(process: subprocess.Popen[bytes]) -> int:
    """Return the exit status of a server that has ended: 1 if a signal ended it or the reaper."""
    status = process.wait()
    if status < 0:
        return 1
    return status


def _exit_on_signal(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _check_extra(extra: Sequence[str]) -> None:
    """Raise UsageError for a reserved argument. vLLM accepts abbreviated names too."""
    for argument in extra:
        flag = argument.split("=")[0].replace("_", "-")
        if flag.startswith("--") and any(each.startswith(flag) for each in RESERVED_FLAGS):
            raise UsageError(
                f"--vllm: {flag} is set by onepolicy engine serve; use its own arguments"
            )


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"--port: {host}:{port} cannot be used: {error.strerror}; choose another"
            ) from error
