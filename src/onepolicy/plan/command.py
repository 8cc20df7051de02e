"""`onepolicy plan` once torch is loaded: plan, write and print."""

from __future__ import annotations

import json
from pathlib import Path

from rich.text import Text

from onepolicy.config import RunConfig, UsageError
from onepolicy.config.input_files import resolve_model
from onepolicy.console import Console, print_status
from onepolicy.files import write_text_atomically
from onepolicy.plan.hardware import Cluster
from onepolicy.plan.planner import Planner, best_option, with_max_len
from onepolicy.plan.step_work import in_process, replicated
from onepolicy.plan.suggestions import memory_settings, suggestions, uneven_experts
from onepolicy.plan.tables import plan_tree, render_plan
from onepolicy.plan.times import communication_volume


def plan_and_show(
    config: RunConfig,
    cluster: Cluster,
    *,
    prompt: int | None,
    response: int | None,
    sync_method: str | None,
    splits: tuple[int | None, int | None, int | None],
    json_file: Path | None,
    constants: bool,
) -> int:
    """Print the plan. Return 0 if a split fits, else 1.

    splits: of `Planner.possible_splits`. json_file: everything as JSON. constants: print these too.
    """
    console = Console()
    if sync_method:
        _check_sync(config)
    with console.status("running the model without memory"):
        planner = Planner(
            config,
            resolve_model(config.model),
            cluster,
            prompt=prompt,
            response=response,
            sync_method=sync_method,
        )
        options = [planner.evaluate_split(split) for split in planner.possible_splits(*splits)]
        chosen = best_option(options)
        max_len = planner.fitting_max_len(chosen)
        if max_len is not None:
            print_status(
                f"rollout.engine.max_len: {max_len}, about the longest that fits, which a run on a "
                f"GPU chooses itself (the model's context is {planner.dims.context})"
            )
            planner = planner.replanned(with_max_len(config, max_len))
            options = [planner.evaluate_split(split) for split in planner.possible_splits(*splits)]
            chosen = best_option(options)
        explain = memory_settings if chosen.fits else suggestions
        lines = [*explain(planner, chosen), *uneven_experts(planner, chosen)]
    settled = planner.settings_of(chosen.split.learners, note=print_status)
    traffic = communication_volume(planner.dims, settled, planner.work, chosen.split.learners)
    if json_file is not None:
        tree = plan_tree(planner, chosen, options, lines, traffic)
        write_text_atomically(json_file, json.dumps(tree, indent=1, allow_nan=False) + "\n")
    for part in render_plan(planner, chosen, options, lines, traffic, constants=constants):
        console.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))
    if config.replay.mode != "off" and not planner.dims.experts:
        console.print_line(
            "`onepolicy train` will ask for replay.mode=off: this model has no experts to replay",
            style="yellow",
        )
    if json_file is not None:
        console.print_line(f"written: {json_file}")
    return int(not chosen.fits)


def _check_sync(config: RunConfig) -> None:
    """Raise UsageError if no server gets the weights, so that --sync has no effect."""
    if in_process(config):
        raise UsageError(
            "--sync: the engine is in the learner's process, so weights are copied; leave it out"
        )
    if replicated(config):
        raise UsageError(
            "--sync: is for a server; Ray's replicas read its object store; leave it out"
        )
