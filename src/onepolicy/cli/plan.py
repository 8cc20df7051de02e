"""`onepolicy plan`: the memory, bytes and seconds of a recipe on a cluster, before you pay."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from onepolicy.cli.common import Commands, add_command, prepare_process, print_status, warn_idle
from onepolicy.cli.parser import Parser
from onepolicy.config import RunConfig, UsageError, load
from onepolicy.config.idle import idle_settings
from onepolicy.config.output_paths import check_output_path
from onepolicy.console import Console
from onepolicy.files import write_text_atomically

if TYPE_CHECKING:
    from onepolicy.plan.hardware import Cluster

RECIPE = "recipes/cluster/deepseek_v3_264gpu.toml"
DESCRIPTION = """\
Prints the needs of a recipe on a cluster, before you pay: memory per learner rank and engine
device, bytes per step, the parts of a step's time, the best split of devices between sampling and
learning, and changes to make if it does not fit. No weights are read: parameters are counted, and
activations measured by running the model on tensors without memory. docs/plan_model.md explains
every number.
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
        help="mean of a response (default: rollout.sampling.max_tokens, the worst case)",
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
    from onepolicy.plan.hardware import parse_cluster

    cluster = parse_cluster(arguments.cluster, arguments.constant)
    config = load(arguments.recipe, arguments.overrides)
    warn_idle(idle_settings(config))
    if arguments.json is not None:
        check_output_path("--json", arguments.json)
        if not arguments.json.resolve().parent.is_dir():
            raise UsageError(f"--json: no folder {arguments.json.parent}; make it first")
        if arguments.json.is_dir():
            raise UsageError(f"--json: {arguments.json} is a folder; name a file")
    prepare_process(1)
    return _plan(arguments, config, cluster)


def _plan(arguments: argparse.Namespace, config: RunConfig, cluster: Cluster) -> int:
    from onepolicy.config.input_files import resolve_model
    from onepolicy.plan.planner import Planner, best_option
    from onepolicy.plan.suggestions import memory_settings, suggestions, uneven_experts
    from onepolicy.plan.tables import plan_tree, render_plan
    from onepolicy.plan.times import communication_volume

    console = Console()
    if arguments.sync:
        _check_sync(config)
    with console.status("running the model without memory"):
        planner = Planner(
            config,
            resolve_model(config.model),
            cluster,
            prompt=arguments.prompt_tokens,
            response=arguments.response_tokens,
            sync_method=arguments.sync,
        )
        splits = planner.possible_splits(
            arguments.learners, arguments.tensor_parallel, arguments.engines
        )
        options = [planner.evaluate_split(split) for split in splits]
        chosen = best_option(options)
        explain = memory_settings if chosen.fits else suggestions
        lines = [*explain(planner, chosen), *uneven_experts(planner, chosen)]
    traffic = communication_volume(planner.dims, config, planner.work, chosen.split.learners)
    if arguments.json is not None:
        tree = plan_tree(planner, chosen, options, lines, traffic)
        write_text_atomically(arguments.json, json.dumps(tree, indent=1) + "\n")
    planner.settings_of(chosen.split.learners, print_status)
    for part in render_plan(
        planner, chosen, options, lines, traffic, constants=arguments.constants
    ):
        console.print(part)
    if arguments.json is not None:
        console.print_line(f"written: {arguments.json}")
    return int(not chosen.fits)


def _check_sync(config: RunConfig) -> None:
    """Raise UsageError if no server gets the weights, so that --sync has no effect."""
    from onepolicy.plan.step_work import in_process, replicated

    if in_process(config):
        raise UsageError(
            "--sync: the engine is in the learner's process, so weights are copied; leave it out"
        )
    if replicated(config):
        raise UsageError("--sync: is for a server; give cluster.sync=stream or cluster.sync=disk")
