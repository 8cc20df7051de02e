"""A plan as tables for the terminal, and as a tree for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from rich.console import JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from onepolicy.config import RunConfig
from onepolicy.notation import counted
from onepolicy.plan.dims import format_count
from onepolicy.plan.planner import Planner, PlanOption
from onepolicy.plan.splits import DeviceSplit
from onepolicy.plan.step_work import in_process
from onepolicy.plan.suggestions import TYPE
from onepolicy.plan.times import CommunicationVolume, sends_factors

Tree = dict[str, Any]
LEARNER_ROWS = {
    "parameters": "parameters",
    "masters": "float32 masters",
    "gradients": "gradients",
    "optimiser": "AdamW moments",
    "gathered": "gathered layers",
    "activations": "activations",
    "logits": "logits",
    "routes": "routes",
    "others": "critic, reference, re-prefill",
}
SYNC_METHODS = {
    "memory": "copied",
    "files": "files, written once",
    "gloo": "one gloo broadcast to all",
    "ray": "Ray's object store, from node to node",
    "nccl": "one NCCL broadcast to all",
}
MAX_SPLITS = 5  # rows of the table of splits


def render_plan(
    planner: Planner,
    chosen: PlanOption,
    options: list[PlanOption],
    lines: list[str],
    volume: CommunicationVolume,
    *,
    constants: bool = False,
) -> Iterator[RenderableType]:
    """Yield the parts of a plan for the terminal.

    lines: suggestions if nothing fits, else the settings that save memory. constants: with all
    numbers of the devices and their sources.
    """
    yield _header(planner, chosen)
    yield _memory_table(chosen)
    yield _time_table(chosen)
    if len(options) > 1:
        yield _split_table(options, chosen)
    yield _volume_table(volume, planner)
    yield _checkpoint_table(chosen, planner.config)
    if lines:
        title, style = "does not fit; what would:", "bold red"
        if chosen.fits:
            title, style = "what makes room:", "green"
        yield Text(title, style=style)
        for line in lines:  # one that is copied stays whole, however narrow the terminal is
            yield Text(f"  {line}", style=style, no_wrap=line.startswith(TYPE))
    if constants:
        yield _constant_table(planner)
    else:
        yield Text(
            "the devices' numbers: --constants prints them, --constant NAME=VALUE replaces one",
            style="dim",
        )


def plan_tree(
    planner: Planner,
    chosen: PlanOption,
    options: list[PlanOption],
    lines: list[str],
    volume: CommunicationVolume,
) -> Tree:
    """Return a plan for JSON. lines: as for `render_plan`."""
    dims = asdict(planner.dims)
    attention = dims.pop("attention")
    del dims["shapes"], dims["layer_shapes"]
    for name in ("adapter", "four_bit"):
        if not dims[name]:
            del dims[name]
    dims |= {
        "active": planner.dims.active,
        "layers": len(attention),
        "attention": attention[-1],
    }
    constants = sorted(planner.cluster.constants.items())
    return {
        "cluster": str(planner.cluster),
        "model": dims,
        "work": asdict(planner.work),
        "chosen": _option_tree(chosen),
        "options": [_option_tree(option) for option in sorted(options, key=_rank_option)],
        "suggestions": [] if chosen.fits else lines,
        "makes_room": lines if chosen.fits else [],
        "traffic": asdict(volume),
        "sync": planner.sync_method,
        "constants": {name: asdict(constant) for name, constant in constants},
    }


def _option_tree(option: PlanOption) -> Tree:
    learner = asdict(option.learner) | {"total": option.learner_used, "room": option.learner_room}
    steps = {"step": option.seconds, "overlapped": option.overlapped}
    engine = asdict(option.engine)
    if math.isinf(option.engine.room):  # JSON has no infinity
        engine["room"] = None
    return {
        "split": asdict(option.split),
        "fits": option.fits,
        "learner_bytes": learner,
        "host_state_bytes": option.host_state,
        "engine": engine,
        "start_bytes": asdict(option.start),
        "checkpoint": asdict(option.save) | {"in_time": option.save.in_time},
        "seconds": option.phase_seconds | steps,
        "decode_step": asdict(option.rollout.step),
        "learning": asdict(option.learning),
        "bottleneck": option.bottleneck,
    }


def _rank_option(option: PlanOption) -> tuple[bool, float]:
    """Return a sort key: options that fit come first, then the fastest."""
    return not option.fits, option.seconds


def _header(planner: Planner, chosen: PlanOption) -> Text:
    dims, work, split = planner.dims, planner.work, chosen.split
    experts = ", dense"
    if dims.experts:
        experts = f", {counted(dims.experts, 'expert')}, {dims.top_k} active"
    model = (
        f": {format_count(dims.total)} parameters, {format_count(dims.active)} active, "
        f"{counted(dims.layers, 'layer')}{experts}\n"
    )
    step = (
        f"one step: {work.prompts} prompts x {work.group} completions of "
        f"{work.prompt} + {work.response} tokens, {work.all_slots / 1e6:.2f}M slots, "
        f"micro-batches of {planner.micro_batch_slots(split.learners):,} slots\n"
    )
    if dims.adapter:
        model += f"train.lora: adapters of {format_count(dims.adapter)} parameters\n"
    if dims.four_bit:
        model += f"train.lora.base: {format_count(dims.four_bit)} frozen parameters in nf4\n"
    return Text.assemble(
        (f"{dims.name}", "bold"),
        model,
        step,
        (f"{planner.cluster}", "bold"),
        ": ",
        _describe_split(split, in_process(planner.config)),
    )


def _describe_split(split: DeviceSplit, shared: bool) -> str:
    learners = f"{split.learners} learner rank{'s' * (split.learners > 1)}"
    if shared:
        return f"{learners}, the engine on the first one's device"
    engines = f"{split.engines} engine{'s' * (split.engines > 1)}"
    if split.tensor_parallel > 1:
        engines += f" of {split.tensor_parallel}"
    return f"{learners} + {engines}"


def format_bytes(count: float) -> str:
    """Format bytes with a unit: 1.50 TB, 1.50 GB or 1.50 MB."""
    unit, scale = _unit(count)
    return f"{count / scale:.2f} {unit}"


def format_used(used: float, room: float) -> str:
    """Format bytes and the room for them in the room's unit: 1.50 of 72.00 GB, 71.7 of 72.0 GB."""
    unit, scale = _unit(room)
    digits = 2 if used < 10 * scale else 1
    return f"{used / scale:.{digits}f} of {room / scale:.{digits}f} {unit}"


def _unit(count: float) -> tuple[str, float]:
    for unit, scale in (("TB", 1e12), ("GB", 1e9)):
        if count >= scale:
            return unit, scale
    return "MB", 1e6


def _verdict_style(fits: bool) -> str:
    return "green" if fits else "bold red"


def _memory_table(option: PlanOption) -> Table:
    table = _table("memory", "learner rank", "bytes", "engine device", "bytes ")
    engine = option.engine
    learner_rows = [
        (LEARNER_ROWS[name], format_bytes(value))
        for name, value in asdict(option.learner).items()
        if value
    ]
    if engine.evaluator:
        learner_rows.append(("engine that evaluates", format_bytes(engine.evaluator)))
    engine_rows = [
        ("weights", format_bytes(engine.weights)),
        ("keys and values", format_bytes(max(0.0, engine.cache))),
        ("  tokens in it", f"{engine.tokens:,.0f}"),
        ("  sequences in it", f"{engine.sequences:,}"),
    ]
    if engine.routes:
        engine_rows.append(("routes, in its host's memory", format_bytes(engine.routes)))
    for left, right in zip_longest(learner_rows, engine_rows, fillvalue=("", "")):
        table.add_row(*left, *right)
    table.add_section()
    _add_memory_totals(table, option)
    return table


def _add_memory_totals(table: Table, option: PlanOption) -> None:
    total = "total"
    if option.engine_on_learner:
        total = "total with the engine"
    if option.sleeps:
        total = "most, as the engine sleeps and wakes"
    used = format_used(option.learner_used, option.learner_room)
    engine_verdict = "fits" if option.engine_fits else "does not fit"
    engine_style = _verdict_style(option.engine_fits)
    if option.engine_on_learner and option.engine_fits:
        engine_verdict, engine_style = "in the total", ""
    table.add_row(
        total,
        Text(used, _verdict_style(option.learner_fits)),
        "",
        Text(engine_verdict, engine_style),
    )
    start = option.start
    if start.device:
        table.add_row("  at the start, with a whole critic", format_bytes(start.device))
    if option.host_room < math.inf:
        host = format_used(start.host, option.host_room)
        table.add_row("host of rank 0 at the start", Text(host, _verdict_style(option.host_fits)))
    if option.host_state:
        rests = format_used(option.host_state, option.host_room)
        style = _verdict_style(option.host_fits)
        table.add_row("AdamW's state in a node's memory", Text(rests, style))


def _time_table(option: PlanOption) -> Table:
    table = _table("time of a step", "part", "seconds", "share")
    phases = option.phase_seconds
    for name, seconds in phases.items():
        share = seconds / sum(phases.values())
        table.add_row(name, _format_seconds(seconds), f"{share:.0%}")
    table.add_section()
    step = "step"
    if option.overlaps:
        step = "step, sampling while learning"
    table.add_row(step, _format_seconds(option.seconds), "")
    if not option.engine_on_learner and not option.overlaps:
        overlapped = _format_seconds(option.overlapped)
        table.add_row("  with rollout.max_staleness=1", overlapped, "")
    table.add_row("bottleneck", "", option.bottleneck)
    return table


def _format_seconds(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:,.1f}"
    return f"{seconds:.3f}"


def _split_table(options: list[PlanOption], chosen: PlanOption) -> Table:
    table = _table(
        "splits", "learner ranks", "engines", "devices each", "step, s", "learner rank", "fits"
    )
    for option in sorted(options, key=_rank_option)[:MAX_SPLITS]:
        split = option.split
        fits = Text("no", "red")
        if option.fits:
            fits = Text("yes", "green")
        style = "bold" if option is chosen else ""
        table.add_row(
            str(split.learners),
            str(split.engines),
            str(split.tensor_parallel),
            _format_seconds(option.seconds),
            format_bytes(option.learner_used),
            fits,
            style=style,
        )
    return table


def _volume_table(volume: CommunicationVolume, planner: Planner) -> Table:
    table = _table("sent per step", "what", "bytes")
    if volume.route_bytes_per_token:
        routes = f"routes, {volume.route_bytes_per_token:,} bytes a token"
        table.add_row(routes, format_bytes(volume.routes))
        table.add_row("  as the engine sends them", format_bytes(volume.routes_sent))
    weights = f"weights to each engine ({SYNC_METHODS[planner.sync_method]})"
    if sends_factors(planner.config):
        weights = "A and B to each engine, float32"
    table.add_row(weights, format_bytes(volume.weights))
    if volume.gathered:
        gathered = format_bytes(volume.gathered)
        table.add_row("layers and gradients, to and from each rank", gathered)
    return table


def _checkpoint_table(option: PlanOption, config: RunConfig) -> Table:
    save = option.save
    title, write = "a checkpoint", "seconds to write"
    if option.split.learners > 1:
        title += ", in the background"
        write += ", all ranks into one folder"
    table = _table(title, "what", "")
    table.add_row("bytes", format_bytes(save.size))
    count = stored_checkpoints(config)
    if count != 1:
        kept = f"of the {count:,} that the run keeps (checkpoint.keep, .every)"
        table.add_row(kept, format_bytes(count * save.size))
    table.add_row("bytes of onepolicy export, bfloat16", format_bytes(save.exported))
    table.add_row(write, _format_seconds(save.written))
    table.add_row("seconds until it counts", _format_seconds(save.counts))
    if save.staged:
        staged = format_bytes(save.staged)
        if option.host_room < math.inf:
            staged = format_used(save.staged, option.host_room)
        style = _verdict_style(save.staged <= option.host_room)
        table.add_row("host memory of a node meanwhile", Text(staged, style))
    if not save.in_time:
        fix = (
            f"train.rank_timeout = {save.limit:g} s is less than writing takes: raise it, "
            "or give --constant disk=B/s"
        )
        table.add_row(Text("too slow", "bold red"), Text(fix, "bold red"))
    return table


def stored_checkpoints(config: RunConfig) -> int:
    """Return how many checkpoints a whole run leaves on the disk."""
    made = math.ceil(config.steps / config.checkpoint.every)
    return min(made, config.checkpoint.keep or made)


def _constant_table(planner: Planner) -> Table:
    title = "constants (replace with --constant NAME=VALUE)"
    table = _table(title, "name", "value", "unit", "origin", "source")
    styles = {"measured": "green", "cited": "green", "assumed": "yellow", "given": "bold"}
    for name, constant in sorted(planner.cluster.constants.items()):
        origin = Text(constant.origin, styles[constant.origin])
        table.add_row(name, f"{constant.value:.4g}", constant.unit, origin, constant.source)
    return table


def _table(title: str, *columns: str) -> Table:
    """Return an empty table. Columns of numbers are right-aligned."""
    table = Table(title=title, title_justify="left", pad_edge=False)
    for i, column in enumerate(columns):
        is_number = column.strip() in ("bytes", "seconds", "value", "step, s")
        justify: JustifyMethod = "right" if is_number else "left"
        table.add_column(column, justify=justify, no_wrap=not i, overflow="fold")
    return table
