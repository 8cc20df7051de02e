"""Suggested changes to a recipe that does not fit. Each is planned before it is suggested."""

from __future__ import annotations

import math

from onepolicy.config import RunConfig
from onepolicy.plan.dims import format_count
from onepolicy.plan.planner import Planner, PlanOption
from onepolicy.plan.splits import ENGINE_SIZES, DeviceSplit

MAX_DEVICES = 2**14  # the search for a number of devices ends here


def suggestions(planner: Planner, chosen: PlanOption) -> list[str]:
    """Return one line for each suggestion; none if the option fits."""
    lines = []
    if not chosen.learner_fits:
        lines += _learner_suggestions(planner, chosen)
    if not chosen.engine_fits:
        lines += _engine_suggestions(planner, chosen)
    if chosen.save.staged > chosen.host_room:
        lines.append(
            f"nodes with more than {chosen.save.staged / 1e9:,.0f} GB of memory: a checkpoint's "
            "shards are copied there while they are written "
            "(--constant host_memory=BYTES if they have it)"
        )
    if chosen.start.host > chosen.host_room:
        lines.append(
            f"nodes with more than {chosen.start.host / 1e9:,.0f} GB of memory: the model is read "
            f"whole in model.dtype = {planner.config.model.dtype} before it is sharded "
            "(--constant host_memory=BYTES if they have it)"
        )
    return lines


def _learner_suggestions(planner: Planner, chosen: PlanOption) -> list[str]:
    """Suggest settings of train until the learner fits with all of them, then more devices."""
    split, lines, config = chosen.split, [], planner.config
    for name, value in (("activation_checkpointing", True), ("fsdp_param_dtype", "bfloat16")):
        changed = _with_train_setting(config, name, value, ranks=split.learners)
        if changed is None:
            continue
        option = planner.evaluate_split(split, changed)
        if option.learner_used < 0.98 * planner.evaluate_split(split, config).learner_used:
            lines.append(f"{_setting(name, value, split, config)}: {_verdict(option)}")
            config = changed
            if option.learner_fits:
                return lines
    smaller = _smaller_micro_batch(planner, split, config)
    if smaller is not None:
        budget, option = smaller
        also = " as well" if lines else ""
        lines.append(f"train.tokens_per_micro_batch={budget}{also}: {_verdict(option)}")
        if option.learner_fits:
            return lines
        config = _with_train_setting(config, "tokens_per_micro_batch", budget) or config
    ranks = _enough_ranks(planner, split, config)
    with_these = " with these" if lines else ""
    if ranks is None:
        reason = _unsharded_memory(planner, config)
        lines.append(f"no number of learner devices is enough{with_these}: {reason}")
    else:
        lines.append(f"at least {ranks} devices that learn{with_these}")
    return lines


def _with_train_setting(
    config: RunConfig, name: str, value: object, *, ranks: int = 1
) -> RunConfig | None:
    """Return the recipe with another setting of train; None if it has it or cannot have it."""
    if getattr(config.train, name) == value:
        return None
    if name == "activation_checkpointing" and config.train.reuse_scoring_forward:
        return None  # the two exclude each other
    changes = {name: value}
    if name == "fsdp_param_dtype":
        if config.model.dtype == "bfloat16" or ranks == 1:
            return None
        changes["autocast"] = "off"
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


def _setting(name: str, value: object, split: DeviceSplit, config: RunConfig) -> str:
    text = f"train.{name}={str(value).lower()}"
    if name == "fsdp_param_dtype":
        text += f" with train.ranks={split.learners}"
        if config.train.autocast != "off":
            text += " instead of train.autocast"
    return text


def _smaller_micro_batch(
    planner: Planner, split: DeviceSplit, config: RunConfig
) -> tuple[int, PlanOption] | None:
    """Return the largest smaller budget of whole sequences that fits, else the smallest one.

    Return None if a micro-batch has one sequence already.
    """
    slots, budget = planner.work.slots, config.train.tokens_per_micro_batch
    samples_now = len(planner.work.fullest_micro_batch(budget, split.learners).slots)
    found = None
    for samples in range(samples_now - 1, 0, -1):
        changed = _with_train_setting(config, "tokens_per_micro_batch", samples * slots)
        assert changed is not None
        option = planner.evaluate_split(split, changed)
        found = samples * slots, option
        if option.learner_fits:
            break
    return found


def _enough_ranks(planner: Planner, split: DeviceSplit, config: RunConfig) -> int | None:
    """Return the smallest number of ranks whose learner fits; None if no number does."""

    def fits(ranks: int) -> bool:
        return planner.learner_rank_memory(ranks, config).total <= planner.room

    too_few, enough = split.learners, 2 * split.learners
    while not fits(enough):
        if enough > MAX_DEVICES:
            return None
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(middle):
            enough = middle
        else:
            too_few = middle
    return enough


def _unsharded_memory(planner: Planner, config: RunConfig) -> str:
    """Describe the memory of a rank that more ranks do not reduce."""
    memory = planner.learner_rank_memory(MAX_DEVICES, config)
    working = memory.activations + memory.logits
    device = (memory.gathered + working) / planner.room_share
    layer = format_count(planner.dims.largest_layer)
    return (
        f"every rank gathers a layer of {layer} parameters whole, "
        f"{memory.gathered / 1e9:.0f} GB with its gradients, beside {working / 1e9:.0f} GB of "
        f"activations and logits; devices of {math.ceil(device / 1e9)} GB would do, or experts "
        "divided over devices (expert parallelism), which onepolicy does not have"
    )


def _engine_suggestions(planner: Planner, chosen: PlanOption) -> list[str]:
    engine = chosen.engine
    if engine.room < math.inf:
        used = (engine.weights + engine.cache) / 1e9
        return [
            f"a replica takes {used:.1f} GB of {max(0.0, engine.room) / 1e9:.1f}: "
            "lower rollout.engine.max_num_seqs, max_len or kv_cache_gib, "
            "or raise cluster.gpus_per_replica"
        ]
    for size in ENGINE_SIZES:
        if size <= chosen.split.tensor_parallel:
            continue
        memory = planner.engine_device_memory(size)
        if memory.sequences >= 1:
            return [
                f"engines of {size} devices (tensor parallel): {memory.sequences} sequences fit in "
                "the cache"
            ]
    return [
        f"no engine of up to {ENGINE_SIZES[-1]} devices holds the weights and one sequence: "
        "quantise, or use other devices"
    ]


def _verdict(option: PlanOption) -> str:
    verdict = "fits" if option.learner_fits else "not enough yet"
    used, room = option.learner_used / 1e9, option.learner_room / 1e9
    return f"{used:.1f} of {room:.1f} GB per rank, {verdict}"
