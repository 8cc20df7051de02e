"""`onepolicy engine serve`: a vLLM server started the way rollout/vllm/server.py needs it."""

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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from onepolicy.config import UsageError
from onepolicy.config.engine import ServeConfig
from onepolicy.rollout.servers.http import EngineClient, is_loopback
from onepolicy.rollout.servers.token import create_token_file, remove_token_file, token_from_env
from onepolicy.rollout.vllm import quant as vllm_quant
from onepolicy.rollout.vllm import reaper
from onepolicy.rollout.vllm.guard import HOSTS, TOKEN, VOCAB, Guard
from onepolicy.rollout.vllm.start import engine_args
from onepolicy.rollout.vllm.worker import WorkerExtension
from onepolicy.telemetry import OPT_OUT

START_TIMEOUT_S = 1800.0  # until a server that neither answers nor ends is given up
STOP_TIMEOUT_S = 30.0  # that the server has to end by itself
RESERVED_FLAGS = (
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
"""Arguments of vLLM that say who may reach the server and whose code it runs, or what the guard goes by."""


def run_server(
    config: ServeConfig,
    path: str,
    *,
    max_len: int,
    vocab: int,
    return_routes: bool,
    cpu: bool,
    trust_remote_code: bool = False,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_env: str | None = None,
    names: Sequence[str] = (),
    extra: Sequence[str] = (),
    log: Callable[[str], None] = print,
) -> int:
    """Run a server until it ends or this process is told to; its exit status. `log` is called with what goes on.

    token_env: environment variable with the bearer token every request must bring, because the endpoints that load
    weights run code. None, for a loopback address only: one is made, and left where the runs of this user find it.
    names: further ones that the server is called by. extra: further arguments for vLLM.
    """
    vllm_quant.check_quant_device(config.quant, cpu=cpu)
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(
            "engine serve: vllm is not installed; run `make vllm` (CPU) or pip install 'onepolicy[vllm]'"
        )
    given = None if token_env is None else token_from_env(token_env, "--token-env")
    if given is None and not is_loopback(host):
        raise UsageError(
            f"--host: {host} is open to other machines, and whoever reaches the server can load weights into it; set a "
            "variable to a secret and name it with --token-env"
        )
    _check_extra(extra)
    _check_free(host, port)
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
    command = [*command_line(settings, host, port), *extra]
    started = time.monotonic()
    with ExitStack() as stack:
        if given is None:
            token, left = stack.enter_context(create_token_file(host, port))
            log(
                f"the server's token was made here; runs of this user on this machine find it in {left}"
            )
        else:
            token = given
            if is_loopback(host):
                remove_token_file(host, port)
        ours = server_environment(token, hosts=allowed_hosts(host, names), vocab=vocab, cpu=cpu)
        process = stack.enter_context(_run_command(command, ours))
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
        client = EngineClient(url, token_env=token_env, retries=0, server="the vLLM server")
        if asyncio.run(_warmed_up(client, process, started, log)):
            seconds = time.monotonic() - started
            log(
                f"ready after {seconds:.0f} s: rollout.engine.kind=vllm-server rollout.engine.url={url}"
            )
        return process.wait()


def command_line(settings: dict[str, Any], host: str, port: int) -> list[str]:
    """settings: EngineArgs; one that is None is left to vLLM."""
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--host",
        host,
        "--port",
        str(port),
    ]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is None or value == {}:
            continue
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    command += [
        "--worker-extension-cls",
        f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
    ]
    command += ["--enable-scale-out"]  # /inference/v1/generate: token ids in, token ids out
    command += ["--enable-prompt-tokens-details"]  # how many prompt tokens the prefix cache had
    command += ["--disable-uvicorn-access-log"]
    command += ["--middleware", f"{Guard.__module__}.{Guard.__name__}"]
    command += ["--allowed-origins", "[]"]  # vLLM's own choice is every web page
    return command


def allowed_hosts(host: str, names: Sequence[str]) -> list[str]:
    """What a request's Host may be, beside the loopback's names: what the server was started for, and is called by."""
    if is_loopback(host):
        return [*names]
    return sorted({host, socket.gethostname(), socket.getfqdn(), *names})


def server_environment(
    token: str, *, hosts: Sequence[str], vocab: int, cpu: bool
) -> dict[str, str]:
    """Of the server's process."""
    ours = {"VLLM_SERVER_DEV_MODE": "1", **OPT_OUT}  # pause, weights and worker calls over HTTP
    if cpu:
        ours |= {
            "TORCHDYNAMO_DISABLE": "1"
        }  # or the first request compiles one comparison for 5 to 15 s
    ours |= {TOKEN: token, HOSTS: json.dumps(list(hosts)), VOCAB: str(vocab)}
    return {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_WAIT_POLICY": "passive"} | dict(os.environ) | ours


async def _warmed_up(
    client: EngineClient,
    process: subprocess.Popen[bytes],
    started: float,
    log: Callable[[str], None],
) -> bool:
    """Wait until it answers, and make the slow first request. False if the server ended instead."""
    said = 0.0
    with client.startup_errors():
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
            if waited - said >= 5:
                said = waited
                log(f"vLLM is starting, {waited:.0f} s")
            await asyncio.sleep(0.25)
        if process.poll() is not None:
            return False
        log("warm-up: the first request")
        request = {
            "token_ids": [0, 1, 2, 3],
            "sampling_params": {"max_tokens": 4, "detokenize": False},
        }
        await client.post("/inference/v1/generate", request)
    return True


@contextmanager
def _run_command(
    command: list[str], environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The command under the reaper, which ends all its processes when this one ends, whatever ends it."""
    keep = [sys.executable, "-I", "-S", str(Path(reaper.__file__)), *command]
    process = subprocess.Popen(keep, env=environment, stdin=subprocess.PIPE)
    assert process.stdin is not None
    heeded = [
        each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, _leave) for number in heeded}
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        process.stdin.close()  # the reaper kills what is left
        process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _check_extra(extra: Sequence[str]) -> None:
    """UsageError for an argument that would undo what was checked here. vLLM also takes the start of a name."""
    for argument in extra:
        flag = argument.split("=")[0].replace("_", "-")
        if flag.startswith("--") and any(own.startswith(flag) for own in RESERVED_FLAGS):
            raise UsageError(
                f"--vllm: {flag} is set by onepolicy engine serve; use its own arguments"
            )


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"--port: {host}:{port} cannot be used: {error.strerror}; choose another"
            ) from error
