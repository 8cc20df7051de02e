"""rollout.quant with vLLM: its own quantisation of weights while it loads them, at the start and at every sync.

vLLM keeps what its layers looked like before they were quantised, loads a sync's tensors into that, in the engine's
dtype, and quantises them again (its model_loader/reload/layerwise.py). Read in 0.30.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onepolicy.config import QuantFormat, Simulated, UsageError
from onepolicy.models.quant.size_report import (
    ROUTER_NAMES,
    PartSize,
    SizeReport,
    part_name,
    sum_by_part,
)
from onepolicy.replay.payloads.vllm import parse_version

OLDEST = (0, 30)
"""First version whose source was read for this."""
METHODS = {"fp8": "fp8_per_channel", "int8": "int8_per_channel_weight_only"}
"""rollout.quant.format -> vLLM's `quantization`."""
CODES = {"fp8": "torch.float8_e4m3fn", "int8": "torch.int8"}
MADE = {
    "fp8": {"experts", "shared experts", "attention", "mlp"},
    "int8": {"experts"},  # activations, attention and dense layers stay in bfloat16
}
"""Parts that vLLM quantises."""


def quantization_args(quant: QuantFormat | None) -> dict[str, Any]:
    """EngineArgs. Left to itself fp8_per_channel quantises routers too, where they are plain layers (Qwen3-MoE)."""
    if quant is None:
        return {}
    left = sorted(pattern for name in ROUTER_NAMES for pattern in (f"*.{name}", f"*.{name}.*"))
    ignored = {"quantization_config": {"ignore": left}} if quant.format == "fp8" else {}
    return {"quantization": METHODS[quant.format], **ignored}


def quantization_method(quant: QuantFormat | None) -> str | None:
    """What a vLLM engine's `quantization` must be."""
    return None if quant is None else METHODS[quant.format]


def check_quant_device(quant: QuantFormat | None, *, cpu: bool) -> None:
    """UsageError with the reason if vLLM cannot run the format on this device."""
    if quant is not None and cpu:
        raise UsageError(
            f"rollout.quant: {quant.format} with vLLM needs a GPU: its CPU build has no kernels that make e4m3 codes, "
            "and its int8 kernels for experts ask for AMX, zentorch or Arm (docs/quantised.md); use "
            "rollout.engine.kind = hf"
        )


def check_quant_version(quant: QuantFormat | None, version: str) -> None:
    if quant is not None and parse_version(version) < OLDEST:
        raise UsageError(
            f"rollout.quant: vllm {version} was not read for how it quantises at a sync; use 0.30"
        )


@contextmanager
def name_setting_in_errors(quant: QuantFormat | None) -> Iterator[None]:
    """What vLLM says when it has no kernel for a layer, as a UsageError that names the setting."""
    try:
        yield
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if quant is None or isinstance(error, UsageError):
            raise
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"rollout.quant: vLLM did not start with {METHODS[quant.format]}: {reason}"
        ) from error


def hf_equivalent(quant: QuantFormat) -> tuple[QuantFormat, bool]:
    """The same weights in the embedded engine's terms; True: of experts only."""
    return (Simulated(bits=8), True) if quant.format == "int8" else (quant, False)


@dataclass(frozen=True, slots=True)
class PartTensors:
    """Tensors of one part and dtype of a vLLM model, as its kernels read them. Sent as JSON."""

    part: str
    dtype: str
    weights: int  # elements of weights
    others: int  # elements of biases and norms
    nbytes: int  # scales included


def measure_part_tensors(model: nn.Module) -> list[dict[str, Any]]:
    """`Held`, as JSON, of every part and dtype of a worker's vLLM model."""
    found: dict[tuple[str, str], list[int]] = {}
    for name, tensor in model.named_parameters():
        numbers = found.setdefault((_part(name), str(tensor.dtype)), [0, 0, 0])
        last = name.rpartition(".")[2]
        if "scale" not in last:
            numbers[0 if tensor.ndim > 1 and last.endswith("weight") else 1] += tensor.numel()
        numbers[2] += tensor.nbytes
    return [
        {"part": part, "dtype": dtype, "weights": weights, "others": others, "nbytes": nbytes}
        for (part, dtype), (weights, others, nbytes) in found.items()
    ]


def _part(name: str) -> str:
    """Routed experts are w13_* and w2_*, of all experts in one tensor."""
    last, part = name.rpartition(".")[2], part_name(name)
    if last.startswith(("w13_", "w2_")):
        return "experts"
    return "shared experts" if part == "experts" else part


def part_sizes(quant: QuantFormat, held: Iterable[PartTensors], dtype: str) -> SizeReport:
    """What the parts take. dtype: the engine's. UsageError unless what the format stands for is really in codes: all of
    the experts, most of every other part (hybrids keep small convolutions), no router."""
    held = list(held)
    where, codes = f"rollout.quant: vLLM's {METHODS[quant.format]}", CODES[quant.format]
    made = [each for each in held if each.part in MADE[quant.format] and each.weights]
    if not made:
        raise UsageError(
            f"{where} quantises {', '.join(sorted(MADE[quant.format]))}, which this model does not have"
        )
    for each in made:
        most = (
            0
            if each.part == "experts"
            else sum(m.weights for m in made if (m.part, m.dtype) == (each.part, codes))
        )
        if each.dtype != codes and each.weights > most:
            raise UsageError(
                f"{where} left {each.weights:,} weights of {each.part} in {each.dtype}; use hf"
            )
    if any(each.part == "router" and each.dtype == codes for each in held):
        raise UsageError(
            f"{where} quantised routers, which should keep their dtype; start a server with `onepolicy engine serve "
            f"MODEL quant={quant.format}`, or use rollout.engine.kind = hf"
        )
    itemsize = getattr(torch, dtype).itemsize
    parts = [
        PartSize(
            each.part,
            each.weights + each.others,
            (each.weights + each.others) * itemsize,
            each.nbytes,
        )
        for each in held
    ]
    return SizeReport(quant, sum_by_part(parts), METHODS[quant.format])
