"""Checks before a forward: routes that no engine can have computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from onepolicy.config import TrainingError, UsageError
from onepolicy.divergence.routing import row_words, signed_ids
from onepolicy.replay.misalignment import why_filler, why_surplus, why_wrong
from onepolicy.types import Completion, RoutingTrace, Sample, id_dtype

# Bits of a choice: log2 of the number of ordered top-k selections. They decide when a repetition is
# too unlikely to be a coincidence.
MIN_CONSTANT_ROWS, MIN_CONSTANT_BITS = 16, 64.0
MIN_FILLER_BITS = 20.0
MIN_STUCK_CHANGES, MIN_STUCK_BITS = 3, 160.0


class RoutingError(TrainingError):
    """A forward or a trace that cannot be recorded or replayed.

    The message names the decoder layer, where there is one.
    """


class MisalignedRoutesError(RoutingError):
    """Replayed routes that are not those of a forward.

    layers_wrong: the routes of a layer are wrong; otherwise those of rows are.
    """

    def __init__(self, message: str, *, layers_wrong: bool) -> None:
        super().__init__(message)
        self.layers_wrong = layers_wrong


def refuse_router_loss(hf_config: Any) -> None:
    """Raise UsageError if the config asks for a load-balancing loss.

    transformers computes that loss from a top-k of its own, not from the replayed experts. The
    setting `router_aux_loss_coef` alone does no harm: without `output_router_logits` there is no
    such loss.
    """
    if hf_config is not None and getattr(
        hf_config.get_text_config(), "output_router_logits", False
    ):
        raise UsageError(
            "output_router_logits=True in the model's config adds a router auxiliary loss, which "
            "counts experts that were not used and pulls the routers away from those that were; "
            "set it to false"
        )


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """The layers, experts and completeness that a rollout engine's routes must have."""

    layers: tuple[int, ...]  # decoder index of each MoE layer, ascending
    num_experts: int
    top_k: int
    # A sample without routes: accepted as it is, refused, or routed by the trainer
    missing: Literal["fine", "error", "native"]


def check_completion(
    completion: Completion, prompt_ids: Sequence[int], route_spec: RouteSpec | None, name: str
) -> None:
    """Raise if a completion's routes cannot be those of its tokens.

    Does nothing without routes or without `route_spec`. The routes begin at slot `first_slot`.
    `prompt_ids` are the tokens before the completion. `name` is the sample's, for messages.

    Raises:
        UsageError: there is not one row per token that was fed, `check_trace` refuses the trace, or
            rows repeat over all layers while the tokens change.
    """
    trace = completion.routing
    if trace is None or route_spec is None:
        return
    tokens = torch.tensor([*prompt_ids, *completion.token_ids.tolist()])
    check_path(trace, tokens, route_spec, name, first_slot=completion.first_slot)


def check_path(
    trace: RoutingTrace,
    tokens: Tensor,  # [N] integer
    route_spec: RouteSpec,
    name: str,
    *,
    first_slot: int = 0,
) -> None:
    """Raise if the routes cannot be those of a path of tokens, without a model to ask.

    The routes begin at slot `first_slot`. `name` is the sample's, for messages.

    Raises:
        UsageError: there is not one row per token that was fed, `check_trace` refuses the trace, or
            rows repeat over all layers while the tokens change.
    """
    slots = len(tokens) - 1
    if first_slot + len(trace) != slots:
        raise UsageError(
            f"{name}: the engine returned {len(trace)} routing rows from slot {first_slot} on, but "
            f"{slots + 1} tokens have {slots} slots; it must return {slots - first_slot} rows, one "
            f"per token it fed (never the last one){why_surplus(trace.ids, slots - first_slot)}"
        )
    trace = trace.to("cpu")
    check_trace(
        trace,
        layers=route_spec.layers,
        num_experts=route_spec.num_experts,
        top_k=route_spec.top_k,
        name=name,
    )
    _check_stuck(trace, tokens[first_slot:-1], name)


def fill_missing_routes(sample: Sample, route_spec: RouteSpec | None, name: str) -> Sample:
    """Return the sample, with a trace of invalid rows if it has no routes and may lack them.

    The trainer routes invalid rows itself. `name` is the sample's name, for the message.

    Raises:
        UsageError: the sample has no routes and `route_spec.missing` is "error".
    """
    if route_spec is None or sample.routing is not None or route_spec.missing == "fine":
        return sample
    if route_spec.missing == "error":
        raise UsageError(
            f"{name}: has no routes, but replay is on; its engine did not return them or its "
            "environment dropped them. To let the trainer route such samples itself, and count "
            "them, set replay.missing=native"
        )
    shape = len(sample.trainable), len(route_spec.layers), route_spec.top_k
    ids = torch.zeros(shape, dtype=id_dtype(route_spec.num_experts))
    valid = torch.zeros(len(ids), dtype=torch.bool)
    trace = RoutingTrace(ids, valid, route_spec.layers, route_spec.num_experts)
    return dataclasses.replace(sample, routing=trace)


def check_trace(
    trace: RoutingTrace,
    *,
    layers: tuple[int, ...],
    num_experts: int,
    top_k: int,
    name: str = "trace",
) -> None:
    """Raise unless every valid row names `top_k` different experts of every MoE layer.

    The trace has ids [T, L, K] and valid [T]. `layers`, `num_experts` and `top_k` are the model's,
    as in `RouteSpec`. `name` is the trace's, for messages.

    Raises:
        UsageError: the trace is of other layers, experts or K. Or an id is out of range, a row
            names an expert twice, or all rows of all layers are the filler 0, 1, .. K-1. The
            message names the layer, the row and the likely cause.
    """
    if trace.layers != layers:
        raise UsageError(
            f"{name}: layers is {trace.layers}, but the model's MoE layers are {layers}"
        )
    if trace.num_experts != num_experts:
        raise UsageError(
            f"{name}: num_experts is {trace.num_experts}, but the model has {num_experts} experts "
            "per layer"
        )
    if trace.top_k != top_k:
        raise UsageError(
            f"{name}: has {trace.top_k} experts per token, but the model routes each token to "
            f"{top_k}"
        )
    ids = signed_ids(trace.ids)
    outside, filler = _out_of_range(ids, num_experts), _begins_as_filler(trace, ids)
    wrong = (outside | _duplicated(ids)) & trace.valid[:, None]
    if wrong.any() | filler:  # one read of the device: a micro-batch waits for each
        if wrong.any():
            raise UsageError(f"{name}: {why_wrong(trace, ids, wrong, outside)}")
        expected = torch.arange(top_k, device=ids.device)
        if constant_layers(trace).all() and (ids[trace.valid] == expected).all():
            raise UsageError(f"{name}: {why_filler(trace)}")


def constant_layers(trace: RoutingTrace, bounds: Tensor | None = None) -> Tensor:
    """Return [S, L] bool: the layers whose experts are the same in every valid row of a sample.

    Such a layer was not captured, or its router has collapsed onto these experts, or all tokens of
    the sample are equal. Only the trainer's own choice tells these apart
    (`windows.check_captured`). Samples too short for that to mean anything give False.

    bounds [S + 1] int64: first row of every packed sample, then T; None for one sample.
    """
    lengths = [len(trace)]
    if bounds is not None:
        lengths = bounds.diff().tolist()
    if trace.top_k == trace.num_experts:
        shape = len(lengths), len(trace.layers)
        return torch.zeros(shape, dtype=torch.bool, device=trace.ids.device)
    bits = math.log2(math.perm(trace.num_experts, trace.top_k))
    least_rows = max(MIN_CONSTANT_ROWS, MIN_CONSTANT_BITS / bits)
    constant = []
    samples = row_words(trace.ids).split(lengths), trace.valid.split(lengths)
    for words, valid in zip(*samples, strict=True):  # [n, L, W], [n]
        first = words[:1]
        if len(words):
            first = words.index_select(0, valid.byte().argmax(0, keepdim=True))
        same = (words == first).all(-1) | ~valid[:, None]
        constant.append(same.all(0) & (valid.sum() >= least_rows))
    return torch.stack(constant)


def _begins_as_filler(trace: RoutingTrace, ids: Tensor) -> Tensor:
    """Return whether the first valid row is 0, 1, .. K-1 in every layer, where that tells anything.

    In one layer a router may have collapsed onto these experts, in this order. The chance that all
    of them did is below 2^-MIN_FILLER_BITS.
    """
    bits = math.log2(math.perm(trace.num_experts, trace.top_k)) * len(trace.layers)
    if trace.top_k == 1 or bits < MIN_FILLER_BITS or not len(ids):
        return torch.zeros((), dtype=torch.bool, device=ids.device)
    first = ids.index_select(0, trace.valid.byte().argmax(0, keepdim=True))
    return (first == torch.arange(trace.top_k, device=ids.device)).all()


def _check_stuck(trace: RoutingTrace, tokens: Tensor, name: str) -> None:
    """Raise if rows repeat over all layers while their tokens [T] change.

    Such rows were not captured: a padded batch, a stale buffer. Equal tokens may have equal routes,
    because a run of one token converges to one hidden state. Where all rows are the same, every
    router may have collapsed, which `windows.check_captured` finds out. Repetitions of a layer
    whose experts often stay while those of another change say little.
    """
    words, both = row_words(trace.ids), trace.valid[1:] & trace.valid[:-1]
    stays = (words[1:] == words[:-1]).all(-1) & both[:, None]  # [T - 1, L]
    same = stays.all(1)
    if not same.any() or trace.top_k >= trace.num_experts or constant_layers(trace).all():
        return
    run = torch.cat([torch.zeros(1, dtype=torch.int64), (~same).cumsum(0)])  # [T] number of the run
    new_token = tokens[1:] != tokens[:-1]
    changes = torch.bincount(run[1:][same & new_token], minlength=len(words))
    alone = stays & (new_token & ~same)[:, None]
    runs = (alone & ~alone.roll(1, 0)).sum(0)  # [L] a long one is a stale layer, so it counts once
    share = runs / ((new_token & both & ~same).sum() - alone.sum(0) + runs).clamp(min=1)
    bits = (-share.log2()).clamp(max=math.log2(math.perm(trace.num_experts, trace.top_k)))
    if int(changes.max()) >= max(MIN_STUCK_CHANGES, MIN_STUCK_BITS / max(float(bits.sum()), 1e-9)):
        rows = (run == changes.argmax()).nonzero()[:, 0]
        raise UsageError(
            f"{name}: rows {int(rows[0])} to {int(rows[-1])} repeat the same experts in all "
            f"{len(trace.layers)} layers while their tokens change, at layer {trace.layers[0]}: "
            f"{trace.ids[rows[0], 0].tolist()}; they were not captured (padding of a fixed-size "
            "batch, a buffer another request or rank left behind)"
        )


def _out_of_range(ids: Tensor, num_experts: int) -> Tensor:  # [T, L, K] -> [T, L] bool
    on_host = ids.device.type == "cpu"  # elsewhere each comparison is a wait
    if not ids.numel() or (on_host and 0 <= ids.amin() <= ids.amax() < num_experts):
        return torch.zeros(ids.shape[:2], dtype=torch.bool, device=ids.device)
    wrong = ids > num_experts - 1  # uint8 would take 256 for 0
    if ids.dtype == torch.int16:  # the upper half of uint16
        wrong |= ids < 0
    return wrong.any(-1)


def _duplicated(ids: Tensor) -> Tensor:  # [T, L, K] -> [T, L] bool
    columns = ids.permute(2, 0, 1).contiguous()  # for fast comparisons
    found = torch.zeros(ids.shape[:2], dtype=torch.bool, device=ids.device)
    for i, column in enumerate(columns):
        for later in columns[i + 1 :]:
            found |= column == later
    return found
