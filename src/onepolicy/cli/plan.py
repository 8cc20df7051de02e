"""`onepolicy plan`: the memory, bytes and seconds of a recipe on a cluster, before you pay."""

from __future__ import annotations

import argparse
from pathlib import Path

from onepolicy.cli.common import Commands, add_command, prepare_process, warn_idle
from onepolicy.cli.parser import Parser
from onepolicy.config import RunConfig, UsageError, load
from onepolicy.config.idle import idle_settings
from onepolicy.config.output_paths import check_output_path
from onepolicy.console import print_status
from onepolicy.plan.hardware import parse_cluster

RECIPE = "recipes/cluster/deepseek_v3_264gpu.toml"
DESCRIPTION = """\
Prints the needs of a recipe on a cluster, before you pay: memory per learner rank and engine
device, bytes per step, the parts of a step's time, the best split of devices between sampling and
learning, and changes to make if it does not fit. No weights are read: parameters are counted, and
activations measured by running the model on tensors without memory.
docs/measured.md explains every number.
"""


def add_plan(commands: Commands) -> None:
    """Add the command `plan`."""
    plan = add_command(
        commands,
        "plan",
        "memory, bytes and seconds per step on a cluster, before you pay",
        run_plan,
        examples=(
            "onepolicy plan recipes/cluster/qwen3_30b_a3b_8gpu.toml --cluster 8xH200",
            f"onepolicy plan {RECIPE} --cluster 64xH100 model.path=DeepSeek-V3 "
            "--response-tokens 4096",
            f"onepolicy plan {RECIPE} --cluster 8xH100 --constant network=25e9 --json plan.json",
        ),
        settings=RunConfig,
    )
    plan.description = DESCRIPTION
    plan.add_argument(
        "recipe",
        help="TOML recipe; model.path may be Qwen3-30B-A3B, Qwen3-235B-A22B or DeepSeek-V3 too",
    )
    plan.add_argument(
        "overrides", nargs="*", metavar="a.b=value", help="settings on top of the recipe"
    )
    plan.add_argument(
        "--cluster",
        required=True,
        metavar="COUNTxDEVICE",
        help="8xH100, 512xH200, 2xcpu (cores); RTX4090, RTX5090, L40S, A10G, A100, GH200, B200, "
        "B300, MI300X too",
    )
    plan.add_argument(
        "--json", type=Path, metavar="FILE", help="everything, with every split, as JSON"
    )
    _add_numbers(plan)


def _add_numbers(plan: Parser) -> None:
    """Add the options that replace the numbers which the plan chooses."""
    plan.add_argument(
        "--prompt-tokens", type=_count, metavar="N", help="of a prompt (default: 512, or what fits)"
    )
    plan.add_argument(
        "--response-tokens",
        type=_count,
        metavar="N",
        help="mean of a response (default: rollout.sampling.max_tokens, in every turn)",
    )
    plan.add_argument(
        "--learners",
        type=_count,
        metavar="N",
        help="learner ranks (default: train.ranks, or the best)",
    )
    plan.add_argument(
        "--engines",
        type=_count,
        metavar="N",
        help="engines (default: cluster.replicas, or the servers of rollout.engine.url)",
    )
    plan.add_argument(
        "--tensor-parallel",
        type=_count,
        metavar="N",
        help="devices of one engine (default: the best)",
    )
    plan.add_argument(
        "--sync",
        choices=("files", "gloo", "nccl"),
        help="how weights reach a server (default: as its kind does)",
    )
    plan.add_argument(
        "--constant",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another number of the devices; --constants prints all",
    )
    plan.add_argument(
        "--constants", action="store_true", help="print the devices' numbers and their sources"
    )


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan. Return 0 if a split fits, else 1."""
    print_status(f"reading {arguments.recipe}")
    cluster = parse_cluster(arguments.cluster, arguments.constant)
    config = load(arguments.recipe, arguments.overrides)
    warn_idle(idle_settings(config))
    if arguments.json is not None:
        check_output_path("--json", arguments.json)
        if not arguments.json.resolve().parent.is_dir():
            raise UsageError(f"--json: no folder {arguments.json.parent}; make it first")
        if arguments.json.is_dir():
            raise UsageError(f"--json: {arguments.json} is a folder; name a file")
        link = arguments.json.is_symlink()  # as /dev/stdout is
        if link or (arguments.json.exists() and not arguments.json.is_file()):
            raise UsageError(
                f"--json: {arguments.json} is a link, a device or a pipe, which the file would "
                "replace; name another"
            )
    prepare_process(1)
    from onepolicy.plan.command import plan_and_show

    return plan_and_show(
        config,
        cluster,
        prompt=arguments.prompt_tokens,
        response=arguments.response_tokens,
        sync_method=arguments.sync,
        splits=(arguments.learners, arguments.tensor_parallel, arguments.engines),
        json_file=arguments.json,
        constants=arguments.constants,
    )
