"""The plan in the terminal, and as a tree for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from math import inf
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from onepolicy.plan.dims import format_count
from onepolicy.plan.planner import DeviceSplit, Planner, PlanOption
from onepolicy.plan.step_work import in_process
from onepolicy.plan.times import CommunicationVolume

Tree = dict[str, Any]
LEARNER = {
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
    "stream": "files, written once, then one gloo broadcast to all",
    "nccl": "one NCCL broadcast to all",
}
SPLITS = 5


def render_plan(
    planner: Planner,
    chosen: PlanOption,
    options: list[PlanOption],
    lines: list[str],
    traffic: CommunicationVolume,
) -> Iterator[RenderableType]:
    yield _head(planner, chosen)
    yield _memory(chosen)
    yield _time(chosen)
    if len(options) > 1:
        yield _splits(options, chosen)
    yield _traffic(traffic, planner.sync_method)
    yield _saved(chosen)
    if lines:
        yield Text(
            "\n".join(["does not fit; what would:", *(f"  {line}" for line in lines)]),
            style="bold red",
        )
    yield _constants(planner)


def plan_tree(
    planner: Planner,
    chosen: PlanOption,
    options: list[PlanOption],
    lines: list[str],
    traffic: CommunicationVolume,
) -> Tree:
    dims = asdict(planner.dims)
    attention = dims.pop("attention")
    return {
        "cluster": str(planner.cluster),
        "model": dims
        | {"active": planner.dims.active, "layers": len(attention), "attention": attention[-1]},
        "work": asdict(planner.work),
        "chosen": _option_tree(chosen),
        "options": [_option_tree(option) for option in sorted(options, key=_order)],
        "mends": lines,
        "traffic": asdict(traffic),
        "sync": planner.sync_method,
        "constants": {
            name: asdict(value) for name, value in sorted(planner.cluster.constants.items())
        },
    }


def _option_tree(option: PlanOption) -> Tree:
    learner = asdict(option.learner) | {"total": option.learner_used, "room": option.learner_room}
    return {
        "split": asdict(option.split),
        "fits": option.fits,
        "learner_bytes": learner,
        "engine": asdict(option.engine),
        "start_bytes": asdict(option.start),
        "checkpoint": asdict(option.save) | {"in_time": option.save.in_time},
        "seconds": option.parts | {"step": option.seconds, "overlapped": option.overlapped},
        "decode_step": asdict(option.rollout.step),
        "learning": asdict(option.learning),
        "bottleneck": option.bottleneck,
    }


def _order(option: PlanOption) -> tuple[bool, float]:
    return not option.fits, option.seconds


def _head(planner: Planner, chosen: PlanOption) -> Text:
    dims, work, split = planner.dims, planner.work, chosen.split
    experts = f", {dims.experts} experts, {dims.top_k} active" if dims.experts else ", dense"
    return Text.assemble(
        (f"{dims.name}", "bold"),
        f": {format_count(dims.total)} parameters, {format_count(dims.active)} active, {dims.layers} layers{experts}\n",
        f"one step: {work.prompts} prompts x {work.group} completions of {work.prompt} + {work.response} tokens, ",
        f"{work.all_slots / 1e6:.2f}M slots, micro-batches of {planner.micro_slots(split.learners):,} slots\n",
        (f"{planner.cluster}", "bold"),
        ": ",
        _split_text(split, in_process(planner.config)),
    )


def _split_text(split: DeviceSplit, shared: bool) -> str:
    learners = f"{split.learners} learner rank{'s' * (split.learners > 1)}"
    if shared:
        return f"{learners}, the engine on the first one's device"
    each = f" of {split.tensor_parallel}" if split.tensor_parallel > 1 else ""
    return f"{learners} + {split.engines} engine{'s' * (split.engines > 1)}{each}"


def size(count: float) -> str:
    """Bytes with a unit."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count / 1e6:.2f} MB"


def _memory(option: PlanOption) -> Table:
    table = _table("memory", "learner rank", "bytes", "engine device", "bytes ")
    engine = option.engine
    left = [(LEARNER[name], value) for name, value in asdict(option.learner).items() if value]
    left += [("engine that evaluates", engine.evaluator)] if engine.evaluator else []
    right = [("weights", size(engine.weights)), ("keys and values", size(max(0.0, engine.cache)))]
    right += [
        ("  tokens in it", f"{engine.tokens:,.0f}"),
        ("  sequences in it", f"{engine.sequences:,}"),
    ]
    for i in range(max(len(left), len(right))):
        name, value = left[i] if i < len(left) else ("", None)
        table.add_row(
            name, "" if value is None else size(value), *(right[i] if i < len(right) else ("", ""))
        )
    table.add_section()
    used = option.learner_used
    both = " with the engine" if option.engine_on_learner else ""
    style = "green" if option.learner_fits else "bold red"
    fits = Text("fits", "green") if option.engine_fits else Text("does not fit", "bold red")
    table.add_row(
        f"total{both}", Text(f"{size(used)} of {size(option.learner_room)}", style), "", fits
    )
    start = option.start
    if start.device:
        table.add_row("  at the start, with a whole critic", size(start.device))
    if option.host_room < inf:
        style = "green" if option.host_fits else "bold red"
        table.add_row(
            "host of rank 0 at the start",
            Text(f"{size(start.host)} of {size(option.host_room)}", style),
        )
    return table


def _time(option: PlanOption) -> Table:
    table = _table("time of a step", "part", "seconds", "share")
    for name, seconds in option.parts.items():
        table.add_row(name, _seconds(seconds), f"{seconds / sum(option.parts.values()):.0%}")
    table.add_section()
    table.add_row(
        "step, sampling while learning" if option.overlaps else "step", _seconds(option.seconds), ""
    )
    if not option.engine_on_learner and not option.overlaps:
        table.add_row("  with rollout.max_staleness=1", _seconds(option.overlapped), "")
    table.add_row("bottleneck", "", option.bottleneck)
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 10 else f"{seconds:.3f}"


def _splits(options: list[PlanOption], chosen: PlanOption) -> Table:
    table = _table(
        "splits", "learner ranks", "engines", "devices each", "step, s", "learner rank", "fits"
    )
    for option in sorted(options, key=_order)[:SPLITS]:
        split = option.split
        table.add_row(
            str(split.learners),
            str(split.engines),
            str(split.tensor_parallel),
            _seconds(option.seconds),
            size(option.learner_used),
            Text("yes", "green") if option.fits else Text("no", "red"),
            style="bold" if option is chosen else "",
        )
    return table


def _traffic(traffic: CommunicationVolume, sync_method: str) -> Table:
    table = _table("sent per step", "what", "bytes")
    if traffic.route_bytes_per_token:
        table.add_row(
            f"routes, {traffic.route_bytes_per_token:,} bytes a token", size(traffic.routes)
        )
        table.add_row("  as the engine sends them", size(traffic.routes_sent))
    table.add_row(f"weights to each engine ({SYNC_METHODS[sync_method]})", size(traffic.weights))
    if traffic.gathered:
        table.add_row("layers and gradients, to and from each rank", size(traffic.gathered))
    return table


def _saved(option: PlanOption) -> Table:
    save = option.save
    table = _table("a checkpoint, in the background" if save.staged else "a checkpoint", "what", "")
    table.add_row("bytes", size(save.size))
    table.add_row(
        "seconds to write" + ", all ranks into one folder" * bool(save.staged),
        _seconds(save.written),
    )
    table.add_row("seconds until it counts", _seconds(save.counts))
    if save.staged:
        room = f" of {size(option.host_room)}" if option.host_room < inf else ""
        style = "green" if save.staged <= option.host_room else "bold red"
        table.add_row("host memory of a node meanwhile", Text(f"{size(save.staged)}{room}", style))
    if not save.in_time:
        mend = f"train.rank_timeout = {save.limit:g} s is less than writing takes: raise it, or give --constant disk=B/s"
        table.add_row(Text("too slow", "bold red"), Text(mend, "bold red"))
    return table


def _constants(planner: Planner) -> Table:
    table = _table(
        "constants (replace with --constant NAME=VALUE)",
        "name",
        "value",
        "unit",
        "origin",
        "source",
    )
    styles = {"measured": "green", "cited": "green", "assumed": "yellow", "given": "bold"}
    for name, constant in sorted(planner.cluster.constants.items()):
        origin = Text(constant.origin, styles[constant.origin])
        table.add_row(name, f"{constant.value:.4g}", constant.unit, origin, constant.source)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False)
    for i, column in enumerate(columns):
        right = column.strip() in ("bytes", "seconds", "value", "step, s")
        table.add_column(column, justify="right" if right else "left", no_wrap=not i)
    return table
