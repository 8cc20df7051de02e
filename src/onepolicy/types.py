"""The tensors that every room shares, each with shape and dtype.

Legend: N tokens, T = N - 1 slots of one path (or all packed slots of a batch), S samples, L MoE
layers, K experts per token (top-k), E experts. Slot t feeds `tokens[t]` and predicts
`tokens[t + 1]`. Everything about that prediction (`logp[t]`, `trainable[t]`, `advantage[t]`,
`routing[t]`) is stored at slot t. An engine never feeds the last sampled token, so it returns
exactly T routing rows and no padding row is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor

from onepolicy.errors import UsageError
from onepolicy.support.trace import SupportTrace

FinishReason = Literal["stop", "length", "aborted", "turns", "time"]
MAX_LOGP = 1e-3
"""Largest value that is accepted as a log-probability: rounding may leave a little more than 0."""
PLAYERS: ContextVar[object] = ContextVar("players", default=None)
"""A step's rollouts, or an evaluation, as its task sets it: they count apart (envs/counts.py)."""
RouteSource = Literal["decode", "prefill", "cache", "reprefill"]


def id_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest unsigned dtype that holds expert ids 0..num_experts-1."""
    if num_experts <= 256:
        return torch.uint8
    return torch.uint16


def index_ids(ids: Tensor, index: Tensor | slice) -> Tensor:
    """Return `ids[index]`. Torch 2.6 cannot index uint16 with tensors or lists."""
    if ids.dtype == torch.uint16:
        return ids.view(torch.int16)[index].view(torch.uint16)
    return ids[index]


@dataclass(frozen=True, slots=True)
class RouteSpan:
    """The source of `length` routing rows from `start` on, and the version of the model weights."""

    start: int
    length: int
    source: RouteSource
    version: int


def route_spans(
    cached: int, prompt: int, fed: int, version: int, *, start: int = 0
) -> tuple[RouteSpan, ...]:
    """Return the spans of one request's routing rows [start, fed).

    The first `cached` rows came from the cache, the other rows of the prompt from its prefill, the
    rest from decoding. Offsets count from `start`.
    """
    parts: dict[RouteSource, tuple[int, int]] = {
        "cache": (0, cached),
        "prefill": (cached, prompt),
        "decode": (prompt, fed),
    }
    ranges = [(source, max(a, start), b) for source, (a, b) in parts.items()]
    return tuple(RouteSpan(a - start, b - a, source, version) for source, a, b in ranges if b > a)


@dataclass(frozen=True, slots=True)
class TraceOrigin:
    """The origin of a trace's rows."""

    starts: tuple[int, ...] = (0,)
    """First row of each sample, ascending from 0. Replay compares some rows of every sample."""
    steps: tuple[tuple[int, int], ...] = ()
    """[B, S] of each recorded forward, if B > 1 and the forwards continue each other. Rows are then
    ordered by forward, whereas one forward of the whole batch would order them by sample."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """The experts that processed each slot's input token, in the engine's column order.

    Two traces are equal if their ids, valid, layers, num_experts and weights are. Raises UsageError
    if the fields do not fit together.
    """

    ids: Tensor  # [T, L, K] uint8 if E <= 256 else uint16
    valid: Tensor  # [T] bool; False = not captured: the trainer routes this slot itself
    layers: tuple[int, ...]  # [L] decoder index of each MoE layer, ascending
    num_experts: int
    spans: tuple[RouteSpan, ...] = ()
    weights: Tensor | None = None  # [T, L, K] floating, combine weights as the router returned them
    # dataclasses.replace does not copy the origin: it makes a new trace.
    origin: TraceOrigin = field(default=TraceOrigin(), init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_shapes()

    def _check_kinds(self) -> None:
        fields = {"ids": self.ids, "valid": self.valid}
        if self.weights is not None:
            fields["weights"] = self.weights
        for name, value in fields.items():
            if not isinstance(value, Tensor) or value.is_nested:
                kind = type(value).__name__
                raise UsageError(f"RoutingTrace.{name} is {kind}, expected a tensor")

    def _check_shapes(self) -> None:
        if self.ids.dim() != 3:
            raise UsageError(
                f"RoutingTrace.ids has shape {tuple(self.ids.shape)}, expected [T, L, K]"
            )
        rows, layers, _ = self.ids.shape
        if len(self.layers) != layers:
            raise UsageError(
                f"RoutingTrace.ids has {layers} layers but `layers` names {len(self.layers)}"
            )
        if self.valid.shape != (rows,) or self.valid.dtype != torch.bool:
            raise UsageError(
                f"RoutingTrace.valid has shape {tuple(self.valid.shape)} and dtype "
                f"{self.valid.dtype}, expected bool [{rows}]"
            )
        if self.ids.dtype != id_dtype(self.num_experts):
            raise UsageError(
                f"RoutingTrace.ids is {self.ids.dtype}; {self.num_experts} experts are stored as "
                f"{id_dtype(self.num_experts)}"
            )
        if self.weights is None:
            return
        if self.weights.shape != self.ids.shape:
            raise UsageError(
                f"RoutingTrace.weights has shape {tuple(self.weights.shape)}, ids have "
                f"{tuple(self.ids.shape)}"
            )
        if not self.weights.is_floating_point():
            raise UsageError(
                f"RoutingTrace.weights is {self.weights.dtype}, expected a floating dtype"
            )

    @property
    def top_k(self) -> int:
        return self.ids.shape[2]

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutingTrace):
            return NotImplemented
        if (self.layers, self.num_experts, self.ids.shape) != (
            other.layers,
            other.num_experts,
            other.ids.shape,
        ):
            return False
        pairs = ((self.ids, other.ids), (self.valid, other.valid), (self.weights, other.weights))
        return all(_equal_bits(one, another) for one, another in pairs)

    def __hash__(self) -> int:
        return hash((self.layers, self.num_experts, self.ids.shape))

    def with_origin(self, origin: TraceOrigin) -> RoutingTrace:
        """Return a copy of this trace with another origin."""
        trace = dataclasses.replace(self)
        object.__setattr__(trace, "origin", origin)
        return trace

    def to(self, device: torch.device | str) -> RoutingTrace:
        moved = self._map_tensors(lambda tensor: tensor.to(device))
        return moved.with_origin(self.origin)

    def at(self, slots: Tensor | slice) -> RoutingTrace:
        """Return the rows `slots` (index [n] int64 or slice), without spans."""
        selected = self._map_tensors(lambda tensor: index_ids(tensor, slots))
        selected = dataclasses.replace(selected, spans=())
        if not isinstance(slots, slice) or slots.step not in (None, 1):
            return selected  # in an order of its own
        first, stop, _ = slots.indices(len(self))
        starts = [max(start - first, 0) for start in self.origin.starts if start < stop]
        return selected.with_origin(TraceOrigin(tuple(sorted({0, *starts}))))

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> RoutingTrace:
        fields = {"ids": function(self.ids), "valid": function(self.valid)}
        if self.weights is not None:
            fields["weights"] = function(self.weights)
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    def rows(self, start: int, stop: int) -> RoutingTrace:
        """Return rows [start, stop) as a trace, with spans cut and shifted to match."""
        spans = []
        for span in self.spans:
            first, last = max(span.start, start), min(span.start + span.length, stop)
            if first < last:
                spans.append(RouteSpan(first - start, last - first, span.source, span.version))
        selected = self.at(slice(start, stop))
        return dataclasses.replace(selected, spans=tuple(spans)).with_origin(selected.origin)

    @classmethod
    def concat(cls, traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Return the rows of all traces, one trace after the other.

        Each trace counts as a sample, or as the samples that it is made of.

        Raises UsageError unless all traces are of one model (same layers and experts).
        """
        _check_same_model(traces)
        spans: list[RouteSpan] = []
        starts, offset = {0}, 0
        for trace in traces:
            if len(trace):
                starts |= {offset + start for start in trace.origin.starts}
            spans += [dataclasses.replace(span, start=span.start + offset) for span in trace.spans]
            offset += len(trace)
        weights = [trace.weights for trace in traces if trace.weights is not None]
        joined = cls(
            torch.cat([trace.ids for trace in traces]),
            torch.cat([trace.valid for trace in traces]),
            traces[0].layers,
            traces[0].num_experts,
            tuple(spans),
        )
        if weights:
            joined = dataclasses.replace(joined, weights=torch.cat(weights))
        steps = next((trace.origin.steps for trace in traces if trace.origin.steps), ())
        return joined.with_origin(TraceOrigin(tuple(sorted(starts)), steps))


def _check_same_model(traces: Sequence[RoutingTrace]) -> None:
    if not traces:
        raise UsageError("cannot concatenate no routing traces: which model's?")
    first = traces[0]
    for number, trace in enumerate(traces):
        if not isinstance(trace, RoutingTrace):
            raise UsageError(
                f"RoutingTrace.concat: item {number} is {type(trace).__name__}, expected a "
                "RoutingTrace; for a sample without routes give rows that are not valid"
            )
        models = [(each.layers, each.num_experts, each.top_k) for each in (trace, first)]
        if models[0] != models[1]:
            raise UsageError("cannot concatenate routing traces of different models")
        if (trace.weights is None) != (first.weights is None):
            raise UsageError("cannot concatenate routing traces with and without combine weights")


Trace = TypeVar("Trace", RoutingTrace, SupportTrace)


def concat_given(traces: Sequence[Trace | None]) -> Trace | None:
    """Return the rows of all traces, one trace after the other; None if no trace is given.

    Raises UsageError if some are and others are not.
    """
    given = [trace for trace in traces if trace is not None]
    if not given:
        return None
    if len(given) < len(traces):
        raise UsageError(
            f"{len(traces) - len(given)} of {len(traces)} parts have no {type(given[0]).__name__} "
            "while others have; a trace is never made up"
        )
    return type(given[0]).concat(given)


def _equal_bits(one: Tensor | None, another: Tensor | None) -> bool:
    """Return whether both tensors have the same bits and dtype.

    Unsigned 16-bit integers lack comparisons, so they are compared as signed ones.
    """
    if one is None or another is None:
        return one is another
    if one.dtype != another.dtype or one.device != another.device:
        return False
    if one.dtype == torch.uint16:
        one, another = one.view(torch.int16), another.view(torch.int16)
    return torch.equal(one, another)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one request."""

    temperature: float  # > 0; 0 = greedy (evaluation only)
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0  # 0 = whole vocabulary
    min_p: float = 0.0  # least probability as a share of the likeliest token's; before both
    stop: tuple[int, ...] = ()  # token ids that end a completion (kept as its last token)
    top_logprobs: int = 0  # most likely tokens whose log-probabilities are returned at each step
    routes_from: int = 0  # first slot whose route is needed; an engine may return earlier ones too
    initial_prompt_len: int = 0  # tokens of the episode's first prompt; 0 = the whole prompt
    support: bool = False  # return the tokens that each token was drawn from
    support_logp: bool = False  # and the log-probabilities of these


@dataclass(frozen=True, slots=True)
class Completion:
    """An engine's reply to one request."""

    token_ids: Tensor  # [n] int32
    logp: Tensor  # [n] float32, under the distribution actually sampled from
    version: Tensor  # [n] int32, weight version that sampled each token
    finish: FinishReason
    routing: RoutingTrace | None = None  # of prompt + completion, from slot `first_slot` on
    first_slot: int = 0
    top_ids: Tensor | None = None  # [n, k] int32, most likely first; k = Sampling.top_logprobs
    top_logp: Tensor | None = None  # [n, k] float32, like `logp`; -inf where sampling is narrowed
    fingerprint: str | None = None  # of the code that computed `logp`; None: not known
    adapter: str | None = None  # name of the LoRA adapter that sampled it; `version` is its version
    support: SupportTrace | None = None  # of the n sampled tokens, if asked for


def merge_fingerprints(fingerprints: list[frozenset[str]]) -> frozenset[str]:
    """Return the union of the fingerprints, or nothing if any rollout has none."""
    if not all(fingerprints):
        return frozenset()
    return frozenset().union(*fingerprints)


@dataclass(frozen=True, slots=True)
class Sample:
    """One trainable token path (CPU)."""

    tokens: Tensor  # [N] int32
    trainable: Tensor  # [T] bool, tokens[t + 1] was sampled by the policy
    logp_rollout: Tensor  # [T] float32, NaN where not trainable
    version: Tensor  # [T] int32, -1 where not trainable
    turn: Tensor  # [T] int32, index of the model turn; -1 where not trainable
    temperature: float
    reward: float
    finish: FinishReason
    routing: RoutingTrace | None = None
    events: tuple[str, ...] = ()  # of the episode, for statistics: tools called, `malformed` turns
    episode: int | None = None  # index in the group; samples of a rewritten history share it
    outcome: float | None = None  # reward relative to the group's baseline
    top_ids: Tensor | None = None  # [T, k] int32, most likely tokens; 0 where not trainable
    top_logp_rollout: Tensor | None = None  # [T, k] float32, NaN where not trainable
    fingerprints: frozenset[str] = frozenset()  # of logp_rollout; empty: not known of all of it
    support: SupportTrace | None = None  # of T slots; missing where not trainable

    def __post_init__(self) -> None:
        slots = len(self.tokens) - 1
        for name in ("trainable", "logp_rollout", "version", "turn"):
            length = len(getattr(self, name))
            if length != slots:
                raise ValueError(
                    f"Sample.{name} has {length} slots; {slots + 1} tokens have {slots}"
                )
        self._check_top_tokens(slots)
        logp = self.logp_rollout[self.trainable]
        if not (logp.isfinite() & (logp <= MAX_LOGP)).all():
            raise ValueError("Sample.logp_rollout is no log-probability on a trainable slot")
        for name in ("routing", "support"):
            trace = getattr(self, name)
            if trace is not None and len(trace) != slots:
                raise ValueError(
                    f"Sample.{name} has {len(trace)} rows; {slots + 1} tokens have {slots} slots"
                )

    def _check_top_tokens(self, slots: int) -> None:
        if self.top_ids is None and self.top_logp_rollout is None:
            return
        if self.top_ids is None or self.top_logp_rollout is None:
            raise ValueError("Sample.top_ids and top_logp_rollout: give both or neither")
        shapes = tuple(self.top_ids.shape), tuple(self.top_logp_rollout.shape)
        if shapes[0] != shapes[1] or shapes[0][0] != slots:
            raise ValueError(
                f"Sample.top_ids {shapes[0]} and top_logp_rollout {shapes[1]}: expected "
                f"[{slots}, k]"
            )
        if self.top_logp_rollout[self.trainable].isnan().any():
            raise ValueError("Sample.top_logp_rollout is missing (NaN) on a trainable slot")

    @property
    def response_length(self) -> int:
        return int(self.trainable.sum())


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt."""

    problem_id: int
    samples: tuple[Sample, ...]
    answer: str = ""  # of the problem, for logs

    @property
    def episodes(self) -> list[int]:
        """The index in the group of each sample's episode."""
        indices = []
        for number, sample in enumerate(self.samples):
            if sample.episode is None:
                indices.append(number)
            else:
                indices.append(sample.episode)
        return indices


_FIELDS_PER_SAMPLE = {"cu_seqlens", "temperature", "outcome", "group", "episode"}
"""Fields of TokenBatch with one entry per sample; all others have one per slot."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Packed samples: a step on the CPU, or a micro-batch on a device.

    `select` and `to` change all fields together.
    """

    input_ids: Tensor  # [T] int64
    target_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, restart at 0 with every sample
    cu_seqlens: Tensor  # [S + 1] int32
    segment: Tensor  # [T] int64, sample index of each slot
    trainable: Tensor  # [T] bool
    version: Tensor  # [T] int32
    turn: Tensor  # [T] int32
    logp_rollout: Tensor  # [T] float32, 0 where not trainable
    temperature: Tensor  # [S] float32
    outcome: Tensor  # [S] float32
    group: Tensor  # [S] int64
    top_ids: Tensor | None = None  # [T, k] int32, the rollout's most likely tokens, or 0
    top_logp_rollout: Tensor | None = None  # [T, k] float32, 0 where not trainable
    episode: Tensor | None = None  # [S] int64, index in the group; None: one sample an episode
    routing: RoutingTrace | None = None
    support: SupportTrace | None = None  # log-probabilities are over these tokens, if given
    # The fields from here on are filled by score(), by the correction and by the objective.
    routing_native: RoutingTrace | None = None  # the trainer's own choice on the same slots
    routers_differing: Tensor | None = None  # [T, L] uint8, experts of routing not in native
    gate_mass: Tensor | None = None  # [T, L] float32, of the replayed experts (topk_hook.py)
    logp_old: Tensor | None = None  # [T] float32, trainer before the update
    top_logp_old: Tensor | None = None  # [T, k] float32, of `top_ids`
    trainer_top_ids: Tensor | None = None  # [T, k] int32, the trainer's most likely tokens
    trainer_top_logp: Tensor | None = None  # [T, k] float32, of `trainer_top_ids`
    logp_ref: Tensor | None = None  # [T] float32, reference model
    value: Tensor | None = None  # [T] float32, critic before the update
    value_target: Tensor | None = None  # [T] float32, return the critic is trained on
    entropy: Tensor | None = None  # [T] float32, of the distribution that `logp_old` is of
    entropy_vocabulary: Tensor | None = None  # [T] float32, if `entropy` is that over `support`
    logp_vocabulary: Tensor | None = None  # [T] float32, if `logp_old` is over `support`
    displaced: Tensor | None = None  # [T] float32, of its support (support/checks.py)
    advantage: Tensor | None = None  # [T] float32
    weight: Tensor | None = None  # [T] float32, detached
    keep: Tensor | None = None  # [T] bool, trainable and not rejected
    loss_weight: Tensor | None = None  # [T] float32, of the slot in the loss; 0 where untrainable
    fingerprints: frozenset[str] = frozenset()  # of its samples, as in Sample
    shared: Any = None  # SharedSlots of a micro-batch (train/shared_prompts.py)

    @property
    def num_samples(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_slots(self) -> int:
        return len(self.input_ids)

    @property
    def num_trainable(self) -> int:
        """Trainable slots, before any rejection."""
        return int(self.trainable.sum())

    def replace(self, **fields: object) -> Self:
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> Self:
        moved = {name: value.to(device) for name, value in self._tensor_fields()}
        return self.replace(**moved)

    def _tensor_fields(self) -> list[tuple[str, Tensor | RoutingTrace | SupportTrace]]:
        fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        kinds = Tensor | RoutingTrace | SupportTrace
        return [(name, value) for name, value in fields if isinstance(value, kinds)]

    def slots_of(self, samples: list[int]) -> Tensor:
        """Return the slots [n] int64 of these samples, in this order."""
        bounds = self.cu_seqlens.tolist()
        none = torch.arange(0)
        return torch.cat([none, *(torch.arange(bounds[s], bounds[s + 1]) for s in samples)])

    def select(self, samples: list[int]) -> Self:
        """Return the batch of only these samples, in this order."""
        slots, chosen = self.slots_of(samples), torch.tensor(samples)
        selected: dict[str, object] = {}
        for name, value in self._tensor_fields():
            if isinstance(value, RoutingTrace | SupportTrace):
                selected[name] = value.at(slots)
            elif name in _FIELDS_PER_SAMPLE:
                selected[name] = value[chosen]
            else:
                selected[name] = value[slots]
        lengths = self.cu_seqlens.diff()[chosen]
        ends = lengths.cumsum(0, dtype=torch.int32)
        selected["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
        selected["segment"] = torch.arange(len(samples)).repeat_interleave(lengths)
        return self.replace(**selected)
