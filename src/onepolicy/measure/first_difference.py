"""The first module whose numbers differ between two forwards with different log-probabilities.

The trainer scores the sample's micro-batch again with hooks on every module that has parameters.
Then the engine serves the same requests again, so that its batches are the ones that gave the
difference. Hooks compare the rows of the sample's tokens whenever the engine feeds one of them, or
the same token after the same prefix in another sample of the group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onepolicy.build.measure import MeasureComponents
from onepolicy.measure.engine_noise import common_prefix, sample
from onepolicy.rollout.hf.continuous_batch import ContinuousBatch
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import TokenBatch

Event = tuple[str, str, int]  # module name; "input" or "output"; index of the tensor


@dataclass(frozen=True, slots=True)
class Difference:
    """The first number that differs."""

    slot: int  # of the sample; keys and values may differ at an earlier one
    layer: int | None
    operator: str
    largest: float  # |trainer - engine| among the numbers of this slot


async def first_difference(
    parts: MeasureComponents, scorer: PolicyScorer, batch: TokenBatch, number: int
) -> Difference | None:
    """Return the first difference in sample `number` of the scored batch.

    None if no number differs this time.
    """
    engine = parts.engine
    assert isinstance(engine, HFEngine)
    expected = _trainer_numbers(scorer, batch, number)
    bounds = batch.cu_seqlens.tolist()
    slots = slice(bounds[number], bounds[number + 1])
    path = torch.cat([batch.input_ids[slots], batch.target_ids[slots][-1:]])
    comparison = EngineComparison(expected, path)
    await engine.reset_cache()
    with comparison.watch(engine):
        await sample(parts)
    return comparison.first_difference(dict(scorer.model.named_modules()))


def _trainer_numbers(
    scorer: PolicyScorer, batch: TokenBatch, number: int
) -> dict[Event, dict[int, Tensor]]:
    """Return inputs and outputs of every module with parameters, by slot of the sample.

    They are in the order of the forward.
    """
    chosen = next(c for c in scorer.micro_batches(batch) if number in c)
    micro = batch.select(chosen)
    start, stop = micro.cu_seqlens.tolist()[chosen.index(number) :][:2]
    found: dict[Event, dict[int, Tensor]] = {}

    def record(event: Event, tensor: Tensor, rows: dict[int, int]) -> None:
        numbers = {slot: tensor[row].detach().cpu().clone() for row, slot in rows.items()}
        found.setdefault(event, {}).update(numbers)

    shared = scorer.batcher.micro_batch(micro, list(range(micro.num_samples))).shared
    total, row_of = micro.num_slots, torch.arange(micro.num_slots)
    if shared is not None:
        total, row_of = len(shared.slots), shared.row_of
    slots = {row: slot for slot, row in enumerate(row_of[start:stop].tolist())}
    rows = SampleRows(total, slots, row_of[micro.trainable].tolist())
    with _hooks(scorer.model, lambda: rows, record):
        scorer.score(micro, replay=False)
    return found


@dataclass(slots=True)
class SampleRows:
    """Rows of one forward that are slots of the sample."""

    total: int  # rows of the forward
    slots: dict[int, int]  # row -> slot
    kept: list[int] | None = None  # rows that reach the vocabulary projection; None: all

    def in_tensor(self, size: int) -> dict[int, int]:
        """Return row -> slot of a tensor with `size` rows; empty if its rows are not tokens."""
        if size == self.total:
            return self.slots
        if self.kept is None or size != len(self.kept):
            return {}
        return {i: self.slots[row] for i, row in enumerate(self.kept) if row in self.slots}


class EngineComparison:
    """Compares the engine's numbers with the trainer's while the engine samples."""

    def __init__(self, expected: dict[Event, dict[int, Tensor]], path: Tensor) -> None:
        self.expected, self.path = expected, path
        self.order = {event: i for i, event in enumerate(expected)}
        self.found: dict[
            tuple[int, int], float
        ] = {}  # (slot, place in order) -> largest difference
        self._rows = SampleRows(0, {})

    @contextmanager
    def watch(self, engine: HFEngine) -> Iterator[None]:
        """Compare every forward of the engine inside the context."""
        batch = engine.batch
        assert isinstance(batch, ContinuousBatch)

        def locate(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            step, kept = kwargs["kv_cache_step"], kwargs["logits_to_keep"]
            rows, positions = step.rows.tolist(), step.positions.tolist()
            shared = {
                row: common_prefix(batch.rows.tokens[row].cpu(), self.path) for row in set(rows)
            }
            slots = {
                i: position
                for i, (row, position) in enumerate(zip(rows, positions, strict=True))
                if position < min(shared[row], len(self.path) - 1)
            }
            kept_rows = None
            if isinstance(kept, Tensor):
                kept_rows = kept.tolist()
            self._rows = SampleRows(len(rows), slots, kept_rows)

        first = engine.model.register_forward_pre_hook(locate, with_kwargs=True, prepend=True)
        with first, _hooks(engine.model, lambda: self._rows, self._compare):
            yield

    def _compare(self, event: Event, tensor: Tensor, rows: dict[int, int]) -> None:
        for row, slot in rows.items():
            trainer, engine = self.expected.get(event, {}).get(slot), tensor[row].detach().cpu()
            if trainer is None or trainer.shape != engine.shape or torch.equal(trainer, engine):
                continue
            key, largest = (
                (slot, self.order[event]),
                (trainer.double() - engine.double()).abs().max(),
            )
            self.found[key] = max(self.found.get(key, 0.0), float(largest))

    def first_difference(self, modules: dict[str, nn.Module]) -> Difference | None:
        """Return the difference at the first slot, in the first module of the forward."""
        if not self.found:
            return None
        slot, place = min(self.found)
        name, side, _ = list(self.order)[place]
        attention = re.match(r"(.*self_attn)\.", name)
        if side == "output":
            operator = f"{name} ({type(modules[name]).__name__})"
        elif attention:
            operator = f"rotary embedding or attention function of {attention[1]}"
        else:
            before = "the embedding"
            if place:
                before = list(self.order)[place - 1][0]
            operator = f"the computation between {before} and {name}"
        number, layer = re.search(r"layers\.(\d+)\.", name), None
        if number:
            layer = int(number[1])
        return Difference(slot, layer, operator, self.found[slot, place])


@contextmanager
def _hooks(
    model: nn.Module,
    sample_rows: Callable[[], SampleRows],
    record: Callable[[Event, Tensor, dict[int, int]], None],
) -> Iterator[None]:
    """Call `record` with inputs and outputs of every module with parameters inside the context.

    Its last argument maps rows of the tensor to slots of the sample.
    """

    def visit(name: str, side: str, values: Any) -> None:
        for i, tensor in enumerate(_tensors(values)):
            if tensor.dim() > 1 and tensor.shape[0] == 1:
                tensor = tensor[0]
            if not tensor.dim():
                continue
            rows = sample_rows().in_tensor(len(tensor))
            if rows:
                record((name, side, i), tensor, rows)

    def before(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        visit(name, "input", (*args, *kwargs.values()))

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        visit(name, "output", output)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                take, give = partial(before, name), partial(after, name)
                stack.enter_context(module.register_forward_pre_hook(take, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(give))
        yield


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, tuple | list):
        return [tensor for value in values for tensor in _tensors(value)]
    return []
