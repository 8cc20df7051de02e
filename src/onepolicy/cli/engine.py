"""`onepolicy engine ...`: commands about one rollout engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from onepolicy.cli.common import (
    RUN_ONLY,
    Commands,
    add_command,
    prepare_process,
    warn_idle,
)
from onepolicy.config import RunConfig, UsageError, read_recipe
from onepolicy.config.address import check_host, check_port
from onepolicy.config.engine import ENGINE_KINDS
from onepolicy.config.idle import idle_settings
from onepolicy.config.load import resolve_as
from onepolicy.config.serve import ServeConfig
from onepolicy.console import Console, print_status


def add_engine(commands: Commands) -> None:
    """Add the command `engine` with its commands `check` and `serve`."""
    text = "commands about one rollout engine"
    engine = commands.add_parser("engine", help=text, description=text)
    engine_commands = engine.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_check(engine_commands)
    _add_serve(engine_commands)


def _add_check(commands: Commands) -> None:
    check = add_command(
        commands,
        "check",
        "does an engine keep its contract? a table of checks; exit 0 if all pass",
        run_check,
        examples=(
            "onepolicy engine check tiny",
            "onepolicy engine check Qwen/Qwen3-30B-A3B --engine vllm-server "
            "--url http://127.0.0.1:8000",
            "onepolicy engine check recipes/quickstart.toml rollout.engine.dtype=float32",
        ),
        settings=RunConfig,
        ignored=RUN_ONLY,
    )
    check.add_argument("model", help="TOML recipe; or a folder, a hub id, or `tiny`")
    check.add_argument(
        "overrides", nargs="*", metavar="a.b=value", help="e.g. rollout.engine.dtype=float32"
    )
    check.add_argument("--engine", choices=ENGINE_KINDS, help="short for rollout.engine.kind=...")
    check.add_argument(
        "--url", help="of a server that is running: short for rollout.engine.url=..."
    )


def _add_serve(commands: Commands) -> None:
    serve = add_command(
        commands,
        "serve",
        "run a vLLM server that runs of kind vllm-server can use",
        run_serve,
        examples=(
            "onepolicy engine serve Qwen/Qwen3-30B-A3B --port 8000 max_num_seqs=256",
            "onepolicy engine serve tiny --vllm=--enforce-eager",
            "onepolicy engine serve tiny lora_rank=16",
        ),
        settings=ServeConfig,
    )
    serve.add_argument("model", help="folder, hub id, or `tiny`")
    settings = (
        "of rollout.engine of kind vllm: max_num_seqs=256; and quant=fp8, or lora_rank=16 for runs "
        "with train.lora.sync=native"
    )
    serve.add_argument("overrides", nargs="*", metavar="a=value", help=settings)
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine's own)"
    )
    serve.add_argument(
        "--token-env",
        metavar="NAME",
        help="variable with the token that every request must have (default: a new token, for "
        "runs on this machine)",
    )
    serve.add_argument(
        "--name",
        action="append",
        default=[],
        help="another name that requests call the server by, e.g. of a proxy",
    )
    serve.add_argument(
        "--no-routes", action="store_true", help="do not return the experts of a MoE model"
    )
    serve.add_argument(
        "--vllm", action="append", default=[], metavar="ARGUMENT", help="passed on: --vllm=--x=1"
    )


def run_serve(arguments: argparse.Namespace) -> int:
    """Run a vLLM server and return its exit status."""
    check_host(arguments.host, "--host")
    check_port(arguments.port, "--port")
    config = resolve_as(ServeConfig, {}, arguments.overrides)
    warn_idle(idle_settings(config))
    prepare_process(None)
    from onepolicy.launch.engine_server import serve_model

    console = Console(stderr=True)
    return serve_model(
        arguments.model,
        config,
        host=arguments.host,
        port=arguments.port,
        token_env=arguments.token_env,
        names=arguments.name,
        routes=not arguments.no_routes,
        extra=arguments.vllm,
        log=console.print_line,
    )


def run_check(arguments: argparse.Namespace) -> int:
    """Check an engine. Return 0 if every check that applies passes, else 1."""
    print_status(f"reading {arguments.model}")
    tree, overrides = _model_settings(arguments.model)
    if arguments.engine:
        overrides.append(f"rollout.engine.kind={arguments.engine}")
    if arguments.url:
        overrides.append(f"rollout.engine.url={arguments.url}")
    prepare_process(tree.get("train", {}).get("threads"))
    print_status(f"loading {arguments.model}")
    from onepolicy.engine_check.command import check_and_show

    return check_and_show(tree, [*overrides, *arguments.overrides])


def _model_settings(model: str) -> tuple[dict[str, Any], list[str]]:
    """Return the settings and overrides of a recipe, or of a model's folder or hub id."""
    path = Path(model)
    if path.suffix == ".toml" or path.is_file():
        return read_recipe(path), []
    if "=" in model and not path.exists():
        raise UsageError(f"engine check: give a recipe or a model before {model}")
    return {}, [f"model.path={model}"]
