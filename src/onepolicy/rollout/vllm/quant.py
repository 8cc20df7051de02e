"""rollout.quant with vLLM, which quantises weights while it loads them, at every sync too.

vLLM keeps the layouts of its layers before quantisation, loads a sync's tensors into them, in the
engine's dtype, and quantises them again (its model_loader/reload/layerwise.py). Read in 0.30.0.
"""

from __future__ import annotations

from collections import Counter
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
CODE_DTYPES = {"fp8": "torch.float8_e4m3fn", "int8": "torch.int8"}
QUANTISED_PARTS = {
    "fp8": {"experts", "shared experts", "attention", "mlp"},
    "int8": {"experts"},  # activations, attention and dense layers stay in bfloat16
}
"""Parts that vLLM quantises."""


def quantization_args(quant: QuantFormat | None) -> dict[str, Any]:
    """Return the EngineArgs of the format.

    By default fp8_per_channel also quantises routers that are plain layers (Qwen3-MoE).
    """
    if quant is None:
        return {}
    arguments: dict[str, Any] = {"quantization": METHODS[quant.format]}
    if quant.format == "fp8":
        routers = sorted(f"*.{name}{end}" for name in ROUTER_NAMES for end in ("", ".*"))
        arguments["quantization_config"] = {"ignore": routers}
    return arguments


def quantization_method(quant: QuantFormat | None) -> str | None:
    """Return the `quantization` that a vLLM engine needs."""
    if quant is None:
        return None
    return METHODS[quant.format]


def check_quant_device(quant: QuantFormat | None, *, cpu: bool) -> None:
    """Raise UsageError if vLLM cannot run the format on this device."""
    if quant is not None and cpu:
        raise UsageError(
            f"rollout.quant: {quant.format} with vLLM needs a GPU: its CPU build has no kernels "
            "that make e4m3 codes, and its int8 kernels for experts ask for AMX, zentorch or Arm "
            "(docs/engines.md); use rollout.engine.kind = hf"
        )


def check_quant_version(quant: QuantFormat | None, version: str) -> None:
    if quant is not None and parse_version(version) < OLDEST:
        raise UsageError(
            f"rollout.quant: vllm {version} was not read for its quantisation at a sync; use 0.30"
        )


@contextmanager
def name_setting_in_errors(quant: QuantFormat | None) -> Iterator[None]:
    """Turn vLLM's error about a missing kernel into a UsageError that names rollout.quant."""
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
    """Return the embedded engine's format with the same weights, and whether of experts only."""
    if quant.format == "int8":
        return Simulated(bits=8), True
    return quant, False


@dataclass(frozen=True, slots=True)
class PartTensors:
    """The tensors of one part and dtype of a vLLM model, in its kernels' layout. Sent as JSON."""

    part: str
    dtype: str
    weights: int  # elements of weights
    others: int  # elements of biases and norms
    nbytes: int  # scales included


def measure_part_tensors(model: nn.Module) -> list[dict[str, Any]]:
    """Return `PartTensors`, as JSON, of every part and dtype of a worker's vLLM model."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for name, tensor in model.named_parameters():
        counts = found.setdefault((_part_name(name), str(tensor.dtype)), Counter())
        counts["nbytes"] += tensor.nbytes
        last = name.rpartition(".")[2]
        if "scale" in last:
            continue
        if tensor.ndim > 1 and last.endswith("weight"):
            counts["weights"] += tensor.numel()
        else:
            counts["others"] += tensor.numel()
    return [
        {
            "part": part,
            "dtype": dtype,
            "weights": counts["weights"],
            "others": counts["others"],
            "nbytes": counts["nbytes"],
        }
        for (part, dtype), counts in found.items()
    ]


def _part_name(name: str) -> str:
    """Return a parameter's part.

    Routed experts are w13_* and w2_*, with all experts in one tensor.
    """
    last, part = name.rpartition(".")[2], part_name(name)
    if last.startswith(("w13_", "w2_")):
        return "experts"
    if part == "experts":
        return "shared experts"
    return part


def part_sizes(quant: QuantFormat, tensors: Iterable[PartTensors], dtype: str) -> SizeReport:
    """Return the sizes of the model's parts. dtype: the engine's.

    Raises UsageError unless vLLM quantised all experts, most of every other part of the format
    (hybrids keep small convolutions), and no router.
    """
    tensors = list(tensors)
    _check_quantised(quant, tensors)
    itemsize = getattr(torch, dtype).itemsize
    parts = []
    for each in tensors:
        elements = each.weights + each.others
        parts.append(PartSize(each.part, elements, elements * itemsize, each.nbytes))
    return SizeReport(quant, sum_by_part(parts), METHODS[quant.format])


def _check_quantised(quant: QuantFormat, tensors: list[PartTensors]) -> None:
    where, code = f"rollout.quant: vLLM's {METHODS[quant.format]}", CODE_DTYPES[quant.format]
    expected = QUANTISED_PARTS[quant.format]
    weights = [each for each in tensors if each.part in expected and each.weights]
    if not weights:
        raise UsageError(
            f"{where} quantises {', '.join(sorted(expected))}, which this model does not have"
        )
    for each in weights:
        allowed = 0  # weights that may stay in another dtype
        if each.part != "experts":
            allowed = sum(w.weights for w in weights if (w.part, w.dtype) == (each.part, code))
        if each.dtype != code and each.weights > allowed:
            raise UsageError(
                f"{where} left {each.weights:,} weights of {each.part} in {each.dtype}; use hf"
            )
    if any(each.part == "router" and each.dtype == code for each in tensors):
        raise UsageError(
            f"{where} quantised routers, which should keep their dtype; start a server with "
            f"`onepolicy engine serve MODEL quant={quant.format}`, or use rollout.engine.kind = hf"
        )
