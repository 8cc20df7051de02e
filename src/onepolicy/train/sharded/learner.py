"""The driver: rank 0, which hands every rank its samples and adds up what they find.

Everything per slot that needs more than one sample (shares, the check of the routes, metrics) happens here, on the
whole batch. A rank is sent its own samples with their routes and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import R2, TrainingError
from onepolicy.sync.messages import read_as
from onepolicy.train.checks import check_batch, check_routes
from onepolicy.train.learner import LocalLearner
from onepolicy.train.sharded.divide import Part, divide
from onepolicy.train.sharded.export import export
from onepolicy.train.sharded.rank import NATIVE, SCORED, RankLearner, Updated, live_of
from onepolicy.train.sharded.team import Team
from onepolicy.train.sharded.wire import Message, batch_message
from onepolicy.types import RoutingTrace, TokenBatch


class RankedLearner(RankLearner):
    """The Learner of a run on several ranks."""

    def __init__(self, *args: Any, team: Team, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.team = team

    def score(self, batch: TokenBatch) -> TokenBatch:
        check_batch(batch, self.config.replay, self.model.config.get_text_config().vocab_size)
        scored = self._score_on_ranks("score", batch)
        return check_routes(scored, self.config.replay, self.version) if self.config.scores_old else scored

    def score_again(self, batch: TokenBatch) -> TokenBatch:
        return check_routes(self._score_on_ranks("again", batch), self.config.replay, self.version)

    def score_without_replay(self, batch: TokenBatch) -> TokenBatch:
        return self._score_on_ranks("native", batch)

    def step(self, batch: TokenBatch) -> dict[str, float]:
        sums: Counter[str] = Counter()
        self.seen = seen = None
        self._forward_seconds, seconds, norms = 0.0, 0.0, []
        for index, whole in enumerate(self._mini_steps(batch)):
            parts = self._divide(_for_update(whole, native=isinstance(self.config.replay, R2)))
            about = {"mini_step": index, "slots": whole.num_trainable, "version": self.version}
            answers = self._everywhere("optimise", parts, about)
            told = [read_as(Updated, answer.header, "a rank's answer") for answer in answers]
            norms.append(told[0]["norm"])
            for answer, each in zip(answers, told, strict=True):
                sums.update(each["sums"])
                if "replaced" in answer.tensors:  # NaN where a micro-batch had no routes
                    self._replaced += [row for row in answer.tensors["replaced"] if row.isfinite().all()]
            seconds += max(each["seconds"] for each in told)
            if (live := live_of(answers)) is not None:
                self._live.add(live)
            if index == 0 and not self.config.scores_old:
                seen = check_routes(self._merged(whole, parts, answers), self.config.replay, self.version)
        self.version += 1
        self.seen, self._forward_seconds = seen, seconds
        return self._metrics(batch, sums, norms)

    def logits(self, micro: TokenBatch, slots: Tensor) -> Tensor:
        self.team.tell_all(batch_message({"do": "logits"}, micro))
        with self.team.blaming():
            found = LocalLearner.logits(self, micro, slots)
            self.team.hear()
        return found

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """One tensor at a time: the next is gathered when it is asked for."""
        self.team.tell_all(Message({"do": "weights"}))
        gathered = super().named_weights()
        try:
            for item in gathered:  # noqa: UP028 - `yield from` would close it for who stops early
                yield item
        finally:
            with self.team.blaming():
                for _ in gathered:  # the other ranks gather them all
                    pass
                self.team.hear()

    def save(self, folder: Path, finish: Callable[[], None]) -> None:
        """Into `folder`, in the background; `finish` is called there once everything is written."""
        self._on_all("save", folder)
        assert self._saving is not None
        self._saving.then(partial(self._export, folder, finish))

    def finish_saving(self) -> None:
        if self._saving is not None:
            self._saving.wait()
            self._saving = None

    def restore(self, folder: Path) -> None:
        self._on_all("restore", folder)

    def _export(self, folder: Path, finish: Callable[[], None]) -> None:
        export(folder, self._like)
        finish()

    def _score_on_ranks(self, how: str, batch: TokenBatch) -> TokenBatch:
        parts = self._divide(batch)
        return self._merged(batch, parts, self._everywhere("score", parts, {"how": how}))

    def _divide(self, batch: TokenBatch) -> list[Part]:
        return divide(batch, self.config.train.tokens_per_micro_batch, self.team.ranks)

    def _everywhere(self, command: str, parts: list[Part], about: dict[str, Any]) -> list[Message]:
        """Every rank's answer, in the order of the ranks."""
        messages = [batch_message({"do": command, "rounds": part.rounds, **about}, part.batch) for part in parts]
        self.team.tell(messages[1:])
        with self.team.blaming():
            return [self.handle(messages[0]), *self.team.hear()]

    def _on_all(self, command: str, folder: Path) -> None:
        message = Message({"do": command, "folder": str(folder)})
        self.team.tell_all(message)
        with self.team.blaming():
            self.handle(message)
            self.team.hear()

    def _merged(self, batch: TokenBatch, parts: list[Part], answers: list[Message]) -> TokenBatch:
        """The batch with what the ranks found on its slots."""
        whole: dict[str, Tensor] = {}
        batch = batch.replace(gate_mass=None)  # of an earlier scoring; without replay there is none
        for part, answer in zip(parts, answers, strict=True):
            slots = batch.slots_of(part.samples) if part.samples else torch.zeros(0, dtype=torch.int64)
            for name in {*SCORED, NATIVE} & answer.tensors.keys():
                rows = answer.tensors[name][: len(slots)]  # those of an idle sample come last
                merged = whole.setdefault(name, rows.new_empty(batch.num_slots, *rows.shape[1:]))
                if len(rows) != len(slots) or (rows.shape[1:], rows.dtype) != (merged.shape[1:], merged.dtype):
                    raise TrainingError(f"a rank's answer is malformed: its {name} does not fit what it was asked")
                merged[slots] = rows
        native = whole.pop(NATIVE, None)
        if native is not None and self.routers is not None:
            valid = torch.ones(len(native), dtype=torch.bool)
            batch = batch.replace(
                routing_native=RoutingTrace(native, valid, self.routers.layers, self.routers.num_experts)
            )
        return batch.replace(**whole)


def _for_update(batch: TokenBatch, *, native: bool) -> TokenBatch:
    """Without what an update does not read. native: it replays the trainer's own routes."""
    unread = {"entropy", "own_ids", "own_logp", "top_logp_old"} | (set() if native else {"routing_native"})
    return batch.replace(**dict.fromkeys(unread))
