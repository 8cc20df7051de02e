"""The driver: rank 0, which hands every rank its samples and adds up what they find.

Everything per slot that needs more than one sample (shares, the check of the routes, metrics) happens here, on the
whole batch. A rank is sent its own samples with their routes and nothing else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from onepolicy.config import R2, RunConfig, TrainingError
from onepolicy.interfaces import Update
from onepolicy.models.load import layer_prefix
from onepolicy.replay.routers import Routers
from onepolicy.sync.messages import validate_message
from onepolicy.train.checks import check_batch, check_routes
from onepolicy.train.pack import micro_batches
from onepolicy.train.sharded.divide import RankBatch, divide_batch
from onepolicy.train.sharded.rank import NATIVE, REPLACED, SCORED, RankLearner, UpdateReply
from onepolicy.train.sharded.rank_group import RankGroup
from onepolicy.train.sharded.shards import MODEL, SHARDS, WEIGHTS, read, sizes_in
from onepolicy.train.sharded.wire import Message, batch_message
from onepolicy.types import RoutingTrace, TokenBatch

FILE_BYTES = 2**30
INDEX = "model.safetensors.index.json"


def export_model(folder: Path, like: PreTrainedModel) -> None:
    """Write model-*.safetensors, their index and the config; then the sharded weights go, which are the same.

    like: the model on the meta device, with the config to be written.
    """
    start = f"{MODEL}/"
    weights = {
        n.removeprefix(start): about for n, about in sizes_in(folder).items() if n.startswith(start)
    }
    places: dict[str, str] = {}
    for number, names in enumerate(file_groups(weights), start=1):
        tensors = {
            start + n: torch.empty(weights[n].size, dtype=weights[n].properties.dtype)
            for n in names
        }
        read(folder, tensors)
        saved = revert_weight_conversion(
            like, {n.removeprefix(start): t for n, t in tensors.items()}
        )
        file = f"model-{number:05d}.safetensors"
        save_file(
            {n: t.clone() for n, t in saved.items()}, folder / file, metadata={"format": "pt"}
        )
        places |= dict.fromkeys(saved, file)
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8"
    )
    like.config.save_pretrained(folder)
    if like.generation_config is not None:
        like.generation_config.save_pretrained(folder)
    for written in (folder / SHARDS).glob(f"*model-{WEIGHTS:05d}-of-*.safetensors"):
        written.unlink()


def file_groups(weights: dict[str, TensorStorageMetadata]) -> Iterator[list[str]]:
    """Names for files of about FILE_BYTES; a layer's tensors stay together, because some are saved as parts of one."""
    layers: dict[str, list[str]] = {}
    for name in weights:
        layers.setdefault(layer_prefix(name), []).append(name)
    group: list[str] = []
    size = 0
    for names in layers.values():
        group += names
        size += sum(
            weights[name].size.numel() * weights[name].properties.dtype.itemsize for name in names
        )
        if size >= FILE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


class RankDispatcher:
    """This process's own rank and the others, which do the same commands at the same time."""

    def __init__(self, own: RankLearner, rank_group: RankGroup) -> None:
        self.own, self.rank_group = own, rank_group

    def divide_batch(self, batch: TokenBatch) -> list[RankBatch]:
        return divide_batch(
            batch, self.own.config.train.tokens_per_micro_batch, self.rank_group.ranks
        )

    def do(self, command: str, parts: list[RankBatch], about: dict[str, Any]) -> list[Message]:
        """Every rank's answer, in the order of the ranks."""
        messages = [
            batch_message({"do": command, "rounds": part.rounds, **about}, part.batch)
            for part in parts
        ]
        self.rank_group.send(messages[1:])
        with self.rank_group.attribute_failures():
            return [self.own.handle(messages[0]), *self.rank_group.recv()]

    def do_in(self, command: str, folder: Path) -> None:
        """A command about a checkpoint's folder."""
        message = Message({"do": command, "folder": str(folder)})
        self.rank_group.broadcast(message)
        with self.rank_group.attribute_failures():
            self.own.handle(message)
            self.rank_group.recv()

    def score(self, batch: TokenBatch, how: str) -> TokenBatch:
        """how: see `rank.Score`."""
        parts = self.divide_batch(batch)
        return self.merged(batch, parts, self.do("score", parts, {"how": how}))

    def merged(
        self, batch: TokenBatch, parts: list[RankBatch], answers: list[Message]
    ) -> TokenBatch:
        """The batch with what the ranks found on its slots."""
        whole: dict[str, Tensor] = {}
        batch = batch.replace(gate_mass=None)  # of an earlier scoring; without replay there is none
        for part, answer in zip(parts, answers, strict=True):
            slots = (
                batch.slots_of(part.samples) if part.samples else torch.zeros(0, dtype=torch.int64)
            )
            for name in {*SCORED, NATIVE} & answer.tensors.keys():
                rows = answer.tensors[name][: len(slots)]  # those of an idle sample come last
                merged = whole.setdefault(name, rows.new_empty(batch.num_slots, *rows.shape[1:]))
                if len(rows) != len(slots) or (rows.shape[1:], rows.dtype) != (
                    merged.shape[1:],
                    merged.dtype,
                ):
                    raise TrainingError(
                        f"a rank's answer is malformed: its {name} does not fit what it was asked"
                    )
                merged[slots] = rows
        native, routers = whole.pop(NATIVE, None), self.own.routers
        if native is not None and routers is not None:
            valid = torch.ones(len(native), dtype=torch.bool)
            batch = batch.replace(
                routing_native=RoutingTrace(native, valid, routers.layers, routers.num_experts)
            )
        return batch.replace(**whole)


class ShardedScorer:
    """The Scorer of a run on several ranks."""

    def __init__(self, ranks: RankDispatcher) -> None:
        self._ranks, self._own = ranks, ranks.own.scorer
        self.fingerprint, self.vocabulary = self._own.fingerprint, self._own.vocabulary
        self.contract, self.device, self.routers = (
            self._own.contract,
            self._own.device,
            self._own.routers,
        )

    @property
    def version(self) -> int:
        return self._own.version

    def score(self, batch: TokenBatch, *, replay: bool = True) -> TokenBatch:
        if not replay:
            return self._ranks.score(batch, "native")
        return check_routes(
            self._ranks.score(batch, "again"), self._own.config.replay, self.version
        )

    def micro_batches(self, batch: TokenBatch) -> list[list[int]]:
        return micro_batches(batch, self._own.config.train.tokens_per_micro_batch)

    def logits(self, micro: TokenBatch, slots: Tensor) -> Tensor:
        rank_group = self._ranks.rank_group
        rank_group.broadcast(batch_message({"do": "logits"}, micro))
        with rank_group.attribute_failures():
            found = self._own.logits(micro, slots)
            rank_group.recv()
        return found


class ShardedLearner:
    """The Learner of a run on several ranks."""

    def __init__(self, own: RankLearner, rank_group: RankGroup) -> None:
        self.own, self.ranks = own, RankDispatcher(own, rank_group)
        self.scorer = ShardedScorer(self.ranks)
        self.fingerprint = own.fingerprint

    @property
    def config(self) -> RunConfig:
        return self.own.config

    @property
    def routers(self) -> Routers | None:
        return self.own.routers

    @property
    def version(self) -> int:
        return self.own.version

    @property
    def updates(self) -> int:
        return self.own.updates

    @property
    def skipped(self) -> int:
        return self.own.skipped

    def score(self, batch: TokenBatch) -> TokenBatch:
        check_batch(batch, self.config.replay, self.scorer.vocabulary)
        scored = self.ranks.score(batch, "score")
        return (
            check_routes(scored, self.config.replay, self.version)
            if self.config.scores_old
            else scored
        )

    def step(self, batch: TokenBatch) -> Update:
        own, replay = self.own, self.config.replay
        sums: Counter[str] = Counter()
        scored: TokenBatch | None = None
        seconds, norms = 0.0, []
        own.scoring.begin()
        for index, whole in enumerate(own.minibatches(batch)):
            parts = self.ranks.divide_batch(_for_update(whole, native=isinstance(replay, R2)))
            about = {"minibatch": index, "slots": whole.num_trainable, "version": self.version}
            answers = self.ranks.do("optimise", parts, about)
            told = [
                validate_message(UpdateReply, answer.header, "a rank's answer")
                for answer in answers
            ]
            norms.append(told[0]["norm"])
            for each in told:
                sums.update(each["sums"])
            seconds += max(each["seconds"] for each in told)
            self._take([answer.tensors for answer in answers])
            if index == 0 and not self.config.scores_old:
                scored = check_routes(
                    self.ranks.merged(whole, parts, answers), replay, self.version
                )
        own.scoring.seconds = seconds
        own.version += 1
        return Update(own.metrics(batch, sums, norms), scored)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """One tensor at a time: the next is gathered when it is asked for."""
        rank_group = self.ranks.rank_group
        rank_group.broadcast(Message({"do": "weights"}))
        gathered = self.own.named_weights()
        try:
            for item in gathered:  # noqa: UP028 - `yield from` would close it for who stops early
                yield item
        finally:
            with rank_group.attribute_failures():
                for _ in gathered:  # the other ranks gather them all
                    pass
                rank_group.recv()

    def save(self, folder: Path, finish: Callable[[], None]) -> None:
        """Into `folder`, in the background; `finish` is called there once everything is written."""
        self.ranks.do_in("save", folder)
        assert self.own.saving is not None
        self.own.saving.then(partial(self._export, folder, finish))

    def finish_saving(self) -> None:
        if self.own.saving is not None:
            self.own.saving.wait()
            self.own.saving = None

    def restore(self, folder: Path) -> None:
        self.ranks.do_in("restore", folder)

    def _take(self, tensors: list[dict[str, Tensor]]) -> None:
        """What modes and extensions counted on the ranks."""
        for each in tensors:
            for row in each.get(REPLACED, ()):
                if row.isfinite().all():  # NaN where a micro-batch had no routes
                    self.own.scorer.mode.add(row)
        for extension in self.own.extensions:
            extension.add(tensors)

    def _export(self, folder: Path, finish: Callable[[], None]) -> None:
        export_model(folder, self.own.like)
        finish()


def _for_update(batch: TokenBatch, *, native: bool) -> TokenBatch:
    """Without what an update does not read. native: it replays the trainer's own routes."""
    unread = {"entropy", "trainer_top_ids", "trainer_top_logp", "top_logp_old"} | (
        set() if native else {"routing_native"}
    )
    return batch.replace(**dict.fromkeys(unread))
