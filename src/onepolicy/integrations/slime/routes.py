"""Checks of the routes that SGLang returned, before a trainer of slime's family replays them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from onepolicy.config import UsageError
from onepolicy.replay.axes import trace_from
from onepolicy.replay.checks import RouteSpec, check_path


def check_samples(args: Any, samples: Sequence[Any], *_: Any, **__: Any) -> None:
    """Check the routes of every finished sample. --rollout-all-samples-process-path, in both.

    Only the trainer's forward can tell whether these are the routes of these tokens
    (docs/replay.md). Without a model the number of rows can be checked, ids, layers that
    were not captured, and rows that a buffer repeats. Those of a sample that is masked out
    (`remove_sample`) may be anything, but must be there: Megatron replays them too.

    Raises:
        UsageError: a sample has no routes although they are replayed, or routes that cannot be
            those of its tokens. The message names the sample and the likely cause.
    """
    if not getattr(args, "use_rollout_routing_replay", False):
        return
    found = list(_flat(samples))
    _warn_of_versions(found)
    if not hasattr(args, "num_experts"):
        raise UsageError(
            "check_samples: reads num_layers, num_experts and moe_router_topk of Megatron's "
            "arguments, which this backend lacks; leave it out: on miles' FSDP backend the first "
            "scoring checks the routes"
        )
    layers = moe_layers(args)
    spec = RouteSpec(layers, args.num_experts, args.moe_router_topk, "error")
    for number, sample in enumerate(found):
        name = f"sample {number} of the rollout"
        if sample.rollout_routed_experts is None:
            _refuse_without_routes(sample, name)
        if getattr(sample, "remove_sample", False):
            continue
        ids = torch.as_tensor(sample.rollout_routed_experts)
        trace = trace_from(ids, layers=layers, depth=args.num_layers, num_experts=args.num_experts)
        if _status(sample) == "aborted" and len(trace) < len(sample.tokens) - 1:
            _refuse_without_routes(sample, name)
        check_path(trace, torch.tensor(sample.tokens), spec, name)


def _status(sample: Any) -> str:
    """Return slime's Sample.Status of a sample as text, "" if it has none."""
    return str(getattr(getattr(sample, "status", None), "value", ""))


def _refuse_without_routes(sample: Any, name: str) -> NoReturn:
    """Raise UsageError for a sample whose routes are missing, or cut where it was aborted."""
    if _status(sample) == "aborted":
        raise UsageError(
            f"{name}: its status is aborted, and it has no routes, or not of all its tokens. The "
            "server is not at fault. Leave the sample out of the rollout, or mask it out "
            "(remove_sample=True) and give it one row of zeros a slot"
        )
    raise UsageError(
        f"{name}: has no routes; start SGLang with --enable-return-routed-experts (it answers "
        "without them else), and let a custom conversion of samples copy rollout_routed_experts"
    )


def moe_layers(args: Any) -> tuple[int, ...]:
    """Return the decoder index of each MoE layer, from Megatron's --moe-layer-freq."""
    frequency = getattr(args, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        return tuple(range(0, args.num_layers, frequency))
    return tuple(layer for layer, is_moe in enumerate(frequency) if is_moe)


def _warn_of_versions(samples: Sequence[Any]) -> None:
    """Tell how many samples may pair old log-probabilities with routes of newer weights."""
    mixed = [s for s in samples if len(set(getattr(s, "weight_versions", None) or ())) > 1]
    if mixed:
        logging.getLogger(__name__).warning(
            "%d of %d samples were sampled under several versions of the weights. SGLang computes "
            "the routes of a retracted request again, with the newer weights, and returns them "
            "beside the older log-probabilities: pause generation in place, or read their "
            "mismatch/k3 with that in mind",
            len(mixed),
            len(samples),
        )


def _flat(samples: Sequence[Any]) -> Iterator[Any]:
    for entry in samples:
        if isinstance(entry, list | tuple):
            yield from _flat(entry)
        else:
            yield entry
