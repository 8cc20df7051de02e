"""`onepolicy gateway`: agent programs play episodes, and every token is recorded."""

from __future__ import annotations

import argparse
import math
import os
import socket
from pathlib import Path

from onepolicy.cli.common import RUN_ONLY, Commands, add_command, prepare_process
from onepolicy.config import RunConfig, UsageError
from onepolicy.config.address import check_port
from onepolicy.config.input_files import check_model_path, read_template, require_gateway
from onepolicy.config.measure import engine_overrides, measure_settings
from onepolicy.config.output_paths import check_output_path
from onepolicy.console import print_status
from onepolicy.gateway.conformance.command import SECONDS, run_conformance

HOST, PORT = "127.0.0.1", 8300
SHORTEST_SECRET = 16
OF_OURS = ("out", "engine", "port", "template", "thoughts", "turns", "tokens")
"""Options of a gateway that is made."""


def add_gateway(commands: Commands) -> None:
    """Add the command `gateway`."""
    gateway = add_command(
        commands,
        "gateway",
        "let agent programs play episodes on an engine, and record their exact tokens",
        run_gateway,
        examples=(
            "onepolicy gateway Qwen/Qwen3-0.6B --out runs/traces",
            "onepolicy gateway Qwen/Qwen3-30B-A3B --engine vllm-server:http://127.0.0.1:8000 "
            "--out runs/traces rollout.sampling.max_tokens=4096",
            "onepolicy gateway --conformance http://127.0.0.1:8300 --key-env SECRET",
        ),
        settings=RunConfig,
        ignored=(*RUN_ONLY, "model.path", "task"),
    )
    gateway.add_argument(
        "model",
        nargs="?",
        help="folder or hub id of a model whose tokenizer has a chat template; with --conformance "
        "the name to ask for (default: policy)",
    )
    gateway.add_argument(
        "overrides", nargs="*", metavar="a.b=value", help="e.g. rollout.sampling.max_tokens=4096"
    )
    gateway.add_argument("--engine", metavar="KIND[:URL]", help="short for rollout.engine.kind")
    gateway.add_argument("--out", metavar="FOLDER", help="where episodes are written")
    gateway.add_argument(
        "--conformance",
        metavar="URL",
        help="check the gateway at this address instead, whoever made it, by what programs send",
    )
    gateway.add_argument("--port", type=int, metavar="N", help=f"of {HOST} (default: {PORT})")
    gateway.add_argument(
        "--template", metavar="FILE", help="chat template, in place of the model's"
    )
    gateway.add_argument(
        "--thoughts",
        choices=("keep", "as-sent"),
        help="a turn that comes back without its thoughts: continue it with them (default), or "
        "begin anew",
    )
    gateway.add_argument("--turns", type=int, metavar="N", help="most turns of an episode")
    gateway.add_argument(
        "--tokens", type=int, metavar="N", help="most tokens that are sampled in an episode"
    )
    gateway.add_argument(
        "--key-env",
        metavar="NAME",
        help="variable with the secret that begins and ends episodes (default: a new one); with "
        "--conformance the gateway's, or the key of another one",
    )
    gateway.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help=f"most seconds of --conformance (default: {SECONDS}); an answer may take a fifth",
    )


def run_gateway(arguments: argparse.Namespace) -> int:
    """Serve programs until Ctrl-C, or check a gateway."""
    if arguments.conformance is not None:
        return _check_gateway(arguments)
    if arguments.seconds is not None:
        raise UsageError("--seconds: is of --conformance; a gateway serves until Ctrl-C")
    for name, given in (("the model", arguments.model), ("--out", arguments.out)):
        if given is None:
            raise UsageError(f"{name}: is missing; give `onepolicy gateway MODEL --out FOLDER`")
    require_gateway("onepolicy gateway")
    port = arguments.port
    if port is None:
        port = PORT
    check_port(port, "--port")
    for name in ("turns", "tokens"):
        limit = getattr(arguments, name)
        if limit is not None and limit < 1:
            raise UsageError(f"--{name}: {limit} given, expected at least 1")
    out = Path(arguments.out)
    check_output_path("--out", out)
    if os.path.lexists(out):
        raise UsageError(f"--out: {out} already exists; choose another folder")
    secret = _secret(arguments.key_env)
    template = None
    if arguments.template is not None:
        template = read_template(arguments.template, "--template")
    overrides = [f"model.path={arguments.model}", *arguments.overrides]
    if arguments.engine:
        overrides = [*engine_overrides(arguments.engine), *overrides]
    tree = {"rollout": {"sampling": {"max_tokens": 1024}}}
    _, config = measure_settings(tree, overrides, None)
    if config.model.path != arguments.model:
        raise UsageError(
            f"model.path: {config.model.path!r} is set, but the command's model is "
            f"{arguments.model!r}; name it once, as the command's first word"
        )
    with _bind(port) as listener:
        check_model_path(config.model.path)
        prepare_process(config.train.threads)
        print_status(f"loading {arguments.model}")
        from onepolicy.build import gateway
        from onepolicy.gateway.session import Limits

        options = gateway.GatewayOptions(
            out=out,
            name=Path(arguments.model).name,
            template=template,
            thoughts=arguments.thoughts or "keep",
            limits=Limits(arguments.turns, arguments.tokens),
            secret=secret,
        )
        return gateway.run_gateway(tree, overrides, options, listener)


def _bind(port: int) -> socket.socket:
    """Return a socket of this port, which refuses connections until the server listens."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"--port: {port} of {HOST} cannot be used ({error.strerror}); give another one"
        ) from None
    return listener


def _check_gateway(arguments: argparse.Namespace) -> int:
    """Play transcripts against a gateway. Raises UsageError for what only our own would read."""
    given = [f"--{name}" for name in OF_OURS if getattr(arguments, name) is not None]
    if "=" in (arguments.model or ""):  # without a model the first setting is in its place
        given.append(arguments.model)
    given += arguments.overrides
    if given:
        raise UsageError(
            f"{', '.join(given)}: --conformance checks a gateway that runs and reads none of this; "
            "leave it out"
        )
    key = None
    if arguments.key_env is not None:
        key = os.environ.get(arguments.key_env)
        if not key:
            raise UsageError(f"--key-env: {arguments.key_env} is not set")
    seconds = arguments.seconds
    if seconds is None:
        seconds = SECONDS
    if not 0 < seconds < math.inf:
        raise UsageError(f"--seconds: {seconds:g} given, expected a time above 0")
    return run_conformance(arguments.conformance, key, arguments.model or "policy", seconds)


def _secret(variable: str | None) -> str | None:
    if variable is None:
        return None
    secret = os.environ.get(variable, "")
    if len(secret) < SHORTEST_SECRET or not secret.isascii() or not secret.isprintable():
        raise UsageError(
            f"--key-env: {variable} holds {len(secret)} characters; give a secret of at least "
            f"{SHORTEST_SECRET} ASCII characters"
        )
    return secret
