"""What is refused before a forward runs: dense models, and routes that cannot be what the engine computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from onepolicy.config import TrainingError, UsageError
from onepolicy.types import Completion, RoutingTrace, Sample, id_dtype

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class RoutingError(TrainingError):
    """A router did not do what record or replay needs. The message names the decoder layer."""


class MisalignedRoutesError(RoutingError):
    """Replayed routes that are not those of a forward. layers_wrong: the rows are right, a layer is not."""

    def __init__(self, message: str, *, layers_wrong: bool) -> None:
        super().__init__(message)
        self.layers_wrong = layers_wrong


def is_moe(hf_config: Any) -> bool:
    """Does this transformers config describe a model with more than one routed expert? Reads no weights."""
    text = hf_config.get_text_config()
    for config in (text, getattr(text, "ffn_config", None)):
        for name in _EXPERT_COUNTS:
            count = getattr(config, name, None)
            if isinstance(count, (list, tuple)):  # one number per layer
                count = max(count, default=0)
            if isinstance(count, int) and count > 1:
                return True
    return False


def require_moe(hf_config: Any, mode: str = "r3") -> None:
    """Refuse replay on a dense model from its config alone, before any weight is read."""
    if not is_moe(hf_config):
        raise UsageError(
            f"replay.mode={mode} needs a Mixture-of-Experts model, but model_type={hf_config.model_type!r} has no "
            "routed experts; set replay.mode=off"
        )


def refuse_router_loss(hf_config: Any) -> None:
    """Refuse a load-balancing loss, which transformers computes from a top-k of its own, not from the replayed experts.

    `router_aux_loss_coef` alone is harmless: without `output_router_logits` no such loss exists.
    """
    if hf_config is not None and getattr(
        hf_config.get_text_config(), "output_router_logits", False
    ):
        raise UsageError(
            "output_router_logits=True in the model's config adds a router auxiliary loss, which counts experts "
            "that were not used and pulls the routers away from those that were; set it to false"
        )


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """What the routes a rollout engine returns must be for the model that is trained."""

    layers: tuple[int, ...]  # decoder index of each MoE layer, ascending
    num_experts: int
    top_k: int
    missing: Literal[
        "fine", "error", "native"
    ]  # a sample without routes: not needed, refused, or routed by the trainer


def check_completion(
    completion: Completion, prompt_ids: Sequence[int], route_spec: RouteSpec | None, name: str
) -> None:
    """Refuse routes that cannot be those of this completion: wrong number of rows, or what `check_trace` refuses.

    `name` says which sample it is.
    """
    trace, first = completion.routing, completion.first_slot
    if trace is None or route_spec is None:
        return
    tokens = torch.tensor([*prompt_ids, *completion.token_ids.tolist()])
    slots = len(tokens) - 1
    if first + len(trace) != slots:
        raise UsageError(
            f"{name}: the engine returned {len(trace)} routing rows from slot {first} on, but {slots + 1} tokens have "
            f"{slots} slots; it must return {slots - first} rows, one per token it fed (never the last one)"
        )
    tokens = tokens[first:-1]
    check_trace(
        trace.to("cpu"),
        layers=route_spec.layers,
        num_experts=route_spec.num_experts,
        top_k=route_spec.top_k,
        name=name,
    )
    _check_stuck(trace.to("cpu"), tokens, name)


def fill_missing_routes(sample: Sample, route_spec: RouteSpec | None, name: str) -> Sample:
    """`sample`, which has routes if replay needs them: UsageError if not, unless route_spec.missing says what to do."""
    if route_spec is None or sample.routing is not None or route_spec.missing == "fine":
        return sample
    if route_spec.missing == "error":
        raise UsageError(
            f"{name}: has no routes, but replay is on; its engine did not return them or its environment dropped them. "
            "To let the trainer route such samples itself, and count them, set replay.missing=native"
        )
    ids = torch.zeros(
        len(sample.trainable),
        len(route_spec.layers),
        route_spec.top_k,
        dtype=id_dtype(route_spec.num_experts),
    )
    valid = torch.zeros(len(ids), dtype=torch.bool)  # no row is read
    return dataclasses.replace(
        sample, routing=RoutingTrace(ids, valid, route_spec.layers, route_spec.num_experts)
    )


def check_trace(
    trace: RoutingTrace,
    *,
    layers: tuple[int, ...],
    num_experts: int,
    top_k: int,
    name: str = "trace",
) -> None:
    """Every valid row names `top_k` different experts of every MoE layer of this model, and not the filler ids
    0, 1, .. K-1 throughout; else UsageError with layer, row and likely cause."""
    if trace.layers != layers:
        raise UsageError(
            f"{name}: layers is {trace.layers}, but the model's MoE layers are {layers}"
        )
    if trace.num_experts != num_experts:
        raise UsageError(
            f"{name}: num_experts is {trace.num_experts}, but the model has {num_experts} experts per layer"
        )
    if trace.top_k != top_k:
        raise UsageError(
            f"{name}: has {trace.top_k} experts per token, but the model routes each token to {top_k}"
        )
    ids = _comparable(trace.ids)
    outside, twice = _out_of_range(ids, num_experts), _duplicated(ids)
    wrong = (outside | twice) & trace.valid[:, None]
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        where = f"at layer {layers[column]}, row {row}: {trace.ids[row, column].tolist()}"
        if outside[row, column]:
            raise UsageError(
                f"{name}: an expert outside 0..{num_experts - 1} {where}; routes of another model, physical instead of "
                "logical expert ids, or a fused shared-expert column"
            )
        raise UsageError(f"{name}: an expert twice {where}; {_why_twice(ids, trace.valid, column)}")
    _check_filler(trace, ids, name)


def _why_twice(ids: Tensor, valid: Tensor, column: int) -> str:
    zero = (ids[valid] == 0).all(-1)  # [n, L]
    if zero.all():
        return "all rows of all layers are zero: the engine captured nothing (a fused kernel, or capture is not active)"
    if zero[:, column].all():
        return "all rows of this layer are zero: the engine did not capture it (a dense layer, another pipeline stage?)"
    return (
        "rows that were not captured (padding, another rank's share) must have valid=False, not filler ids; "
        f"{int(zero[:, column].sum())} of {len(zero)} rows are all zero here"
    )


MIN_CONSTANT_ROWS, MIN_CONSTANT_BITS = 16, 64.0
MIN_FILLER_BITS = 20.0


def constant_layers(trace: RoutingTrace, bounds: Tensor | None = None) -> Tensor:  # [S, L] bool
    """Return which layers have the same experts in every valid row of a sample that is long enough to tell.

    bounds [S + 1] int64: first row of every packed sample and the end; None: one sample. Such a layer was not captured,
    or its router has collapsed onto these experts, or the sample's tokens are all equal. Only the trainer's own choice
    tells these apart, see `alignment.check_captured`.
    """
    ends = torch.tensor([0, len(trace)]) if bounds is None else bounds
    samples, device = len(ends) - 1, trace.ids.device
    found = torch.zeros(samples, len(trace.layers), dtype=torch.bool, device=device)
    if trace.top_k == trace.num_experts or len(trace) == 0:
        return found
    ids = _comparable(trace.ids)
    segment = torch.repeat_interleave(torch.arange(samples), ends.diff().cpu()).to(device)  # [T]
    rows = torch.zeros(samples, dtype=torch.int64, device=device)
    rows = rows.index_add(0, segment, trace.valid.long())
    none = torch.full((samples,), len(trace), device=device)
    places = torch.arange(len(trace), device=device)
    first = none.scatter_reduce(
        0, segment[trace.valid], places[trace.valid], "amin"
    )  # first valid row
    first = first.clamp(max=len(trace) - 1)
    other = (ids != ids[first[segment]]).any(-1) & trace.valid[:, None]  # [T, L]
    changes = torch.zeros(samples, len(trace.layers), dtype=torch.int64, device=device)
    changes = changes.index_add(0, segment, other.long())
    bits = math.log2(math.perm(trace.num_experts, trace.top_k))
    return (changes == 0) & (rows >= max(MIN_CONSTANT_ROWS, MIN_CONSTANT_BITS / bits))[:, None]


def _check_filler(trace: RoutingTrace, ids: Tensor, name: str) -> None:
    """Refuse rows that are 0, 1, .. K-1 in every layer. In one layer a router may have collapsed onto these experts,
    in this order; that all of them did has a chance below 2^-ENOUGH_FILLER_BITS."""
    filler = torch.arange(trace.top_k, device=ids.device)
    bits = math.log2(math.perm(trace.num_experts, trace.top_k)) * len(trace.layers)
    if trace.top_k == 1 or bits < MIN_FILLER_BITS or not constant_layers(trace).all():
        return
    if (ids[trace.valid] == filler).all():
        raise UsageError(
            f"{name}: every layer has the same experts {filler.tolist()} in all {int(trace.valid.sum())} rows; the "
            "engine captured nothing (filler ids)"
        )


def _check_stuck(trace: RoutingTrace, tokens: Tensor, name: str) -> None:  # tokens [T]
    """Rows repeated over all layers while the tokens change were not captured: a padded batch, a stale buffer.

    Repeated tokens may repeat their routes: a run of one token converges to one hidden state. Where all rows are the
    same, every router may have collapsed, which `alignment.check_captured` finds out.
    """
    ids = _comparable(trace.ids)
    same = (ids[1:] == ids[:-1]).flatten(1).all(1) & trace.valid[1:] & trace.valid[:-1]
    run = torch.cat(
        [torch.zeros(1, dtype=torch.int64), (~same).cumsum(0)]
    )  # [T] number of the run each row is in
    changes = torch.zeros(len(ids), dtype=torch.int64).index_add(
        0, run[1:], (same & (tokens[1:] != tokens[:-1])).long()
    )
    bits = math.log2(math.perm(trace.num_experts, trace.top_k)) * len(trace.layers)
    if constant_layers(trace).all():
        return
    if len(ids) and trace.top_k < trace.num_experts and int(changes.max()) >= max(3, 160 / bits):
        rows = (run == changes.argmax()).nonzero()[:, 0]
        raise UsageError(
            f"{name}: rows {int(rows[0])} to {int(rows[-1])} repeat the same experts in all {len(trace.layers)} "
            f"layers while their tokens change, at layer {trace.layers[0]}: {trace.ids[rows[0], 0].tolist()}; they "
            "were not captured (padding of a fixed-size batch, a buffer another request or rank left behind)"
        )


def _comparable(ids: Tensor) -> Tensor:
    return ids.view(torch.int16) if ids.dtype == torch.uint16 else ids  # uint16 lacks comparisons


def _out_of_range(ids: Tensor, num_experts: int) -> Tensor:  # [T, L, K] -> [T, L] bool
    wrong = ids > num_experts - 1  # uint8 would take 256 for 0
    if ids.dtype == torch.int16:  # the upper half of uint16
        wrong |= ids < 0
    return wrong.any(-1)


def _duplicated(ids: Tensor) -> Tensor:  # [T, L, K] -> [T, L] bool
    columns = ids.unbind(-1)
    found = torch.zeros(ids.shape[:2], dtype=torch.bool, device=ids.device)
    for i, column in enumerate(columns):
        for other in columns[i + 1 :]:
            found |= column == other
    return found
