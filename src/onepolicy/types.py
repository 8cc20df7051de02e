"""The nouns every folder shares, each with shape and dtype.

Legend: N tokens, T = N - 1 slots of one path (or all packed slots of a batch), S samples, L MoE layers, K experts per
token (top-k), E experts. Slot t feeds `tokens[t]` and predicts `tokens[t + 1]`; everything about that prediction
(`logp[t]`, `trainable[t]`, `advantage[t]`, `routing[t]`) lives on slot t. An engine never feeds the last sampled token,
so it has exactly T routing rows and nothing here needs a filler row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from onepolicy.config.base import UsageError

FinishReason = Literal["stop", "length", "aborted", "turns", "time"]
MAX_LOGP = 1e-3  # what is more is no log-probability; rounding may leave a little more than 0
RouteSource = Literal["decode", "prefill", "cache", "reprefill"]
_CHOSEN = ", rows chosen"


def describe_argument(value: object) -> str:
    """An argument, for an error: a tensor's dtype and shape, or the type."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def id_dtype(num_experts: int) -> torch.dtype:
    """Smallest unsigned dtype that holds expert ids 0..num_experts-1."""
    return torch.uint8 if num_experts <= 256 else torch.uint16


@dataclass(frozen=True, slots=True)
class RouteSpan:
    """Where `length` routing rows from `start` on came from, and under which weights they were computed."""

    start: int
    length: int
    source: RouteSource
    version: int


def route_spans(
    cached: int, prompt: int, fed: int, version: int, *, start: int = 0
) -> tuple[RouteSpan, ...]:
    """Of one request's rows [start, fed): the first `cached` came from the cache, those of the other prompt tokens from
    its prefill. Offsets count from `start`."""
    parts: dict[RouteSource, tuple[int, int]] = {
        "cache": (0, cached),
        "prefill": (cached, prompt),
        "decode": (prompt, fed),
    }
    ranges = [(source, max(a, start), b) for source, (a, b) in parts.items()]
    return tuple(RouteSpan(a - start, b - a, source, version) for source, a, b in ranges if b > a)


@dataclass(frozen=True, slots=True)
class TraceOrigin:
    """How a trace came about, which decides what replay asks of it."""

    source: str = (
        "given"  # traces of one source are checked at the first of them, and then now and then
    )
    steps: tuple[
        tuple[int, int], ...
    ] = ()  # [B, S] of recorded forwards, if B > 1 and they continue each other: rows
    # lie step by step, and a forward of the whole batch is row by row


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """Which experts processed each slot's input token, as the engine chose them (column order included).

    Equal if ids, valid, layers, experts and weights are. UsageError if the fields do not fit together.
    """

    ids: Tensor  # [T, L, K] uint8 if E <= 256 else uint16
    valid: Tensor  # [T] bool; False = not captured: the trainer routes this slot itself
    layers: tuple[int, ...]  # [L] decoder index of each MoE layer, ascending
    num_experts: int
    spans: tuple[RouteSpan, ...] = ()
    weights: Tensor | None = (
        None  # [T, L, K] floating, the router's own output: what each expert was multiplied by
    )
    origin: TraceOrigin = field(
        default=TraceOrigin(), init=False, repr=False
    )  # not copied by dataclasses.replace: that makes a new one

    def __post_init__(self) -> None:
        for name in ("ids", "valid", "weights"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) and not (name == "weights" and value is None):
                raise UsageError(
                    f"RoutingTrace.{name} is {type(value).__name__}, expected a tensor"
                )
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
                f"RoutingTrace.valid has shape {tuple(self.valid.shape)} and dtype {self.valid.dtype}, expected bool "
                f"[{rows}]"
            )
        if self.ids.dtype != id_dtype(self.num_experts):
            raise UsageError(
                f"RoutingTrace.ids is {self.ids.dtype}; {self.num_experts} experts are stored as "
                f"{id_dtype(self.num_experts)}"
            )
        if self.weights is not None and self.weights.shape != self.ids.shape:
            raise UsageError(
                f"RoutingTrace.weights has shape {tuple(self.weights.shape)}, ids {tuple(self.ids.shape)}"
            )
        if self.weights is not None and not self.weights.is_floating_point():
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
        return all(_same(mine, theirs) for mine, theirs in pairs)

    def __hash__(self) -> int:
        return hash((self.layers, self.num_experts, self.ids.shape))

    def with_origin(self, origin: TraceOrigin) -> RoutingTrace:
        """This trace, made in that way."""
        trace = dataclasses.replace(self)
        object.__setattr__(trace, "origin", origin)
        return trace

    @property
    def reprefilled(self) -> bool:
        """Whether any row was recorded by a re-prefill and not by the engine."""
        return any(span.source == "reprefill" for span in self.spans)

    def to(self, device: torch.device | str) -> RoutingTrace:
        weights = None if self.weights is None else self.weights.to(device)
        moved = dataclasses.replace(
            self, ids=self.ids.to(device), valid=self.valid.to(device), weights=weights
        )
        return moved.with_origin(self.origin)

    def at(self, slots: Tensor | slice) -> RoutingTrace:
        """These rows (index [n] int64 or slice), without spans."""
        weights = None if self.weights is None else self.weights[slots]
        taken = dataclasses.replace(
            self, ids=self.ids[slots], valid=self.valid[slots], weights=weights, spans=()
        )
        source = self.origin.source.removesuffix(_CHOSEN)
        return taken.with_origin(
            TraceOrigin(source if isinstance(slots, slice) else source + _CHOSEN)
        )

    def rows(self, start: int, stop: int) -> RoutingTrace:
        """Rows [start, stop) as a trace of their own; spans are cut and shifted to match."""
        cut = []
        for span in self.spans:
            first, last = max(span.start, start), min(span.start + span.length, stop)
            if first < last:
                cut.append(RouteSpan(first - start, last - first, span.source, span.version))
        taken = self.at(slice(start, stop))
        return dataclasses.replace(taken, spans=tuple(cut)).with_origin(taken.origin)

    @classmethod
    def concat(cls, traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Rows of all traces, one after the other. All must be of one model (same layers and experts)."""
        if not traces:
            raise UsageError("cannot concatenate no routing traces: which model's?")
        first = traces[0]
        for number, trace in enumerate(traces):
            if not isinstance(trace, RoutingTrace):
                raise UsageError(
                    f"RoutingTrace.concat: item {number} is {type(trace).__name__}, expected a RoutingTrace; for a "
                    "sample without routes give rows that are not valid"
                )
            if (trace.layers, trace.num_experts, trace.top_k) != (
                first.layers,
                first.num_experts,
                first.top_k,
            ):
                raise UsageError("cannot concatenate routing traces of different models")
            if (trace.weights is None) != (first.weights is None):
                raise UsageError(
                    "cannot concatenate routing traces with and without combine weights"
                )
        spans, offset = [], 0
        for trace in traces:
            spans += [dataclasses.replace(span, start=span.start + offset) for span in trace.spans]
            offset += len(trace)
        joined = cls(
            torch.cat([t.ids for t in traces]),
            torch.cat([t.valid for t in traces]),
            first.layers,
            first.num_experts,
            tuple(spans),
            None
            if first.weights is None
            else torch.cat([t.weights for t in traces if t.weights is not None]),
        )
        sources = sorted({t.origin.source for t in traces})
        return joined.with_origin(
            TraceOrigin(
                " and ".join(sources), next((t.origin.steps for t in traces if t.origin.steps), ())
            )
        )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Is it the same tensor, bit for bit and in dtype? Unsigned 16-bit integers lack comparisons."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.device != other.device:
        return False
    if one.dtype == torch.uint16:
        one, other = one.view(torch.int16), other.view(torch.int16)
    return torch.equal(one, other)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request is sampled. Training needs full support (top_p = 1, top_k = 0); evaluation may narrow it."""

    temperature: float  # > 0; 0 = greedy (evaluation only)
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0  # 0 = whole vocabulary
    stop: tuple[int, ...] = ()  # token ids that end a completion (kept as its last token)
    top_logprobs: int = (
        0  # log-probabilities of this many of the likeliest tokens, with every sampled one
    )
    routes_from: int = (
        0  # first slot whose route is wanted; an engine may return earlier ones as well
    )
    initial_prompt_len: int = (
        0  # tokens at the prompt's beginning that its episode began with; 0 = all of them
    )


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one request."""

    token_ids: Tensor  # [n] int32
    logp: Tensor  # [n] float32, under the distribution actually sampled from
    version: Tensor  # [n] int32, weight version that sampled each token
    finish: FinishReason
    routing: RoutingTrace | None = (
        None  # rows of the path prompt + completion, from slot `first_slot` on
    )
    first_slot: int = 0
    top_ids: Tensor | None = (
        None  # [n, k] int32, likeliest first; None: not asked for (Sampling.top_logprobs = 0)
    )
    top_logp: Tensor | None = (
        None  # [n, k] float32, like `logp`; -inf where narrowed sampling leaves fewer than k
    )
    fingerprint: str | None = (
        None  # of what computed `logp` (invariant.fingerprint); None: not known
    )


def merge_fingerprints(fingerprints: list[frozenset[str]]) -> frozenset[str]:
    """Of several rollouts together: empty if it is of one of them."""
    return frozenset().union(*fingerprints) if all(fingerprints) else frozenset()


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
    events: tuple[
        str, ...
    ] = ()  # of the episode, for its statistics: tools called, `malformed` turns
    episode: int | None = (
        None  # within its group, shared by the samples of a rewritten history; None: its own
    )
    outcome: float | None = None  # reward against its group's baseline, set by objective.outcomes
    top_ids: Tensor | None = (
        None  # [T, k] int32, the rollout's likeliest tokens; 0 where not trainable
    )
    top_logp_rollout: Tensor | None = None  # [T, k] float32, NaN where not trainable
    fingerprints: frozenset[str] = (
        frozenset()
    )  # of what computed logp_rollout; empty: not known of all of it

    def __post_init__(self) -> None:
        slots = len(self.tokens) - 1
        for name in ("trainable", "logp_rollout", "version", "turn"):
            if len(getattr(self, name)) != slots:
                raise ValueError(
                    f"Sample.{name} has {len(getattr(self, name))} slots; {slots + 1} tokens have {slots}"
                )
        if self.top_ids is not None or self.top_logp_rollout is not None:
            shapes = [
                None if x is None else tuple(x.shape) for x in (self.top_ids, self.top_logp_rollout)
            ]
            if shapes[0] != shapes[1] or shapes[0] is None or shapes[0][0] != slots:
                raise ValueError(
                    f"Sample.top_ids {shapes[0]} and top_logp_rollout {shapes[1]}: expected [{slots}, k]"
                )
            assert self.top_logp_rollout is not None
            if self.top_logp_rollout[self.trainable].isnan().any():
                raise ValueError("Sample.top_logp_rollout is missing (NaN) on a trainable slot")
        if not torch.isfinite(self.logp_rollout[self.trainable]).all():
            raise ValueError("Sample.logp_rollout is not finite on a trainable slot")
        if self.routing is not None and len(self.routing) != slots:
            raise ValueError(
                f"Sample.routing has {len(self.routing)} rows; {slots + 1} tokens have {slots} slots"
            )

    @property
    def response_length(self) -> int:
        return int(self.trainable.sum())


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings: samples of one prompt."""

    problem_id: int
    samples: tuple[Sample, ...]
    answer: str = ""  # of the problem, for logs

    @property
    def episodes(self) -> list[int]:
        """Of each sample: which episode of the group it comes from."""
        return [
            i if sample.episode is None else sample.episode for i, sample in enumerate(self.samples)
        ]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Packed samples: a step on the CPU, or a micro-batch on a device. `select` and `to` keep fields in step."""

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
    top_ids: Tensor | None = (
        None  # [T, k] int32, the rollout's likeliest tokens; 0 where not trainable
    )
    top_logp_rollout: Tensor | None = None  # [T, k] float32, 0 where not trainable
    episode: Tensor | None = (
        None  # [S] int64, within the group; None: every sample is one of its own
    )
    routing: RoutingTrace | None = None
    routing_native: RoutingTrace | None = (
        None  # the trainer's own choice on the same slots, from score()
    )
    gate_mass: Tensor | None = (
        None  # [T, L] float32, of the replayed experts (replay.modes.gate_mass), from score()
    )
    logp_old: Tensor | None = None  # [T] float32, trainer before the update
    top_logp_old: Tensor | None = None  # [T, k] float32, of `top_ids`, from score()
    trainer_top_ids: Tensor | None = (
        None  # [T, k] int32, the trainer's likeliest tokens, from score() if there are top_ids
    )
    trainer_top_logp: Tensor | None = None  # [T, k] float32, of these
    logp_ref: Tensor | None = None  # [T] float32, reference model
    value: Tensor | None = None  # [T] float32, critic before the update
    value_target: Tensor | None = None  # [T] float32, return the critic is trained on
    entropy: Tensor | None = None  # [T] float32, of the trainer's distribution, from score()
    advantage: Tensor | None = None  # [T] float32
    weight: Tensor | None = None  # [T] float32, detached
    keep: Tensor | None = None  # [T] bool, trainable and not rejected
    loss_weight: Tensor | None = (
        None  # [T] float32, of each slot in the loss of its optimiser step; 0 where not trainable
    )
    fingerprints: frozenset[str] = frozenset()  # of its samples, as in Sample

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
        return self.replace(**{name: value.to(device) for name, value in self._present()})

    def _present(self) -> list[tuple[str, Tensor | RoutingTrace]]:
        every = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [(name, value) for name, value in every if isinstance(value, Tensor | RoutingTrace)]

    def slots_of(self, samples: list[int]) -> Tensor:
        """[n] int64: the slots of these samples, in this order."""
        bounds = self.cu_seqlens.tolist()
        return torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in samples])

    def select(self, samples: list[int]) -> Self:
        """The batch of only these samples, in this order."""
        slots, chosen = self.slots_of(samples), torch.tensor(samples)
        lengths = self.cu_seqlens.diff()[chosen]
        out: dict[str, object] = {}
        for name, value in self._present():
            rows = (
                chosen
                if name in ("cu_seqlens", "temperature", "outcome", "group", "episode")
                else slots
            )
            out[name] = value.at(rows) if isinstance(value, RoutingTrace) else value[rows]
        out["cu_seqlens"] = torch.cat(
            [torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)]
        )
        out["segment"] = torch.arange(len(samples)).repeat_interleave(lengths)
        return self.replace(**out)


@dataclass(frozen=True, slots=True)
class NumericsContract:
    """How one side computes log-probabilities. Equal bits need equal contracts (invariant/numerics_contract.py)."""

    numerics: str  # on-policy, or fast
    dtype: str  # of the parameters: all of them, or how many are of which
    attention: str  # attention function, one for decoding, prefilling and packed samples
    experts: str  # experts function, which fixes the order in which a token's experts are added
    lm_head: str  # what computes the logits, and from which weights
    modules: tuple[tuple[str, str], ...]
    """Name of every module with parameters or buffers (routers, rotary frequencies): its forward, and their dtypes."""
    logp: str  # from logits and temperature to the log-probability of a token
