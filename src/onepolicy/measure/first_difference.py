"""Where two forwards part: the first module whose numbers differ on the way to a log-probability that differs.

The trainer scores the sample's micro-batch once more with hooks on every module that has parameters. Then the engine
plays the same requests again, so that its batches are those that gave the difference, with hooks that compare the rows
of the sample's tokens, whenever one of them (or the same token after the same path, in a sibling) is fed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onepolicy.build.components import MeasureComponents
from onepolicy.measure.engine_noise import common_prefix, sample
from onepolicy.rollout.hf.continuous_batch import ContinuousBatch
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import TokenBatch

Event = tuple[str, str, int]  # module name; "input" or "output"; which of them


@dataclass(frozen=True, slots=True)
class Difference:
    slot: int  # of the sample: an earlier one may be where keys and values part
    layer: int | None
    operator: str
    largest: float  # |trainer - engine| among its numbers of this slot


async def first_difference(
    parts: MeasureComponents, scorer: PolicyScorer, batch: TokenBatch, number: int
) -> Difference | None:
    """Of sample `number` of the scored batch. None: this time nothing on the way differs."""
    engine = parts.engine
    assert isinstance(engine, HFEngine)
    expected = _of_trainer(scorer, batch, number)
    bounds = batch.cu_seqlens.tolist()
    here = slice(bounds[number], bounds[number + 1])
    path = torch.cat([batch.input_ids[here], batch.target_ids[here][-1:]])
    found = Compared(expected, path)
    await engine.reset_cache()
    with found.watching(engine):
        await sample(parts)
    return found.first(dict(scorer.model.named_modules()))


def _of_trainer(
    scorer: PolicyScorer, batch: TokenBatch, number: int
) -> dict[Event, dict[int, Tensor]]:
    """What every module with parameters got and gave at each of the sample's slots, in the order of the forward."""
    chosen = next(c for c in scorer.micro_batches(batch) if number in c)
    micro = batch.select(chosen)
    start, stop = micro.cu_seqlens.tolist()[chosen.index(number) :][:2]
    found: dict[Event, dict[int, Tensor]] = {}

    def keep(event: Event, tensor: Tensor, rows: dict[int, int]) -> None:
        found.setdefault(event, {}).update(
            {slot: tensor[row].detach().cpu().clone() for row, slot in rows.items()}
        )

    places = Places(total=micro.num_slots, slots={row: row - start for row in range(start, stop)})
    places.kept = micro.trainable.nonzero()[:, 0].tolist()
    with _hooks(scorer.model, lambda: places, keep):
        scorer.score(micro, replay=False)
    return found


@dataclass(slots=True)
class Places:
    """Of one forward: its rows, which of them are slots of the sample, which reach the vocabulary projection."""

    total: int
    slots: dict[int, int]  # row -> slot
    kept: list[int] | None = None  # rows of the logits; None: all

    def of(self, size: int) -> dict[int, int]:
        """row -> slot of a tensor with `size` rows; empty if its rows are not tokens."""
        if size == self.total:
            return self.slots
        if self.kept is None or size != len(self.kept):
            return {}
        return {i: self.slots[row] for i, row in enumerate(self.kept) if row in self.slots}


class Compared:
    """The engine's numbers against the trainer's, while it plays."""

    def __init__(self, expected: dict[Event, dict[int, Tensor]], path: Tensor) -> None:
        self.expected, self.path = expected, path
        self.order = {event: i for i, event in enumerate(expected)}
        self.found: dict[
            tuple[int, int], float
        ] = {}  # (slot, place in the order) -> largest difference
        self._places = Places(0, {})

    @contextmanager
    def watching(self, engine: HFEngine) -> Iterator[None]:
        batch = engine.batch
        assert isinstance(batch, ContinuousBatch)

        def locate(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            step, kept = kwargs["kv_cache_step"], kwargs["logits_to_keep"]
            rows, positions = step.rows.tolist(), step.positions.tolist()
            shared = {
                row: common_prefix(batch.rows.tokens[row].cpu(), self.path) for row in set(rows)
            }
            own = {
                i: at
                for i, (row, at) in enumerate(zip(rows, positions, strict=True))
                if at < shared[row]
            }
            own = {i: at for i, at in own.items() if at < len(self.path) - 1}
            self._places = Places(
                len(rows), own, kept.tolist() if isinstance(kept, Tensor) else None
            )

        first = engine.model.register_forward_pre_hook(locate, with_kwargs=True, prepend=True)
        with first, _hooks(engine.model, lambda: self._places, self._compare):
            yield

    def _compare(self, event: Event, tensor: Tensor, rows: dict[int, int]) -> None:
        for row, slot in rows.items():
            ours, other = self.expected.get(event, {}).get(slot), tensor[row].detach().cpu()
            if ours is not None and ours.shape == other.shape and not torch.equal(ours, other):
                key = slot, self.order[event]
                self.found[key] = max(
                    self.found.get(key, 0.0), float((ours.double() - other.double()).abs().max())
                )

    def first(self, modules: dict[str, nn.Module]) -> Difference | None:
        if not self.found:
            return None
        slot, place = min(self.found)
        name, side, _ = list(self.order)[place]
        kind = type(modules[name]).__name__
        before = "the embedding" if not place else list(self.order)[place - 1][0]
        operator = (
            f"{name} ({kind})"
            if side == "output"
            else f"what is computed between {before} and {name}"
        )
        if side == "input" and (attention := re.match(r"(.*self_attn)\.", name)):
            operator = f"rotary embedding or attention function of {attention[1]}"
        layer = re.search(r"layers\.(\d+)\.", name)
        return Difference(slot, int(layer[1]) if layer else None, operator, self.found[slot, place])


@contextmanager
def _hooks(
    model: nn.Module,
    places: Callable[[], Places],
    see: Callable[[Event, Tensor, dict[int, int]], None],
) -> Iterator[None]:
    """While held, `see` gets what every module with parameters takes and gives, with the rows that are the sample's."""

    def tell(name: str, side: str, values: Any) -> None:
        for i, tensor in enumerate(_tensors(values)):
            if tensor.dim() > 1 and tensor.shape[0] == 1:
                tensor = tensor[0]
            if tensor.dim() and (rows := places().of(len(tensor))):
                see((name, side, i), tensor, rows)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                before = lambda m, args, kwargs, n=name: tell(n, "input", (*args, *kwargs.values()))  # noqa: E731
                after = lambda m, args, output, n=name: tell(n, "output", output)  # noqa: E731
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after).remove)
        yield


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return (
        [t for value in values for t in _tensors(value)] if isinstance(values, tuple | list) else []
    )
