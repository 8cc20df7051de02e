"""Suggested changes to a recipe that does not fit. Each is planned before it is suggested.

A change is text that a user types behind `onepolicy plan`, and is read as such. So whatever the
settings of a run refuse together is never suggested.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from onepolicy.config import RunConfig, UsageError, resolve
from onepolicy.config.engine import ServerEngineConfig
from onepolicy.notation import counted
from onepolicy.plan.dims import format_count
from onepolicy.plan.planner import Planner, PlanOption, best_option
from onepolicy.plan.splits import ENGINE_SIZES, DeviceSplit
from onepolicy.plan.step_work import in_process, replicated
from onepolicy.train.memory import shard_sizes

FEWEST_SEQUENCES = 4  # that an engine shall still sample at once
MAX_DEVICES = 2**14  # the search for a number of devices ends here
NEGLIGIBLE = 0.02  # what saves less memory is not suggested
TYPE = "type: "  # begins the line of all settings at once, which a user copies
SERVER = "rollout.engine.kind=vllm-server rollout.engine.url=http://127.0.0.1:8000"
QUANTISED = "rollout.quant=fp8"
SAVERS = {  # setting that saves memory -> the value without it
    "optim.state": "device",
    "train.activation_checkpointing": "false",
    "train.logits_chunk": "0",
    "train.fsdp_param_dtype": "same",
}


class _Search:
    """A recipe that is changed until its learner fits."""

    def __init__(self, planner: Planner, split: DeviceSplit, settings: Iterable[str] = ()) -> None:
        """Begin with the recipe and these settings."""
        self.planner, self.split, self.settings = planner, split, list(settings)
        self.ranks: list[str] = []
        if split.learners > 1 and planner.config.train.ranks != split.learners:
            self.ranks = [f"train.ranks={split.learners}"]
        self.lines: list[str] = []
        self.config = planner.settings_of(split.learners)
        self.option = planner.evaluate_split(split, self.config)

    def changed(self, setting: str) -> tuple[RunConfig, PlanOption] | None:
        """Return the recipe with one more change, planned; None if the settings refuse it."""
        words = [*self.ranks, *" ".join([*self.settings, setting]).replace("'", "").split()]
        try:
            config = resolve(self.planner.config.model_dump(exclude_unset=True), words)
        except UsageError:
            return None
        config = self.planner.settings_of(self.split.learners, config)
        return config, self.planner.evaluate_split(self.split, config)

    def take(self, *candidates: str, least: float = NEGLIGIBLE) -> None:
        """Take the first candidate with which the learner fits, else the last one.

        None is taken if the learner fits already, or if it saves less than the share `least`.
        """
        if self.option.learner_fits:
            return
        found = None
        for setting in candidates:
            planned = self.changed(setting)
            if planned is not None:
                found = setting, *planned
                if planned[1].learner_fits:
                    break
        if found is None or found[2].learner_used > (1 - least) * self.option.learner_used:
            return
        setting, self.config, self.option = found
        as_well = "with " if self.lines else ""
        self.lines.append(f"{as_well}{setting}: {_verdict(self.option)}")
        self.settings.append(setting)

    def shrink(self) -> None:
        """Sample fewer sequences at once, then update with smaller micro-batches."""
        self.take(*self._fewer_sequences())
        slots, budget = self.planner.work.slots, self.config.train.tokens_per_micro_batch
        now = len(self.planner.work.fullest_micro_batch(budget, self.split.learners).slots)
        self.take(*(f"train.tokens_per_micro_batch={n * slots}" for n in range(now - 1, 0, -1)))

    def _fewer_sequences(self) -> Iterator[str]:
        """Yield half as many, and again: their keys and values lie on the learner's device."""
        count = self.config.rollout.engine.max_num_seqs // 2
        while in_process(self.config) and count >= FEWEST_SEQUENCES:
            yield f"rollout.engine.max_num_seqs={count}"
            count //= 2

    def to_type(self) -> str:
        """Return the line with all settings at once, which a user copies behind the command."""
        words = [*self.ranks, *self.settings]
        if self.ranks and not in_process(self.planner.config):
            words.append(f"--tensor-parallel {self.split.tensor_parallel}")
        return f"{TYPE}{' '.join(words)}"


def suggestions(planner: Planner, chosen: PlanOption) -> list[str]:
    """Return one line for each suggestion; none if the option fits.

    Host memory is that of these learners, so it is told once they fit.
    """
    if in_process(planner.config) and _needs_server(planner):
        return _with_server(planner)
    lines = []
    if not chosen.learner_fits:
        lines += _learner_suggestions(planner, chosen.split)
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
    engine = planner.config.rollout.engine
    given = engine.model_dump(exclude_unset=True, exclude={"kind"})
    kept = [
        f"rollout.engine.{name}={given[name]}"
        for name, field in ServerEngineConfig.model_fields.items()
        if given.get(name) not in (None, field.default)
    ]
    server = " ".join([SERVER, *kept])
    first = (
        f"{server} (its address), a server on other devices: the engine's weights alone take "
        f"{planner.weights.total / 1e9:.0f} GB, and the learner's device has "
        f"{planner.room / 1e9:.0f}"
    )
    try:
        config = resolve(planner.config.model_dump(exclude_unset=True), server.split())
    except UsageError as error:  # of a setting that servers lack
        return [first, str(error)]
    made = planner.replanned(config)
    chosen = best_option([made.evaluate_split(split) for split in made.possible_splits()])
    lines = suggestions(made, chosen) or [_Search(made, chosen.split).to_type()]
    if not lines[0].startswith(("or ", "all weights", TYPE)):
        lines[0] = f"with {lines[0]}"
    return [first, *(line.replace(TYPE, f"{TYPE}{server} ", 1) for line in lines)]


def _host_suggestions(planner: Planner, chosen: PlanOption) -> list[str]:
    rests = ""
    if chosen.host_state:
        rests = f", beside {chosen.host_state / 1e9:,.0f} GB of moments and masters"
    needs = {
        f"a checkpoint's shards are copied there while they are written{rests}": (
            chosen.host_state + chosen.save.staged
        ),
        f"the model is read whole in model.dtype = {planner.config.model.dtype} before it is "
        "sharded": chosen.start.host,
    }
    return [
        f"nodes with more than {needed / 1e9:,.0f} GB of memory: {reason} "
        "(--constant host_memory=BYTES if they have it)"
        for reason, needed in needs.items()
        if needed > chosen.host_room
    ]


def _learner_suggestions(planner: Planner, split: DeviceSplit) -> list[str]:
    """Suggest settings until the learner fits with all of them, else adapters and more devices."""
    search = _Search(planner, split)
    if search.config.train.reuse_scoring_forward:
        # What comes after it needs graphs to be freed, even where it saves nothing by itself.
        search.take("train.reuse_scoring_forward=false", least=-1.0)
    search.take("train.activation_checkpointing=true")
    if split.learners > 1 and search.config.model.dtype != "bfloat16":
        search.take("train.fsdp_param_dtype=bfloat16 train.autocast=off")
    for_adapters = list(search.settings)
    if search.config.optim.state == "device":
        _change_optimiser_state(search)
    search.shrink()
    if search.option.learner_fits:
        return [*search.lines, search.to_type()]
    return [*search.lines, *_with_adapters(planner, split, for_adapters), _more_devices(search)]


def _change_optimiser_state(search: _Search) -> None:
    """Take the state that fits, else the host's memory: on a CPU that is the same memory."""
    states = []
    for state in ("optim.state=host", "optim.state=8bit"):
        planned = search.changed(state)
        if planned is not None and planned[1].learner_fits and planned[1].host_fits:
            states.append(state)
    if not states and not search.planner.cluster.is_cpu:
        states = ["optim.state=host"]
    search.take(*states, least=-1.0)


def _with_adapters(planner: Planner, split: DeviceSplit, settings: list[str]) -> list[str]:
    """Return the lines of LoRA in place of all weights; none if the recipe cannot have it.

    If it does not fit, the next try has fewer bytes: of the adapters, the weights, the engine.
    settings: by which the recipe is changed, optim.state apart, which is not for adapters.
    """
    if planner.config.train.lora is not None or planner.config.objective.has_critic:
        return []
    line, search = "", None
    for added in _adapter_tries(planner, split):
        words = [f"train.ranks={split.learners}"] * (split.learners > 1)
        words += " ".join([*settings, *added]).replace("'", "").split()
        try:
            config = resolve(planner.config.model_dump(exclude_unset=True), words)
        except UsageError:
            continue
        made = planner.replanned(config)
        search = _Search(made, _best_split(made, split, added))
        search.shrink()
        found = [*added, *search.settings]
        line = f"or adapters alone, {' '.join(found)}: {_verdict(search.option)}"
        if search.option.learner_fits and search.option.engine_fits:
            return [line, _Search(planner, search.split, [*settings, *found]).to_type()]
    ranks = None
    if search is not None and split.learners > 1:
        ranks = _enough_ranks(search)
    if ranks is not None:
        line += f"; with {counted(ranks, 'device')} that learn it fits"
    return [line] * bool(line)


def _adapter_tries(planner: Planner, split: DeviceSplit) -> Iterator[list[str]]:
    """Yield settings of adapters and of the engine to try, those of most bytes first.

    Frozen weights need no float32, so shards of them are bfloat16. In 4 bits they are not sharded.
    Every rank has all adapters, and those of experts are many.
    """
    config, sharded = planner.settings_of(split.learners), split.learners > 1
    first, small, last = ["train.lora.rank=16"], "train.lora.base=nf4", list[str]()
    if config.optim.state != "device":
        first.append("optim.state=device")
    if sharded:
        small = """'train.lora.targets=["attention"]'"""
        if config.model.dtype == "float32":
            last = ["model.dtype=bfloat16"] + ["train.autocast=off"] * (
                config.train.autocast != "off"
            )
    yield [*first, *last]
    yield [*first, small, *last]
    if config.rollout.quant is None and (in_process(config) or sharded):
        # else a third model, unquantised, evaluates
        yield [*first, small, *last, QUANTISED, *["eval.quantised=true"] * bool(config.eval.every)]


def _best_split(planner: Planner, split: DeviceSplit, settings: list[str]) -> DeviceSplit:
    """Return the split, or with a quantised server the one with the smallest learner.

    The server then needs fewer devices, and the others learn.
    """
    count, engines = planner.cluster.count, split.engines
    if QUANTISED not in settings or in_process(planner.config) or replicated(planner.config):
        return split
    sizes = [size for size in ENGINE_SIZES if engines * size < count]
    splits = [split, *(DeviceSplit(count - engines * size, engines, size) for size in sizes)]
    options = [planner.evaluate_split(each) for each in splits]
    return min(
        (option for option in options if option.engine_fits),
        key=lambda option: option.learner_used,
        default=options[0],
    ).split


def _more_devices(search: _Search) -> str:
    """Return the line of the number of devices on which all weights fit."""
    split, with_these = search.split, "all weights"
    if search.settings:
        with_these = f"all weights, with {' '.join(search.settings)},"
    ranks = _enough_ranks(search)
    if ranks is None:
        return f"{with_these} fit on no number of learner devices: {_unsharded_memory(search)}"
    if ranks < split.learners:
        return f"{with_these} fit on {counted(ranks, 'device')} that learn: they divide the experts"
    beside = ""
    if not in_process(search.config):
        beside = f", beside the engine's {split.engines * split.tensor_parallel}"
    return f"{with_these} fit on {counted(ranks, 'device')} that learn{beside}"


def _enough_ranks(search: _Search) -> int | None:
    """Return a number of ranks whose learner fits, where one rank less does not; None if none does.

    Beyond the number of experts padding grows with the ranks, so then a divisor of it may fit. An
    engine on the first rank's device stays as large as it is.
    """
    planner, option = search.planner, search.option
    room = planner.room - (option.learner_used - option.learner.total)

    def fits(ranks: int) -> bool:
        return planner.learner_rank_memory(ranks, search.config).total <= room

    too_few, enough = search.split.learners, 2 * search.split.learners
    while not fits(enough):
        if enough > MAX_DEVICES:
            return next(filter(fits, _divisors(planner.dims.experts)), None)
        too_few, enough = enough, 2 * enough
    enough = bisect_left(range(enough), True, lo=too_few + 1, key=fits)
    nodes = max(1, planner.cluster.per_node)
    return enough if enough < nodes else -(-enough // nodes) * nodes


def _unsharded_memory(search: _Search) -> str:
    """Describe the memory of a rank that more ranks do not reduce."""
    planner, config = search.planner, search.config
    if in_process(config) and planner.weights.total > 0.5 * planner.room:
        return (
            f"the engine's weights take {planner.weights.total / 1e9:.0f} GB of the first one: "
            f"rollout.engine.kind=vllm-server on other devices, or {QUANTISED}"
        )
    powers = (planner.learner_rank_memory(2**power, config) for power in range(1, 15))
    memory = min(powers, key=lambda each: each.gathered + each.activations + each.logits)
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
        sequences = planner.engine_device_memory(size).sequences
        if size > chosen.split.tensor_parallel and sequences >= 1:
            return [
                f"engines of {size} devices (tensor parallel): {sequences} sequences fit in the "
                "cache"
            ]
    return [
        f"no engine of up to {ENGINE_SIZES[-1]} devices holds the weights and one sequence: "
        "quantise, or use other devices"
    ]


def memory_settings(planner: Planner, chosen: PlanOption) -> list[str]:
    """Return one line for each setting of the recipe that saves memory, with its bytes.

    Each is taken away alone. There is no line for one that saves next to nothing.
    """
    search, lines = _Search(planner, chosen.split), []
    sections = search.config.model_dump()
    for setting, value in SAVERS.items():
        section, name = setting.split(".")
        has, planned = str(sections[section][name]).lower(), search.changed(f"{setting}={value}")
        if has == value or planned is None:
            continue
        saved = planned[1].learner_used - chosen.learner_used
        if saved > NEGLIGIBLE * chosen.learner_used:
            verdict = "would not fit without it"
            if planned[1].fits:
                verdict = "fits without it too"
            shown = f"{setting}={has}".replace("=none", " (logits in chunks)")
            lines.append(f"{shown} saves {saved / 1e9:.1f} GB per rank; {verdict}")
    return lines


def uneven_experts(planner: Planner, chosen: PlanOption) -> list[str]:
    """Return one line if the ranks do not divide the experts, with the nearest counts that do."""
    dims, ranks = planner.dims, chosen.split.learners
    stored = ranks * sum(shard_sizes(dims.shapes, ranks))
    if not dims.experts or stored < (1 + NEGLIGIBLE) * dims.total:
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


def _verdict(option: PlanOption) -> str:
    verdict = "fits" if option.learner_fits else "not enough yet"
    used, room = option.learner_used / 1e9, option.learner_room / 1e9
    return f"{used:.1f} of {room:.1f} GB per rank, {verdict}"
