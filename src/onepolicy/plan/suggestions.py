"""What to change where a recipe does not fit, each tried out before it is said."""

from __future__ import annotations

import math

from onepolicy.config import RunConfig
from onepolicy.plan.dims import format_count
from onepolicy.plan.planner import PARALLEL, DeviceSplit, Planner, PlanOption

MOST = 2**14  # devices looked for


def suggestions(planner: Planner, chosen: PlanOption) -> list[str]:
    """One line each; none if the option fits."""
    found = []
    if not chosen.learner_fits:
        found += _of_learner(planner, chosen)
    if not chosen.engine_fits:
        found += _of_engine(planner, chosen)
    if chosen.save.staged > chosen.host_room:
        found.append(
            f"nodes with more than {chosen.save.staged / 1e9:,.0f} GB of memory: a checkpoint's shards are copied "
            "there while they are written (--constant host_memory=BYTES if they do)"
        )
    if chosen.start.host > chosen.host_room:
        found.append(
            f"nodes with more than {chosen.start.host / 1e9:,.0f} GB of memory: the model is read whole in "
            f"model.dtype = {planner.config.model.dtype} before it is spread (--constant host_memory=BYTES if they do)"
        )
    return found


def _of_learner(planner: Planner, chosen: PlanOption) -> list[str]:
    split, lines, tried = chosen.split, [], planner.config
    for name, value in (("activation_checkpointing", True), ("fsdp_param_dtype", "bfloat16")):
        changed = _with(tried, name, value, ranks=split.learners)
        if changed is None:
            continue
        option = planner.option(split, changed)
        if option.learner_used < 0.98 * planner.option(split, tried).learner_used:
            lines.append(f"{_setting(name, value, split, tried)}: {_verdict(option)}")
            tried = changed
            if option.learner_fits:
                return lines
    smaller = _smaller(planner, split, tried)
    if smaller is not None:
        budget, option = smaller
        also = " as well" if lines else ""
        lines.append(f"train.tokens_per_micro_batch={budget}{also}: {_verdict(option)}")
        if option.learner_fits:
            return lines
        tried = _with(tried, "tokens_per_micro_batch", budget) or tried
    ranks = _more(planner, split, tried)
    with_these = " with these" if lines else ""
    if ranks is None:
        lines.append(
            f"no number of learner devices is enough{with_these}: {_too_large(planner, tried)}"
        )
    else:
        lines.append(f"at least {ranks} devices that learn{with_these}")
    return lines


def _with(config: RunConfig, name: str, value: object, *, ranks: int = 1) -> RunConfig | None:
    """The recipe with another setting of train; None if it has it, or cannot."""
    if getattr(config.train, name) == value:
        return None
    if name == "activation_checkpointing" and config.train.reuse_scoring_forward:
        return None  # the two exclude each other
    if name == "fsdp_param_dtype" and (config.model.dtype == "bfloat16" or ranks == 1):
        return None
    changes = {name: value} | ({"autocast": "off"} if name == "fsdp_param_dtype" else {})
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


def _setting(name: str, value: object, split: DeviceSplit, config: RunConfig) -> str:
    also = ""
    if name == "fsdp_param_dtype":
        also = f" with train.ranks={split.learners}" + " instead of train.autocast" * (
            config.train.autocast != "off"
        )
    return f"train.{name}={str(value).lower()}{also}"


def _smaller(
    planner: Planner, split: DeviceSplit, config: RunConfig
) -> tuple[int, PlanOption] | None:
    """The largest micro-batch of whole sequences that fits, else the smallest there is; None if it is that already."""
    slots = planner.work.slots
    most = len(planner.work.micro(config.train.tokens_per_micro_batch, split.learners).slots)
    found = None
    for samples in range(most - 1, 0, -1):
        changed = _with(config, "tokens_per_micro_batch", samples * slots)
        assert changed is not None
        found = samples * slots, planner.option(split, changed)
        if found[1].learner_fits:
            break
    return found


def _more(planner: Planner, split: DeviceSplit, config: RunConfig) -> int | None:
    lacking, ranks = split.learners, 2 * split.learners
    while planner.learner(ranks, config).total > planner.room:
        if ranks > MOST:
            return None
        lacking, ranks = ranks, 2 * ranks
    while ranks - lacking > 1:
        middle = (lacking + ranks) // 2
        if planner.learner(middle, config).total > planner.room:
            lacking = middle
        else:
            ranks = middle
    return ranks


def _too_large(planner: Planner, config: RunConfig) -> str:
    """What a rank holds that more ranks do not divide."""
    memory, dims = planner.learner(MOST, config), planner.dims
    working = memory.activations + memory.logits
    device = (memory.gathered + working) / planner.room_share
    return (
        f"every rank gathers a layer of {format_count(dims.largest_layer)} parameters whole, "
        f"{memory.gathered / 1e9:.0f} GB with its gradients, beside {working / 1e9:.0f} GB of activations and logits; "
        f"devices of {math.ceil(device / 1e9)} GB would do, or experts divided over devices (expert parallelism), "
        "which onepolicy does not have"
    )


def _of_engine(planner: Planner, chosen: PlanOption) -> list[str]:
    engine = chosen.engine
    if engine.room < math.inf:
        return [
            f"a replica takes {(engine.weights + engine.cache) / 1e9:.1f} GB of {max(0.0, engine.room) / 1e9:.1f}: "
            "lower rollout.engine.max_num_seqs, max_len or kv_cache_gib, or raise cluster.gpus_per_replica"
        ]
    for parallel in PARALLEL:
        if parallel <= chosen.split.tensor_parallel:
            continue
        memory = planner.engine(parallel)
        if memory.sequences >= 1:
            return [
                f"engines of {parallel} devices (tensor parallel): {memory.sequences} sequences fit in the cache"
            ]
    return [
        f"no engine of up to {PARALLEL[-1]} devices holds the weights and one sequence: quantise, or other devices"
    ]


def _verdict(option: PlanOption) -> str:
    verdict = "fits" if option.learner_fits else "not enough yet"
    return (
        f"{option.learner_used / 1e9:.1f} of {option.learner_room / 1e9:.1f} GB per rank, {verdict}"
    )
