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
from contextlib import contextmanager
from typing import Any

from onepolicy.config import UsageError
from onepolicy.config.engine import ServeConfig
from onepolicy.no_statistics import OFF
from onepolicy.rollout.http import EngineClient, is_loopback
from onepolicy.rollout.vllm import quant as vllm_quant
from onepolicy.rollout.vllm.start import engine_arguments
from onepolicy.rollout.vllm.worker import TOKEN, RequireToken, WorkerExtension

PATIENCE_S = 1800.0  # until a server that neither answers nor ends is given up
OWN = ("--host", "--port", "--uds", "--middleware", "--api-key", "--trust-remote-code", "--worker-extension-cls")
"""Arguments of vLLM that say who may reach the server and whose code it runs."""


def serve(
    config: ServeConfig,
    path: str,
    *,
    max_len: int,
    vocab: int,
    routes: bool,
    cpu: bool,
    trust_remote_code: bool = False,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_env: str | None = None,
    extra: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> int:
    """Run a server until it ends or this process is told to; its exit status. `say` is called with what goes on.

    token_env: environment variable with the bearer token every request must bring; needed for a host that other
    machines reach, because the endpoints that load weights run code. extra: further arguments for vLLM.
    """
    vllm_quant.check(config.quant, cpu=cpu)
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("engine serve: vllm is not installed; run `make vllm` (CPU) or pip install 'onepolicy[vllm]'")
    token = os.environ.get(token_env, "") if token_env else ""
    if token_env and not token:
        raise UsageError(f"--token-env: the environment variable {token_env} is not set")
    if not token and not is_loopback(host):
        raise UsageError(
            f"--host: {host} is open to other machines, and whoever reaches the server can load weights into it; set a "
            "variable to a secret and name it with --token-env"
        )
    _check_extra(extra)
    _check_free(host, port)
    settings = engine_arguments(
        config,
        path,
        max_len=max_len,
        top_logprobs=vocab,
        routes=routes,
        cpu=cpu,
        trust_remote_code=trust_remote_code,
        quant=config.quant,
    )
    command = [*command_line(settings, host, port, guarded=bool(token)), *extra]
    started = time.monotonic()
    with _running(command, environment(token, cpu=cpu)) as process:
        reachable = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
        client = EngineClient(url, token_env=token_env, retries=0, server="the vLLM server")
        if asyncio.run(_warmed_up(client, process, started, say)):
            seconds = time.monotonic() - started
            say(f"ready after {seconds:.0f} s: rollout.engine.kind=vllm-server rollout.engine.url={url}")
        return process.wait()


def command_line(settings: dict[str, Any], host: str, port: int, *, guarded: bool) -> list[str]:
    """settings: EngineArgs; one that is None is left to vLLM."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", host, "--port", str(port)]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is None or value == {}:
            continue
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    command += ["--worker-extension-cls", f"{WorkerExtension.__module__}.{WorkerExtension.__name__}"]
    command += ["--enable-scale-out"]  # /inference/v1/generate: token ids in, token ids out
    command += ["--enable-prompt-tokens-details"]  # how many prompt tokens the prefix cache had
    command += ["--disable-uvicorn-access-log"]
    if guarded:
        command += ["--middleware", f"{RequireToken.__module__}.{RequireToken.__name__}"]
    return command


def environment(token: str, *, cpu: bool) -> dict[str, str]:
    """Of the server's process."""
    ours = {"VLLM_SERVER_DEV_MODE": "1", **OFF}  # pause, weights and worker calls over HTTP
    if cpu:
        ours |= {"TORCHDYNAMO_DISABLE": "1"}  # or the first request compiles one comparison for 5 to 15 s
    if token:
        ours[TOKEN] = token
    return {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_WAIT_POLICY": "passive"} | dict(os.environ) | ours


async def _warmed_up(
    client: EngineClient, process: subprocess.Popen[bytes], started: float, say: Callable[[str], None]
) -> bool:
    """Wait until it answers, and make the slow first request. False if the server ended instead."""
    said = 0.0
    with client.starting():
        while process.poll() is None:
            waited = time.monotonic() - started
            try:
                await client.get("/health")
                break
            except UsageError as error:
                if waited > PATIENCE_S:
                    raise UsageError(f"engine serve: no answer within {PATIENCE_S:g} s; last: {error}") from error
            if waited - said >= 5:
                said = waited
                say(f"vLLM is starting, {waited:.0f} s")
            await asyncio.sleep(0.25)
        if process.poll() is not None:
            return False
        say("warm-up: the first request")
        request = {"token_ids": [0, 1, 2, 3], "sampling_params": {"max_tokens": 4, "detokenize": False}}
        await client.post("/inference/v1/generate", request)
    return True


@contextmanager
def _running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The server's process, which does not outlive ours; SIGTERM is passed on, SIGINT reaches it from the terminal."""
    process = subprocess.Popen(command, env=environment)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        yield process
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _check_extra(extra: Sequence[str]) -> None:
    """UsageError for an argument that would undo what was checked here. vLLM also takes the start of a name."""
    for argument in extra:
        flag = argument.split("=")[0].replace("_", "-")
        if flag.startswith("--") and any(own.startswith(flag) for own in OWN):
            raise UsageError(f"--vllm: {flag} is set by onepolicy engine serve; use its own arguments")


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(f"--port: {host}:{port} cannot be used: {error.strerror}; choose another") from error
