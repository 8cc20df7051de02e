"""Suggested changes to a recipe that does not fit. Each is planned before it is suggested."""

from __future__ import annotations

import math

from onepolicy.config import RunConfig, UsageError, resolve
from onepolicy.config.lora import LoraConfig
from onepolicy.config.quant import Fp8
from onepolicy.notation import counted
from onepolicy.plan.dims import format_count
from onepolicy.plan.planner import Planner, PlanOption, best_option
from onepolicy.plan.splits import ENGINE_SIZES, DeviceSplit
from onepolicy.plan.step_work import in_process, replicated
from onepolicy.train.optimiser_memory import shard_sizes

FEWEST_SEQUENCES = 4  # that an engine shall still sample at once
MAX_DEVICES = 2**14  # the search for a number of devices ends here
TYPE = "type: "  # begins the line of all settings at once, which a user copies
SERVER = "rollout.engine.kind=vllm-server rollout.engine.url=http://127.0.0.1:8000"


class _Changes:
    """Changes to a recipe, one after another: its plan with all of them, and a line for each."""

    def __init__(self, planner: Planner, split: DeviceSplit, config: RunConfig) -> None:
        self.planner, self.split, self.config = planner, split, config
        self.option = planner.evaluate_split(split, config)
        self.lines: list[str] = []
        self.settings: list[str] = []

    def take(self, setting: str, config: RunConfig, option: PlanOption) -> None:
        """Keep a change that was planned. setting: what makes it."""
        as_well = "with " if self.lines else ""
        self.lines.append(f"{as_well}{setting}: {_verdict(option)}")
        self.settings.append(setting)
        self.config, self.option = config, option


def suggestions(planner: Planner, chosen: PlanOption) -> list[str]:
    """Return one line for each suggestion; none if the option fits.

    Host memory is that of these learners, so it is told once they fit.
    """
    if in_process(planner.config) and _needs_server(planner):
        return _with_server(planner)
    lines = []
    if not chosen.learner_fits:
        lines += _learner_suggestions(planner, chosen)
    if not chosen.engine_fits:
        lines += _engine_suggestions(planner, chosen)
    if chosen.learner_fits:
        lines += _host_suggestions(planner, chosen)
    return lines


def _needs_server(planner: Planner) -> bool:
    """Return whether an engine beside the learner is too large, even quantised, for one device."""
    return planner.cluster.count > 1 and planner.weights.total > 2 * planner.room


def _with_server(planner: Planner) -> list[str]:
    """Return the line of a server on other devices, and what makes the recipe fit beside it."""
    first = (
        f"{SERVER} (its address), a server on other devices: the engine's weights alone take "
        f"{planner.weights.total / 1e9:.0f} GB, and the learner's device has "
        f"{planner.room / 1e9:.0f}"
    )
    try:
        config = resolve(planner.config.model_dump(exclude_unset=True), SERVER.split())
    except UsageError as error:  # of a setting that servers lack
        return [first, str(error)]
    made = planner.replanned(config)
    chosen = best_option([made.evaluate_split(split) for split in made.possible_splits()])
    if chosen.fits:
        return [first, _to_type(made, chosen.split, [SERVER])]
    lines = suggestions(made, chosen)
    if not lines[0].startswith(("or ", "all weights")):
        lines[0] = f"with {lines[0]}"
    return [first, *(line.replace(TYPE, f"{TYPE}{SERVER} ", 1) for line in lines)]


def _host_suggestions(planner: Planner, chosen: PlanOption) -> list[str]:
    lines = []
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
    """Suggest settings until the learner fits with all of them, else adapters and more devices."""
    split = chosen.split
    changes = _Changes(planner, split, planner.settings_of(split.learners))
    _change_train(changes)
    before_state = list(changes.settings)
    if not changes.option.learner_fits and changes.config.optim.state == "device":
        _change_optimiser_state(changes)
    all_weights = changes.config
    for shrink in (_fewer_sequences, _smaller_micro_batch):
        smaller = None
        if not changes.option.learner_fits:
            smaller = shrink(planner, split, changes.config)
        if smaller is not None and _saves(planner, split, changes.config, smaller[2]):
            changes.take(*smaller)
    if changes.option.learner_fits:
        return [*changes.lines, _to_type(planner, split, changes.settings)]
    lines = changes.lines + _with_adapters(planner, split, all_weights, before_state)
    return [*lines, _more_devices(changes)]


def _more_devices(changes: _Changes) -> str:
    """Return the line of the number of devices on which all weights fit."""
    planner, split = changes.planner, changes.split
    with_these = "all weights"
    if changes.lines:
        with_these = f"all weights, with {' '.join(changes.settings)},"
    ranks = _enough_ranks(planner, split, changes.config)
    if ranks is None:
        reason = _unsharded_memory(planner, changes.config)
        return f"{with_these} fit on no number of learner devices: {reason}"
    if ranks < split.learners:
        return f"{with_these} fit on {counted(ranks, 'device')} that learn: they divide the experts"
    beside = ""
    if not in_process(planner.config):
        beside = f", beside the engine's {split.engines * split.tensor_parallel}"
    return f"{with_these} fit on {counted(ranks, 'device')} that learn{beside}"


def _change_train(changes: _Changes) -> None:
    """Take settings of train until the learner fits."""
    ranks = changes.split.learners
    for name, value in (
        ("reuse_scoring_forward", False),
        ("activation_checkpointing", True),
        ("fsdp_param_dtype", "bfloat16"),
        ("logits_chunk", None),
    ):
        config = changes.config
        changed = _with_train_setting(config, name, value, ranks=ranks)
        if changed is None or changes.option.learner_fits:
            continue
        option = changes.planner.evaluate_split(changes.split, changed)
        # What comes after it needs graphs to be freed, even where it saves nothing by itself.
        if name == "reuse_scoring_forward" or _saves(
            changes.planner, changes.split, config, option
        ):
            changes.take(_setting(name, value, changes.split, config), changed, option)


def _change_optimiser_state(changes: _Changes) -> None:
    """Take the state that fits, else the host's memory: on a CPU that is the same memory."""
    tried = {}
    for state in ("host", "8bit"):
        changed = with_optimiser_state(changes.config, state)
        tried[state] = changed, changes.planner.evaluate_split(changes.split, changed)
        if tried[state][1].learner_fits and tried[state][1].host_fits:
            changes.take(f"optim.state={state}", *tried[state])
            return
    if not changes.planner.cluster.is_cpu:
        changes.take("optim.state=host", *tried["host"])


def _to_type(planner: Planner, split: DeviceSplit, settings: list[str]) -> str:
    """Return the line with all settings at once, which a user copies behind `onepolicy plan`."""
    words = [word for setting in settings for word in setting.split() if "=" in word]
    words = [word.rstrip(",") for word in words]
    if split.learners > 1 and planner.config.train.ranks != split.learners:
        words = [f"train.ranks={split.learners}", *words]
        if not in_process(planner.config):
            words.append(f"--tensor-parallel {split.tensor_parallel}")
    left_out = [setting for setting in settings if "=" not in setting]
    return ", ".join([f"{TYPE}{' '.join(dict.fromkeys(words))}", *left_out])


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


def _with_adapters(
    planner: Planner, split: DeviceSplit, config: RunConfig, settings: list[str]
) -> list[str]:
    """Return the lines of LoRA in place of all weights; none if the recipe cannot have it.

    If it does not fit, the next try has fewer bytes: of the adapters, the weights, the engine.
    settings: by which the recipe was changed, optim.state apart, which is not for adapters.
    """
    if config.train.lora is not None or config.objective.has_critic:
        return []
    config = with_optimiser_state(config, "device")
    for lora, quant in _adapter_tries(planner, split, config):
        added, adapted = _adapted(config, lora, quant, split.learners)
        made = planner.replanned(adapted)
        changes = _Changes(made, _best_split(made, split, quant), adapted)
        for shrink in (_fewer_sequences, _smaller_micro_batch):
            smaller = None
            if not changes.option.learner_fits:
                smaller = shrink(made, changes.split, changes.config)
            if smaller is not None and _saves(made, changes.split, changes.config, smaller[2]):
                changes.take(*smaller)
        added += changes.settings
        line = f"or adapters alone, {' '.join(added)}: {_verdict(changes.option)}"
        if changes.option.learner_fits and changes.option.engine_fits:
            return [line, _to_type(planner, changes.split, [*settings, *added])]
    ranks = None
    if split.learners > 1:
        ranks = _enough_ranks(made, changes.split, changes.config)
    if ranks is not None:
        line = f"{line}; with {counted(ranks, 'device')} that learn it fits"
    return [line]


def _adapter_tries(
    planner: Planner, split: DeviceSplit, config: RunConfig
) -> list[tuple[LoraConfig, Fp8 | None]]:
    """Return adapters and formats of the engine to try, the largest first.

    Frozen weights in 4 bits are not sharded. Every rank has all adapters, and those of experts are
    many.
    """
    tries: list[tuple[LoraConfig, Fp8 | None]] = [(LoraConfig(), None)]
    small = LoraConfig(base="nf4")
    if split.learners > 1:
        small = LoraConfig(targets=("attention",))
    tries.append((small, None))
    if config.rollout.quant is None and (in_process(config) or split.learners > 1):
        tries.append((small, Fp8()))
    return tries


def _best_split(planner: Planner, split: DeviceSplit, quant: Fp8 | None) -> DeviceSplit:
    """Return the split, or with a quantised server the one with the smallest learner.

    The server then needs fewer devices, and the others learn.
    """
    if quant is None or in_process(planner.config) or replicated(planner.config):
        return split
    count, engines = planner.cluster.count, split.engines
    others = [
        DeviceSplit(count - engines * size, engines, size)
        for size in ENGINE_SIZES
        if engines * size < count
    ]
    options = [planner.evaluate_split(each) for each in [split, *others]]
    return min(
        (option for option in options if option.engine_fits),
        key=lambda option: option.learner_used,
        default=options[0],
    ).split


def _adapted(
    config: RunConfig, lora: LoraConfig, quant: Fp8 | None, ranks: int
) -> tuple[list[str], RunConfig]:
    """Return the settings that give a recipe adapters and a quantised engine, and the recipe.

    Frozen weights need no float32, so shards of them are bfloat16.
    """
    train: dict[str, object] = {"lora": lora}
    settings, model = [f"train.lora.rank={lora.rank}"], config.model
    if lora.base == "nf4":
        settings.append("train.lora.base=nf4")
    if lora.targets is not None:
        settings.append("""'train.lora.targets=["attention"]'""")
    if ranks > 1 and config.model.dtype == "float32":
        settings.append("model.dtype=bfloat16")
        model = model.model_copy(update={"dtype": "bfloat16"})
        if config.train.autocast != "off":
            settings.append("train.autocast=off")
        train |= {"autocast": "off", "fsdp_param_dtype": "same"}
    rollout, evaluation = config.rollout, config.eval
    if quant is not None:
        settings.append(f"rollout.quant={quant.format}")
        rollout = rollout.model_copy(update={"quant": quant})
        if evaluation.every:  # else a third model, unquantised, evaluates
            settings.append("eval.quantised=true")
            evaluation = evaluation.model_copy(update={"quantised": True})
    changed = {"model": model, "rollout": rollout, "eval": evaluation}
    changed["train"] = config.train.model_copy(update=train)
    return settings, config.model_copy(update=changed)


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
            text += " and train.autocast=off"
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
