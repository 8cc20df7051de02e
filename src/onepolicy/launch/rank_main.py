"""A rank that is not the driver: what its process does from the start to the end of a run."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist
from typing_extensions import TypedDict

from onepolicy.build.learner import build_rank_learner
from onepolicy.config import ModelConfig, RunConfig, TrainingError, UsageError
from onepolicy.launch.rank_info import RankInfo
from onepolicy.launch.ranks import DRIVER, TORCHRUN, WHERE, rendezvous
from onepolicy.sync.messages import read_as
from onepolicy.train.sharded.channel import Channel, RankLost, connect, read_advertised
from onepolicy.train.sharded.rank import RankLearner
from onepolicy.train.sharded.team import Ranks, error_message
from onepolicy.train.sharded.wire import Message

JOIN_LIMIT = 300.0
"""Seconds to find the driver and hear from it; after that the run's own train.rank_timeout counts."""
FAILURES = (UsageError, TrainingError, RuntimeError, OSError)
"""What ends a rank with a word to the driver: ours, a collective that failed, a disk that is full."""


class Welcome(TypedDict):
    """What the driver says first."""

    limit: float  # seconds: train.rank_timeout
    device: str


def run_launched_rank() -> int:
    """As `launch_here` or torchrun started this process. Returns an exit code."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of a terminal; the driver decides
    place = RankInfo.from_environment()
    assert place is not None
    store = rendezvous(os.environ.get(WHERE, TORCHRUN), place, JOIN_LIMIT)
    try:
        run_rank(place, store, store.get(DRIVER).decode())
    except RankLost:
        return 1  # the driver has ended, and says why
    return 0


def run_rank(place: RankInfo, store: dist.Store, driver: str) -> None:
    """Join, then do what the driver says until the run ends. driver: where it listens (channel.advertised).

    RankLost if it has gone, or this rank has told it of an error.
    """
    assert place.rank > 0
    try:
        address, token = read_advertised(driver)
        _serve(place, store, connect(address, token, place.rank, JOIN_LIMIT))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _serve(place: RankInfo, store: dist.Store, channel: Channel) -> None:
    about = read_as(Welcome, channel.receive(JOIN_LIMIT).header, "the driver's first word")
    limit = about["limit"]
    learner: RankLearner | None = None
    try:
        device = place.device(about["device"])
        mesh = place.join(store, device, limit)
        while (message := channel.receive(None)).header.get("do") != "stop":
            if message.header.get("do") == "build":
                learner = _build(message, Ranks(device, mesh, None))
                channel.send(Message({}), limit)
            else:
                assert learner is not None
                channel.send(learner.handle(message), limit)
    except RankLost:
        raise
    except FAILURES as error:
        channel.send(error_message(error), limit)
        raise RankLost(str(error)) from error


def _build(message: Message, ranks: Ranks) -> RankLearner:
    config = RunConfig.model_validate_json(message.header["config"])
    model = ModelConfig.model_validate_json(message.header["model"])
    return build_rank_learner(config, model, ranks)
