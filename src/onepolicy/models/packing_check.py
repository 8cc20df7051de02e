"""Comparison of a packed forward with samples alone; it names the first layer that differs.

Layers that carry a state or a convolution from token to token (linear attention, Mamba), and
attention kernels, must be told where samples begin. Many ignore it without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onepolicy.config import UsageError

LENGTHS = (70, 5, 33, 4)
"""Tokens of the samples: over and under the chunks of 64 in which kernels scan."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Mean difference of a sample's rows that passes, in standard deviations of all rows."""

Forward = Callable[[list[Tensor]], Tensor]
Seen = tuple[Tensor | None, Tensor]  # rows of a module's input and of its output


@dataclass(frozen=True, slots=True)
class PackingCheck:
    """The result of `check_packing`. It is true if packed samples are computed as alone."""

    difference: float  # of the worst sample's logits, in their standard deviations; NaN: `nan_in`
    layer: str  # name of the first module that differs; "" if none does
    samples: tuple[int, ...]  # whose rows differ in that module
    tolerance: float
    nan_in: tuple[str, ...] = ()  # of "alone" and "packed", those whose logits have a NaN

    def __bool__(self) -> bool:
        return self.difference < self.tolerance and not self.layer

    def __str__(self) -> str:
        if self.nan_in:
            where = f", first in {self.layer}" if self.layer else ""
            return (
                f"NaN in the logits of samples {' and '.join(self.nan_in)}{where}; none are equal"
            )
        size = f"{self.difference:.2g} standard deviations of the logits"
        if self:
            return f"packed samples are computed as they are alone (they differ by {size})"
        if not self.layer:
            return f"packed samples differ from samples alone by {size}; no module shows where"
        return (
            f"packed samples differ from samples alone by {size}, first in {self.layer} (samples "
            f"{', '.join(map(str, self.samples))} of {len(LENGTHS)}, counted from 0): it was not "
            "told where they begin, or ignores it"
        )


@torch.no_grad()
def check_packing(
    model: PreTrainedModel, forward: Forward | None = None, *, bounds: bool = True
) -> PackingCheck:
    """Compare a packed forward of four samples with forwards of each alone.

    Args:
        model: a causal LM with the kernels that it will train with, in eval mode.
        forward: returns logits [T, V] of samples' token ids, packed in one row, as your trainer
            computes them. By default the model is called with position ids that begin anew.
        bounds: the default forward also passes the bounds of samples, as transformers' collator of
            flattened samples does: `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`,
            `max_length_k`, `seq_idx`.

    Raises:
        UsageError: `forward` returns no logits of these samples.
    """
    vocabulary = model.config.get_text_config().vocab_size
    random = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(3 % vocabulary, vocabulary, (sum(LENGTHS),), generator=random, device="cpu")
    samples = list(ids.to(model.device).split(LENGTHS))
    call = forward or _default_forward(model, bounds=bounds)
    tolerance = TOLERANCE.get(model.dtype, TOLERANCE[torch.float32])
    alone: dict[str, list[Seen]] = {}
    for sample in samples:
        for name, seen in _run(model, call, [sample]).items():
            alone.setdefault(name, []).append(seen)
    packed = _run(model, call, samples)
    found = _compare(alone, packed, tolerance)
    if found.layer and found.difference < tolerance:
        # Rounding that lets a token take another expert is not another sample's doing.
        kept = found.samples[len(found.samples) == len(LENGTHS) :]  # not all: others are changed
        with _others_changed(model.get_submodule(found.layer), kept):
            changed = _run(model, call, samples)[found.layer][1]
        written = packed[found.layer][1]
        if not set(kept) & set(_differing(list(written.split(LENGTHS)), changed, tolerance)):
            return replace(found, layer="", samples=())
    return found


@contextmanager
def _others_changed(module: nn.Module, kept: tuple[int, ...]) -> Iterator[None]:
    """Reorder the features that the module reads of all samples but those that are kept."""
    others = torch.tensor([i not in kept for i in range(len(LENGTHS))], device="cpu")
    rows = others.repeat_interleave(torch.tensor(LENGTHS, device="cpu"))

    def reorder(value: Any) -> Any:
        if _rows([value], len(rows)) is None:
            return value
        features = value.dim() - 1 - (value.dim() > 2 and value.shape[0] == 1)
        return value.roll(1, -1).where(rows.to(value.device).view(-1, *[1] * features), value)

    def change(_: nn.Module, args: Any, arguments: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(reorder, args)), {name: reorder(x) for name, x in arguments.items()}

    handle = module.register_forward_pre_hook(change, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _default_forward(model: PreTrainedModel, *, bounds: bool) -> Forward:
    def forward(samples: list[Tensor]) -> Tensor:
        arguments: dict[str, Any] = {"use_cache": False}
        if len(samples) > 1:
            device, lengths = samples[0].device, [len(ids) for ids in samples]
            positions = [torch.arange(length, device=device) for length in lengths]
            arguments["position_ids"] = torch.cat(positions)[None]
            if bounds:
                arguments |= _bounds(lengths, device)
        logits: Tensor = model(input_ids=torch.cat(samples)[None], **arguments).logits[0]
        return logits

    return forward


def _bounds(lengths: list[int], device: torch.device) -> dict[str, Any]:
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    index = torch.arange(len(lengths), device=device).int()
    sample = index.repeat_interleave(torch.tensor(lengths, device=device))[None]
    longest = max(lengths)
    return {
        **{"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "seq_idx": sample},
        **{"max_length_q": longest, "max_length_k": longest},
    }


def _run(model: PreTrainedModel, call: Forward, samples: list[Tensor]) -> dict[str, Seen]:
    """Return the rows that modules read and wrote, in the order in which they ended.

    The logits are those of "".
    """
    seen: dict[str, Seen] = {}
    rows = sum(len(ids) for ids in samples)
    with _recording(model, rows, seen):
        logits = call(samples)
    if logits.shape[:-1] != (rows,):
        raise UsageError(
            f"forward: it returned logits of shape {list(logits.shape)}; expected [{rows}, V], the "
            "rows of the samples that it was given"
        )
    seen.pop("", None)
    seen[""] = None, logits.float()
    return seen


@contextmanager
def _recording(model: nn.Module, rows: int, seen: dict[str, Seen]) -> Iterator[None]:
    def recorder(name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: Any, arguments: dict[str, Any], output: Any) -> None:
            written = output
            if isinstance(output, Tensor):
                written = [output]
            out = _rows(written, rows)
            if out is not None:
                seen[name] = _rows([*args, *arguments.values()], rows), out

        return record

    handles = [
        module.register_forward_hook(recorder(name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rows(found: Any, rows: int) -> Tensor | None:
    """Return [rows, n] float32 of the first tensor that has a row for each token, if any has."""
    values = found.values() if isinstance(found, dict) else found
    for tensor in values if isinstance(values, list | tuple) else list(values or []):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        if tensor.dim() > 2 and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor.dim() > 1 and tensor.shape[0] == rows:
            return tensor.detach().float().flatten(1)
    return None


def _compare(
    alone: dict[str, list[Seen]], packed: dict[str, Seen], tolerance: float
) -> PackingCheck:
    first, samples = "", tuple[int, ...]()
    for name, (read, written) in packed.items():
        singles = alone.get(name, [])
        if len(singles) != len(LENGTHS) or not name:
            continue
        differing = _differing([out for _, out in singles], written, tolerance)
        inputs = [single for single, _ in singles]
        if not differing or read is None or any(single is None for single in inputs):
            continue
        if not _differing([x for x in inputs if x is not None], read, tolerance):
            first, samples = name, differing
            break
    logits, together = torch.cat([out for _, out in alone[""]]), packed[""][1]
    both = {"alone": logits, "packed": together}
    nan_in = tuple(name for name, values in both.items() if values.isnan().any())
    if logits.shape == together.shape:
        ruled_out = (logits == together) & logits.isinf()  # tokens that the head rules out
        logits, together = (values.masked_fill(ruled_out, 0) for values in both.values())
    worst = max(_differences(list(logits.split(LENGTHS)), together), key=_nan_is_largest)
    return PackingCheck(worst, first, samples, tolerance, nan_in)


def _nan_is_largest(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _differing(alone: list[Tensor], packed: Tensor, tolerance: float) -> tuple[int, ...]:
    """Return the samples whose rows differ."""
    if torch.cat(alone).shape != packed.shape:
        return ()
    differences = _differences(alone, packed)
    return tuple(i for i, found in enumerate(differences) if not found < tolerance)


def _differences(alone: list[Tensor], packed: Tensor) -> list[float]:
    """Return each sample's mean difference, in standard deviations of all rows alone."""
    scale = torch.cat(alone).std().clamp(min=1e-12)
    parts = zip(alone, packed.split(LENGTHS), strict=True)
    return [((one - other).abs().mean() / scale).item() for one, other in parts]
