"""Suggested changes to a recipe that does not fit. Each is planned before it is suggested."""

from __future__ import annotations

import math

from onepolicy.config import RunConfig
from onepolicy.config.lora import LoraConfig
from onepolicy.config.quant import Fp8
from onepolicy.notation import counted
from onepolicy.plan.dims import format_count
from onepolicy.plan.planner import Planner, PlanOption
from onepolicy.plan.splits import ENGINE_SIZES, DeviceSplit
from onepolicy.plan.step_work import in_process
from onepolicy.train.optimiser_memory import shard_sizes

FEWEST_SEQUENCES = 4  # that an engine shall still sample at once
MAX_DEVICES = 2**14  # the search for a number of devices ends here


def suggestions(planner: Planner, chosen: PlanOption) -> list[str]:
    """Return one line for each suggestion; none if the option fits."""
    lines = []
    if not chosen.learner_fits:
        lines += _learner_suggestions(planner, chosen)
    if not chosen.engine_fits:
        lines += _engine_suggestions(planner, chosen)
    if chosen.host_state + chosen.save.staged > chosen.host_room:
        needed, rests = chosen.host_state + chosen.save.staged, ""
        if chosen.host_state:
            rests = f", beside {chosen.host_state / 1e9:,.0f} GB of moments and masters"
        lines.append(
            f"nodes with more than {needed / 1e9:,.0f} GB of memory: a checkpoint's "
            f"shards are copied there while they are written{rests} "
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
    split, lines = chosen.split, []
    config = planner.settings_of(split.learners)
    for name, value in (
        ("reuse_scoring_forward", False),
        ("activation_checkpointing", True),
        ("fsdp_param_dtype", "bfloat16"),
        ("logits_chunk", None),
    ):
        changed = _with_train_setting(config, name, value, ranks=split.learners)
        if changed is None:
            continue
        option = planner.evaluate_split(split, changed)
        # What comes after it needs graphs to be freed, even where it saves nothing by itself.
        if name == "reuse_scoring_forward" or _saves(planner, split, config, option):
            lines.append(f"{_setting(name, value, split, config)}: {_verdict(option)}")
            config = changed
            if option.learner_fits:
                return lines
    if config.optim.state == "device":
        for state in ("host", "8bit"):
            changed = with_optimiser_state(config, state)
            option = planner.evaluate_split(split, changed)
            if option.learner_fits and option.host_fits:
                return [*lines, f"optim.state={state}: {_verdict(option)}"]
        if not planner.cluster.is_cpu:
            config = with_optimiser_state(config, "host")
            lines.append(f"optim.state=host: {_verdict(planner.evaluate_split(split, config))}")
    for shrink in (_fewer_sequences, _smaller_micro_batch):
        smaller = shrink(planner, split, config)
        if smaller is None:
            continue
        setting, changed, option = smaller
        if _saves(planner, split, config, option):
            also = " as well" if lines else ""
            lines.append(f"{setting}{also}: {_verdict(option)}")
            config = changed
            if option.learner_fits:
                return lines
    lora = _with_adapters(planner, split, config)
    if lora is not None:
        lines.append(lora)
    ranks = _enough_ranks(planner, split, config)
    with_these = " with these" if lines else ""
    if ranks is None:
        reason = _unsharded_memory(planner, config)
        lines.append(f"no number of learner devices is enough{with_these}: {reason}")
    elif ranks < split.learners:
        lines.append(f"{counted(ranks, 'device')} that learn{with_these}, which divide the experts")
    else:
        lines.append(f"at least {counted(ranks, 'device')} that learn{with_these}")
    return lines


def _saves(planner: Planner, split: DeviceSplit, config: RunConfig, option: PlanOption) -> bool:
    """Return whether the option needs at least 2% less memory than the recipe."""
    return option.learner_used < 0.98 * planner.evaluate_split(split, config).learner_used


def _fewer_sequences(
    planner: Planner, split: DeviceSplit, config: RunConfig
) -> tuple[str, RunConfig, PlanOption] | None:
    """Return the recipe with half as many sequences at once, and again, until it fits.

    Their keys and values lie on the learner's device. At least FEWEST_SEQUENCES are left.
    """
    if not in_process(config):
        return None
    found, count = None, config.rollout.engine.max_num_seqs // 2
    while count >= FEWEST_SEQUENCES:
        engine = config.rollout.engine.model_copy(update={"max_num_seqs": count})
        rollout = config.rollout.model_copy(update={"engine": engine})
        changed = config.model_copy(update={"rollout": rollout})
        option = planner.evaluate_split(split, changed)
        found = f"rollout.engine.max_num_seqs={count}", changed, option
        if option.learner_fits:
            break
        count //= 2
    return found


def _with_adapters(planner: Planner, split: DeviceSplit, config: RunConfig) -> str | None:
    """Return the line of LoRA in place of all weights; None if the recipe cannot have it.

    If it does not fit, the learner's weights are 4-bit, and then the engine's beside it fp8.
    """
    if config.train.lora is not None or config.objective.has_critic:
        return None
    config, line = with_optimiser_state(config, "device"), ""
    four_bit = LoraConfig(base="nf4")
    tries: list[tuple[LoraConfig, Fp8 | None]] = [(LoraConfig(), None), (four_bit, None)]
    if in_process(config) and config.rollout.quant is None:
        tries.append((four_bit, Fp8()))
    for lora, quant in tries:
        settings, adapted = _adapted(config, lora, quant)
        made = planner.replanned(adapted)
        option = made.evaluate_split(split, adapted)
        for shrink in (_fewer_sequences, _smaller_micro_batch):
            smaller = None if option.learner_fits else shrink(made, split, adapted)
            if smaller is not None and _saves(made, split, adapted, smaller[2]):
                setting, adapted, option = smaller
                settings = f"{settings} {setting}"
        line = f"or {settings}, adapters alone, with these but optim.state: {_verdict(option)}"
        if option.learner_fits:
            break
        if split.learners > 1:
            ranks = _enough_ranks(made, split, adapted)
            if ranks is not None:
                line = f"{line}; with {counted(ranks, 'device')} that learn it fits"
            return line
    return line


def _adapted(config: RunConfig, lora: LoraConfig, quant: Fp8 | None) -> tuple[str, RunConfig]:
    """Return the settings that give a recipe adapters and a quantised engine, and the recipe."""
    rollout = config.rollout.model_copy(update={"quant": quant or config.rollout.quant})
    train = config.train.model_copy(update={"lora": lora})
    adapted = config.model_copy(update={"train": train, "rollout": rollout})
    settings = f"train.lora.rank={lora.rank}"
    if lora.base == "nf4":
        settings += " train.lora.base=nf4"
    if quant is not None:
        settings += f" rollout.quant={quant.format}"
        if config.eval.every:  # else a third model, unquantised, evaluates
            evaluation = config.eval.model_copy(update={"quantised": True})
            adapted = adapted.model_copy(update={"eval": evaluation})
            settings += " eval.quantised=true"
    return settings, adapted


def memory_settings(planner: Planner, chosen: PlanOption) -> list[str]:
    """Return one line for each setting of the recipe that saves memory, with what it saves.

    Each is taken away alone. There is no line for what saves less than 2%.
    """
    split, lines = chosen.split, []
    config = planner.settings_of(split.learners)
    without = {
        f"optim.state={config.optim.state}": with_optimiser_state(config, "device"),
        "train.activation_checkpointing=true": _with_train_setting(
            config, "activation_checkpointing", False
        ),
        "train.logits_chunk (logits in chunks)": _with_train_setting(config, "logits_chunk", 0),
        f"train.fsdp_param_dtype={config.train.fsdp_param_dtype}": _with_train_setting(
            config, "fsdp_param_dtype", "same"
        ),
    }
    for setting, changed in without.items():
        if changed is None or changed == config:
            continue
        option = planner.evaluate_split(split, changed)
        saved = option.learner_used - chosen.learner_used
        if saved > 0.02 * chosen.learner_used:
            verdict = "would not fit without it"
            if option.fits:
                verdict = "fits without it too"
            lines.append(f"{setting} saves {saved / 1e9:.1f} GB per rank; {verdict}")
    return lines


def uneven_experts(planner: Planner, chosen: PlanOption) -> list[str]:
    """Return one line if the ranks do not divide the experts, with the nearest counts that do."""
    dims, ranks = planner.dims, chosen.split.learners
    stored = ranks * sum(shard_sizes(dims.shapes, ranks))
    if not dims.experts or stored < 1.02 * dims.total:
        return []
    counts = _divisors(dims.experts)
    nearest = [n for n in counts if n < ranks][-1:] + [n for n in counts if n > ranks][:1]
    return [
        f"train.ranks={' or '.join(map(str, nearest))} divides the {dims.experts} experts: each of "
        f"{ranks} ranks stores {math.ceil(dims.experts / ranks)} of a layer, where an even share "
        f"is {dims.experts / ranks:.1f}, and gathers as much from every other"
    ]


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def with_optimiser_state(config: RunConfig, state: str) -> RunConfig:
    """Return the recipe with another optim.state."""
    return config.model_copy(update={"optim": config.optim.model_copy(update={"state": state})})


def _with_train_setting(
    config: RunConfig, name: str, value: object, *, ranks: int = 1
) -> RunConfig | None:
    """Return the recipe with another setting of train; None if it has it or cannot have it."""
    if getattr(config.train, name) == value:
        return None
    if name == "reuse_scoring_forward" and not config.train.reuse_scoring_forward:
        return None
    if name == "activation_checkpointing" and config.train.reuse_scoring_forward:
        return None  # the two exclude each other
    changes = {name: value}
    if name == "fsdp_param_dtype" and value == "bfloat16":
        if config.model.dtype == "bfloat16" or ranks == 1:
            return None
        changes["autocast"] = "off"
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


def _setting(name: str, value: object, split: DeviceSplit, config: RunConfig) -> str:
    if value is None:
        return f"train.{name} left out"
    text = f"train.{name}={str(value).lower()}"
    if name == "fsdp_param_dtype":
        text += f" with train.ranks={split.learners}"
        if config.train.autocast != "off":
            text += " instead of train.autocast"
    return text


def _smaller_micro_batch(
    planner: Planner, split: DeviceSplit, config: RunConfig
) -> tuple[str, RunConfig, PlanOption] | None:
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
        found = f"train.tokens_per_micro_batch={samples * slots}", changed, option
        if option.learner_fits:
            break
    return found


def _enough_ranks(planner: Planner, split: DeviceSplit, config: RunConfig) -> int | None:
    """Return a number of ranks whose learner fits, where one rank less does not; None if none does.

    Beyond the number of experts padding grows with the ranks, so then a divisor of it may fit. An
    engine on the first rank's device stays as large as it is.
    """
    option = planner.evaluate_split(split, config)
    room = planner.room - (option.learner_used - option.learner.total)

    def fits(ranks: int) -> bool:
        return planner.learner_rank_memory(ranks, config).total <= room

    too_few, enough = split.learners, 2 * split.learners
    while not fits(enough):
        if enough > MAX_DEVICES:
            return next(filter(fits, _divisors(planner.dims.experts)), None)
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(middle):
            enough = middle
        else:
            too_few = middle
    nodes = max(1, planner.cluster.per_node)
    return enough if enough < nodes else -(-enough // nodes) * nodes


def _unsharded_memory(planner: Planner, config: RunConfig) -> str:
    """Describe the memory of a rank that more ranks do not reduce."""
    memory = min(
        (planner.learner_rank_memory(2**power, config) for power in range(1, 15)),
        key=lambda memory: memory.gathered + memory.activations + memory.logits,
    )
    working = memory.activations + memory.logits
    if in_process(config) and planner.weights.total > 0.5 * planner.room:
        return (
            f"the engine's weights take {planner.weights.total / 1e9:.0f} GB of the first one: "
            "rollout.engine.kind=vllm-server on other devices, or rollout.quant=fp8"
        )
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
