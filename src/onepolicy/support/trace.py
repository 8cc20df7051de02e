"""The noun of this room: which tokens top-k, top-p or min-p left for each slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onepolicy.errors import UsageError, describe_argument


class KeptSet(NamedTuple):
    """The set of one slot: numpy's arrays, of which thousands are made a step."""

    ids: np.ndarray  # [size] int32, ascending
    logp: np.ndarray | None = None  # [size] float32, the engine's, if it was asked for them


def kept_sets(kept: Tensor, logp: Tensor | None = None) -> list[KeptSet]:
    """Return the set of every row of a mask. kept: [B, V] bool. logp: [B, V] float32."""
    rows, vocabulary = kept.shape
    flat = np.flatnonzero(kept.cpu().numpy())
    ids = (flat % vocabulary).astype(np.int32)
    ends = np.searchsorted(flat, np.arange(1, rows + 1) * vocabulary).tolist()
    values = None
    if logp is not None:
        values = logp.cpu().numpy().reshape(-1)[flat]
    return _split(ids, values, ends)


def _split(ids: np.ndarray, logp: np.ndarray | None, ends: list[int]) -> list[KeptSet]:
    """Return the sets that end before these places."""
    bounds = pairwise([0, *ends])
    if logp is None:
        return [KeptSet(ids[a:b]) for a, b in bounds]
    return [KeptSet(ids[a:b], logp[a:b]) for a, b in bounds]


@dataclass(frozen=True, slots=True, eq=False)
class SupportTrace:
    """The tokens that each slot's token was drawn from, in compressed rows.

    Slot t has the ids `ids[offsets[t] : offsets[t + 1]]`. A set has its sampled token, so it is
    never empty: an empty one was not captured. Two traces are equal if all their tensors are.
    Raises UsageError if the fields do not fit together.
    """

    ids: Tensor  # [n] int32, the sets of all slots, one after the other, each ascending
    offsets: Tensor  # [T + 1] int64
    logp: Tensor | None = None  # [n] float32, the engine's log-probabilities over the set

    def __post_init__(self) -> None:
        kinds = {"ids": torch.int32, "offsets": torch.int64}
        for name, dtype in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, Tensor) or value.dtype != dtype or value.dim() != 1:
                raise UsageError(
                    f"SupportTrace.{name} is {describe_argument(value)}, expected {dtype} of one "
                    "dimension; SupportTrace.from_sets makes a trace from lists of token ids"
                )
        if not len(self.offsets):
            raise UsageError("SupportTrace.offsets is empty; T slots have T + 1 offsets")
        if self.logp is not None and self.logp.shape != self.ids.shape:
            raise UsageError(
                f"SupportTrace.logp is {describe_argument(self.logp)}, but there are "
                f"{len(self.ids)} ids"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SupportTrace):
            return NotImplemented
        same = torch.equal(self.offsets, other.offsets) and torch.equal(self.ids, other.ids)
        if self.logp is None or other.logp is None:
            return same and self.logp is other.logp
        return same and torch.equal(self.logp, other.logp)

    def __hash__(self) -> int:
        return hash((len(self), len(self.ids)))

    @property
    def sizes(self) -> Tensor:
        """[T] int64: tokens of each set, 0 where it was not captured."""
        return self.offsets.diff()

    @property
    def captured(self) -> Tensor:
        """[T] bool."""
        return self.sizes > 0

    @property
    def slot_of(self) -> Tensor:
        """[n] int64: the slot of each id."""
        slots = torch.arange(len(self), device=self.ids.device)
        return slots.repeat_interleave(self.sizes, output_size=len(self.ids))

    def to(self, device: torch.device | str) -> SupportTrace:
        moved = {name: value.to(device) for name, value in self._tensors()}
        return dataclasses.replace(self, **moved)

    def _tensors(self) -> list[tuple[str, Any]]:
        fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [(name, value) for name, value in fields if value is not None]

    def at(self, slots: Tensor | slice) -> SupportTrace:
        """Return the sets of `slots` (index [m] int64 or slice), in this order."""
        if isinstance(slots, slice):
            slots = torch.arange(len(self), device=self.ids.device)[slots]
        sizes = self.sizes[slots]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        first = self.offsets[slots] - offsets[:-1]
        total = int(offsets[-1])
        index = torch.arange(total, device=self.ids.device)
        index += first.repeat_interleave(sizes, output_size=total)
        logp = None if self.logp is None else self.logp[index]
        return SupportTrace(self.ids[index], offsets, logp)

    def check_values(self, vocabulary: int) -> None:
        """Raise UsageError for wrong offsets, wrong ids, and values that are not finite.

        The ids of a set ascend, inside the vocabulary.
        """
        ends = self.offsets
        if int(ends[0]) or int(ends[-1]) != len(self.ids) or bool((ends.diff() < 0).any()):
            raise UsageError(
                f"SupportTrace.offsets: expected numbers that rise from 0 to {len(self.ids)}"
            )
        if len(self.ids) and (int(self.ids.min()) < 0 or int(self.ids.max()) >= vocabulary):
            raise UsageError(
                f"SupportTrace.ids: {int(self.ids.min())} to {int(self.ids.max())}, but the "
                f"model's tokens are 0..{vocabulary - 1}; is it another vocabulary?"
            )
        slots = self.slot_of
        falls = (self.ids.diff() <= 0) & (slots.diff() == 0)
        if bool(falls.any()):
            place = int(falls.nonzero()[0, 0])
            raise UsageError(
                f"SupportTrace.ids: {int(self.ids[place + 1])} stands after "
                f"{int(self.ids[place])} in the set of slot {int(slots[place])}; ids of a set "
                "ascend: make the trace by from_sets, from_counts or from_padded, which sort"
            )
        if self.logp is not None and not bool(self.logp.isfinite().all()):
            place = int((~self.logp.isfinite()).nonzero()[0, 0])
            raise UsageError(
                f"SupportTrace.logp: {float(self.logp[place])} of token {int(self.ids[place])}, in "
                f"the set of slot {int(slots[place])}; expected finite log-probabilities"
            )

    def contains(self, tokens: Tensor) -> Tensor:
        """Return [T] bool: whether the slot's set has its token. tokens: [T] integer."""
        slots = self.slot_of
        found = torch.zeros(len(self), dtype=torch.bool, device=self.ids.device)
        return found.index_put((slots[self.ids == tokens[slots]],), found.new_ones(()))

    def split(self) -> list[KeptSet]:
        """Return the set of every slot, as views where the trace is on a CPU."""
        values = None if self.logp is None else self.logp.detach().float().cpu().numpy()
        return _split(self.ids.cpu().numpy(), values, self.offsets[1:].tolist())

    def without_logp(self) -> SupportTrace:
        """Return the sets without the engine's log-probabilities."""
        return dataclasses.replace(self, logp=None)

    def as_sets(self) -> list[list[int]]:
        """Return the ids of every slot, an empty list where the set was not captured."""
        return [part.ids.tolist() for part in self.split()]

    @classmethod
    def missing(cls, slots: int) -> SupportTrace:
        """Return the trace of slots whose sets were not captured."""
        return cls(torch.empty(0, dtype=torch.int32), torch.zeros(slots + 1, dtype=torch.int64))

    @classmethod
    def join(cls, parts: Sequence[KeptSet]) -> SupportTrace:
        """Return the trace of one set a slot. `split` backwards.

        Values stay if every captured set has them.
        """
        ids = [part.ids for part in parts]
        sizes = np.array([0, *map(len, ids)])
        filled = [part for part in parts if len(part.ids)]
        values = [part.logp for part in filled if part.logp is not None]
        logp = None
        if values and len(values) == len(filled):
            logp = torch.from_numpy(np.concatenate(values))
        joined = np.concatenate([*ids, np.empty(0, np.int32)])
        return cls(torch.from_numpy(joined), torch.from_numpy(sizes.cumsum()), logp)

    @classmethod
    def concat(cls, traces: Sequence[SupportTrace]) -> SupportTrace:
        """Return the slots of all traces, one trace after the other.

        Values stay if every trace with a captured set has them. Raises UsageError for no trace.
        """
        if not traces:
            raise UsageError("SupportTrace.concat: no traces; give at least one")
        sizes = torch.cat([trace.sizes for trace in traces])
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        filled = [trace for trace in traces if len(trace.ids)]
        values = [trace.logp for trace in filled if trace.logp is not None]
        logp = torch.cat(values) if values and len(values) == len(filled) else None
        return cls(torch.cat([trace.ids for trace in traces]), offsets, logp)

    @classmethod
    def from_sets(
        cls, sets: Iterable[Sequence[int]], logp: Iterable[Sequence[float]] | None = None
    ) -> SupportTrace:
        """Make a trace from the ids of every slot, in any order. An empty one: not captured.

        logp: the engine's log-probabilities of the same ids. Raises UsageError.
        """
        rows = [torch.as_tensor(list(each), dtype=torch.int64) for each in sets]
        values = None
        if logp is not None:
            values = [torch.as_tensor(list(each), dtype=torch.float32) for each in logp]
            for slot, (ids, own) in enumerate(zip_longest(rows, values, fillvalue=())):
                if len(ids) != len(own):
                    raise UsageError(
                        f"slot {slot} has {len(ids)} token ids and {len(own)} log-probabilities"
                    )
        counts = torch.tensor([len(ids) for ids in rows], dtype=torch.int64)
        empty = torch.empty(0)
        joined = None if values is None else torch.cat([*values, empty])
        return cls.from_counts(torch.cat([*rows, empty.long()]), counts, logp=joined)

    @classmethod
    def from_counts(
        cls, ids: Tensor, counts: Tensor, *, logp: Tensor | None = None
    ) -> SupportTrace:
        """Make a trace from joined ids and the number of ids of every slot (prime-rl, vLLM).

        ids: [n] integer, in any order within a slot. counts: [T] integer, 0: not captured.
        Raises UsageError for ids that are negative or twice in a set.
        """
        if int(counts.sum()) != len(ids) or (counts < 0).any():
            raise UsageError(
                f"SupportTrace: {len(ids)} ids, but the counts of {len(counts)} slots add up to "
                f"{int(counts.sum())}"
            )
        _check_shape(ids, logp)
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) > torch.iinfo(torch.int32).max):
            raise UsageError(
                f"SupportTrace: token ids {int(ids.min())} to {int(ids.max())}; a token id is 0 "
                "or more and fits 32 bits (fill with from_padded)"
            )
        counts = counts.long()
        slots = torch.arange(len(counts), device=ids.device)
        slots = slots.repeat_interleave(counts, output_size=len(ids))
        order = (slots << 32 | ids.long()).argsort()  # ids within a slot
        ids, slots = ids[order], slots[order]
        twice = (ids[1:] == ids[:-1]) & (slots[1:] == slots[:-1])
        if twice.any():
            place = int(twice.nonzero()[0, 0])
            raise UsageError(
                f"SupportTrace: slot {int(slots[place])} has token {int(ids[place])} twice; a set "
                "has each token once"
            )
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        values = None if logp is None else logp[order].float()
        return cls(ids.int(), offsets, values)

    @classmethod
    def from_padded(
        cls, ids: Tensor, *, fill: int = -1, logp: Tensor | None = None
    ) -> SupportTrace:
        """Make a trace from dense rows (SkyRL). A row of only `fill` was not captured.

        ids: [T, K] integer, `fill` where a set has fewer. logp: [T, K] of the same tokens.
        """
        _check_shape(ids, logp)
        kept = ids != fill
        values = None if logp is None else logp[kept]
        return cls.from_counts(ids[kept], kept.sum(-1), logp=values)

    @classmethod
    def from_logp(cls, ids: Tensor, logp: Tensor) -> SupportTrace:
        """Make a trace from an engine's likeliest tokens after top-k, top-p and min-p.

        ids: [T, K] integer. logp: [T, K] float, -inf outside the support: vLLM's
        `logprobs_mode="processed_logprobs"`. Raises UsageError where K may have cut a set: the
        probabilities of a whole set add up to 1.
        """
        _check_shape(ids, logp)
        kept = ~logp.isneginf()
        trace = cls.from_counts(ids[kept], kept.sum(-1), logp=logp[kept])
        total = logp.double().exp().masked_fill(~kept, 0.0).sum(-1)
        short = kept.any(-1) & ~((total - 1).abs() <= TOTAL_TOLERANCE)  # a NaN too
        if short.any():
            slot = int(short.nonzero()[0, 0])
            raise UsageError(
                f"SupportTrace: the {int(kept[slot].sum())} tokens of slot {slot} have a "
                f"probability of {float(total[slot]):.6f} together, so this is not the whole set: "
                "ask the engine for more log-probabilities (top_k and a few more for ties), after "
                "top_k and top_p"
            )
        return trace

    @classmethod
    def from_mask(cls, kept: Tensor, logp: Tensor | None = None) -> SupportTrace:
        """Make a trace from a mask over the vocabulary. kept: [T, V] bool. logp: [T, V]."""
        return cls.join(kept_sets(kept, logp)).to(kept.device)


def _check_shape(ids: Tensor, logp: Tensor | None) -> None:
    if logp is not None and logp.shape != ids.shape:
        raise UsageError(
            f"SupportTrace: ids of shape {list(ids.shape)}, log-probabilities of "
            f"{list(logp.shape)}; give one of each id"
        )


def likeliest_needed(top_k: int) -> int:
    """Return how many likeliest tokens are the whole support of top_k, with room for ties.

    top_k keeps all tokens that tie with its last one, and logits of bfloat16 have few values.
    """
    return 2 * top_k + 16


TOTAL_TOLERANCE = 2e-5
"""Largest distance from 1 of the probabilities of a whole set: float32 was within 3e-7."""
