"""The learner's ranks on this machine, under torch's elastic agent, as torchrun starts them.

The agent is this process. It starts the command once per rank, ends all ranks when one dies, and
passes signals on.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from onepolicy.config import RunConfig, TrainingError
from onepolicy.config.model import usable_cores

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

RENDEZVOUS_ENV = "ONEPOLICY_RENDEZVOUS"  # environment variable: URL of the ranks' store
AGENT_ENV = "ONEPOLICY_AGENT"  # environment variable: process of the agent
GLOO_INTERFACE_ENV = "GLOO_SOCKET_IFNAME"
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PROGRAM = ("-P", "-m", "onepolicy")
"""Python's arguments before those of the command. -P: the working folder may hold a stranger's
files, and none of them must stand in for a module."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PARENT_POLL_S = 0.5
SHOW_CURSOR = "\x1b[?25h"
INTERRUPTED = 130  # exit status after Ctrl-C


def needs_agent(config: RunConfig, count: int | None = None) -> bool:
    """Return whether this process has to start the ranks, because nobody else has or will.

    count: another number of ranks than train.ranks.
    """
    started = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    count = _count(config, count)
    return count > 0 and config.cluster.kind == "local" and not started


def _count(config: RunConfig, count: int | None) -> int:
    if count is None:
        return config.train.ranks
    return count


def run_on_ranks(command: Sequence[str], config: RunConfig, count: int | None = None) -> int:
    """Run `onepolicy COMMAND` on several processes and return its exit status.

    count: number of processes; None: train.ranks. Raises TrainingError if a signal ended one. The
    agent and the ranks meet in a private folder, and gloo uses the loopback.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import launch_agent

    quiet = logging.getLogger("torch.distributed.elastic")  # it reports every end in many lines
    quiet.propagate = False
    quiet.addHandler(logging.NullHandler())
    count = _count(config, count)
    # the agent takes arguments for templates
    arguments = [each.replace("$", "$$") for each in (*PROGRAM, *command)]
    with (
        tempfile.TemporaryDirectory(prefix="onepolicy-ranks-") as folder,
        environment(rank_variables(folder, _threads(config, count)) | on_loopback()),
        _restored_signals(),
    ):
        try:
            launch_agent(_launch_config(folder, count), sys.executable, arguments)
            return 0
        except ChildFailedError as error:
            return _status_of(error.failures)
        except SignalException as stopped:
            number = stopped.sigval
    if number != signal.SIGINT:  # of a Ctrl-C rank 0 has reported where to go on
        os.kill(os.getpid(), number)
    return INTERRUPTED


def _launch_config(folder: str, count: int) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    handled = [each.name for each in PASSED_ON if signal.getsignal(each) != signal.SIG_IGN]
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="onepolicy",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{folder}/agent",
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(folder),
        max_restarts=0,
        signals_to_handle=",".join(handled),
    )


def _threads(config: RunConfig, count: int) -> int | str:
    """Return each rank's threads: train.threads, an exported number, or a share of the cores."""
    exported = os.environ.get("OMP_NUM_THREADS")
    return config.train.threads or exported or max(1, usable_cores() // count)


def rank_variables(folder: str, threads: int | str) -> dict[str, str]:
    """Return the ranks' variables, and one that keeps the agent from opening a port of its own."""
    return {
        AGENT_ENV: str(os.getpid()),
        RENDEZVOUS_ENV: f"file://{folder}/store",
        "OMP_NUM_THREADS": str(threads),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, here and in child processes, and set them back."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _restored_signals() -> Iterator[None]:
    """Give signals their handlers back, which the agent replaces."""
    handlers = {number: signal.getsignal(number) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if sys.stdout.isatty():  # a rank that was ended could not
            sys.stdout.write(SHOW_CURSOR)


def _status_of(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the exit status of the rank that failed first, which has reported its error.

    Raises TrainingError if a signal ended it. The agent sends SIGTERM to the others.
    """
    first = min(failure.timestamp for failure in failures.values())
    early = {rank: failure for rank, failure in failures.items() if failure.timestamp <= first + 1}
    ended = [rank for rank, failure in early.items() if failure.exitcode > 0]
    told_to = [rank for rank, failure in early.items() if failure.exitcode == -signal.SIGTERM]
    killed = [rank for rank in early if rank not in {*ended, *told_to}]
    rank = [*killed, *ended, *told_to][0]
    failure = failures[rank]
    if failure.exitcode > 0:
        return failure.exitcode
    raise TrainingError(
        f"rank {rank} (process {failure.pid} on {socket.gethostname()}) has ended by "
        f"{failure.signal_name()}; `--resume` continues after the last checkpoint"
    )


def on_loopback() -> dict[str, str]:
    """Return the variable that makes gloo use the loopback, unless it is set already."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), names[0])
    return {GLOO_INTERFACE_ENV: os.environ.get(GLOO_INTERFACE_ENV, loopback)}


def end_with_agent() -> bool:
    """End this process when the agent that started it ends, even by SIGKILL.

    Return whether an agent of `run_on_ranks` started it.
    """
    agent = os.environ.pop(AGENT_ENV, None)
    if agent is None:
        return False
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # it may have ended before, and other systems lack prctl
    threading.Thread(target=_watch_parent, args=(int(agent),), daemon=True).start()
    return True


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)
