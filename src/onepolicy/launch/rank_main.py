"""The process of a rank that is not the driver, from the start to the end of a run."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist
from typing_extensions import TypedDict

from onepolicy.build.learner import build_rank_learner
from onepolicy.config import ModelConfig, RunConfig, TrainingError, UsageError
from onepolicy.launch.rank_info import RankInfo
from onepolicy.launch.ranks import (
    DRIVER_KEY,
    RENDEZVOUS_ENV,
    TORCHRUN_RENDEZVOUS,
    open_rendezvous,
)
from onepolicy.sync.messages import validate_message
from onepolicy.train.sharded.channel import Channel, RankLost, connect_to_driver, decode_address
from onepolicy.train.sharded.rank import RankLearner
from onepolicy.train.sharded.rank_group import DistributedContext, error_message
from onepolicy.train.sharded.wire import Message

JOIN_TIMEOUT_S = 300.0
"""Seconds to find the driver and receive its first message; later waits: train.rank_timeout."""
REPORTED_ERRORS = (UsageError, TrainingError, RuntimeError, OSError)
"""Errors that a rank reports before it ends: our own, a failed collective, a full disk."""


class RankSettings(TypedDict):
    """The driver's first message to a rank."""

    limit: float  # seconds: train.rank_timeout
    device: str


def run_launched_rank() -> int:
    """Run the rank that `launch_local_ranks` or torchrun started as this process.

    Return an exit code.
    """
    # Ctrl-C reaches all processes of a terminal. The driver decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank_info = RankInfo.from_environment()
    assert rank_info is not None
    url = os.environ.get(RENDEZVOUS_ENV, TORCHRUN_RENDEZVOUS)
    store = open_rendezvous(url, rank_info, JOIN_TIMEOUT_S)
    try:
        run_rank(rank_info, store, store.get(DRIVER_KEY).decode())
    except RankLost:
        return 1  # the driver has ended and reports why
    return 0


def run_rank(rank_info: RankInfo, store: dist.Store, driver: str) -> None:
    """Join the other ranks, then handle the driver's messages until the run ends.

    driver: address and token of the driver (channel.encode_address). Raises RankLost if the driver
    is gone, or if this rank has failed and reported its error to the driver.
    """
    assert rank_info.rank > 0
    try:
        address, token = decode_address(driver)
        _handle_messages(
            rank_info, store, connect_to_driver(address, token, rank_info.rank, JOIN_TIMEOUT_S)
        )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _handle_messages(rank_info: RankInfo, store: dist.Store, channel: Channel) -> None:
    first_message = channel.receive(JOIN_TIMEOUT_S)
    settings = validate_message(RankSettings, first_message.header, "the driver's first message")
    timeout = settings["limit"]
    learner: RankLearner | None = None
    try:
        device = rank_info.select_device(settings["device"])
        mesh = rank_info.join_process_group(store, device, timeout)
        while True:
            message = channel.receive(None)
            command = message.header.get("do")
            if command == "stop":
                return
            if command == "build":
                learner = _build_learner(message, DistributedContext(device, mesh, None))
                channel.send(Message({}), timeout)
            else:
                assert learner is not None
                channel.send(learner.handle(message), timeout)
    except RankLost:
        raise
    except REPORTED_ERRORS as error:
        channel.send(error_message(error), timeout)
        raise RankLost(str(error)) from error


def _build_learner(message: Message, ranks: DistributedContext) -> RankLearner:
    config = RunConfig.model_validate_json(message.header["config"])
    model = ModelConfig.model_validate_json(message.header["model"])
    return build_rank_learner(config, model, ranks)
