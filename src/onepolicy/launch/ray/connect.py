"""The connection to Ray: joins a running Ray or starts one, for as long as a run lasts."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onepolicy.config import RunConfig, ServiceUnavailable, UsageError
from onepolicy.config.address import check_ray_address
from onepolicy.config.cluster import RayCluster
from onepolicy.rollout.remote.token import check_token
from onepolicy.telemetry import disable_telemetry

if TYPE_CHECKING:
    from onepolicy.interfaces import Progress
    from onepolicy.launch.launcher import Launcher

QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns of a future change
    "RAY_ENABLE_AUTO_CONNECT": "0",  # else ray.put after the end of a run starts a Ray
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's switch for "this machine only": its processes then listen on the loopback."""
CONNECT_TIMEOUT_S = 10.0
OBJECT_STORE_BYTES = 2**30
"""Bytes of shared memory for messages and weights, in a Ray started here. It spills the rest."""


@contextmanager
def open_ray_launcher(config: RunConfig, progress: Progress) -> Iterator[Launcher]:
    """Connect to Ray, reserve the resources of the run, and yield its launcher.

    The processes of the run end with it. Raises UsageError if ray is not installed or this process
    was started by torchrun, ServiceUnavailable if Ray does not answer or has no room.
    """
    cluster = config.cluster
    assert isinstance(cluster, RayCluster)
    if importlib.util.find_spec("ray") is None:
        raise UsageError("cluster.kind: ray is not installed; pip install 'onepolicy[ray]'")
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise UsageError(
            "cluster.kind: ray starts the learner's ranks itself; start this without torchrun"
        )
    with _connected(config, cluster):
        from onepolicy.launch.ray.actors import ray_launcher

        with ray_launcher(config, cluster, progress) as launcher:
            yield launcher


@contextmanager
def _connected(config: RunConfig, cluster: RayCluster) -> Iterator[None]:
    if cluster.address is None:
        _refuse_imported_ray()
    prepare_environment(own=cluster.address is None)
    if cluster.address is not None:
        check_address(cluster.address, cluster.auth)
        _check_port_answers(cluster.address)
    import ray

    starting: AbstractContextManager[None] = nullcontext()
    settings: dict[str, Any] = {"address": cluster.address}
    if cluster.address is None:
        starting = _without_api_server()
        settings = {
            "address": "local",
            "include_dashboard": False,
            "num_cpus": _cpus(config, cluster),
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    try:
        with starting, _kept_sigterm():
            ray.init(
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                **settings,
            )
    except Exception as error:  # Ray raises a bare one if its node is not up in time
        problem = "Ray does not start"
        if cluster.address is not None:
            problem = f"no Ray at {cluster.address}"
        reason = str(error).strip().splitlines()[0]
        raise ServiceUnavailable(f"cluster.address: {problem}: {reason}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _kept_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM, which reports the run: ray.init sets its own.

    Where nobody has set one, Ray's stays, which ends its processes.
    """
    handler = signal.getsignal(signal.SIGTERM)
    yield
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and handler not in (None, signal.SIG_DFL):
        signal.signal(signal.SIGTERM, handler)


def _refuse_imported_ray() -> None:
    """Raise UsageError if this process imported Ray before it asks for a token.

    Ray reads at its import whether connections need a token. The driver could then not talk to the
    Ray that it starts.
    """
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise UsageError(
            "cluster.kind: this process has imported ray, which has read its environment; start "
            "the run in a process that has not, or set RAY_AUTH_MODE=token before the import"
        )


@contextmanager
def _without_api_server() -> Iterator[None]:
    """Keep ray.init from starting an API server, for which Ray has no switch.

    Without a dashboard the server only collects statistics. Even if those are off, it asks
    169.254.169.254 and metadata.google.internal which cloud this machine is in (Ray 2.60).
    """
    from ray._private import services

    start_api_server = services.start_api_server
    # (None, None) is also the result of a server that fails to start.
    services.start_api_server = lambda *arguments, **settings: (None, None)
    try:
        yield
    finally:
        services.start_api_server = start_api_server


def prepare_environment(*, own: bool) -> None:
    """Set Ray's environment variables. Call it before the first import of ray, which reads some.

    own: Ray will be started here. Raises UsageError for a token that Ray cannot send. The error
    does not contain the token; Ray's own error would.
    """
    if "RAY_AUTH_TOKEN" in os.environ:
        check_token(
            os.environ["RAY_AUTH_TOKEN"], "cluster.auth: the environment variable RAY_AUTH_TOKEN"
        )
    elif "RAY_AUTH_TOKEN_PATH" in os.environ:
        _check_token_file(os.environ["RAY_AUTH_TOKEN_PATH"])
    disable_telemetry()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if own:
        os.environ.update(_token_variables() | ON_LOOPBACK)


def check_address(address: str, auth: str) -> None:
    """Raise UsageError if `address` is no address of a Ray, or if its Ray needs no token."""
    check_ray_address(address)
    if auth == "token" and os.environ.get("RAY_AUTH_MODE") != "token":
        raise UsageError(
            "cluster.auth: a Ray without token authentication runs code for everybody who reaches "
            "its ports; start it with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=<file> on all "
            "nodes and set both here, or set cluster.auth=none"
        )


def _check_port_answers(address: str) -> None:
    """Raise ServiceUnavailable if nothing listens at host:port.

    Ray itself would retry for many minutes.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        place = (host.strip("[]"), int(port))  # of an IPv6 address, which only a text needs
        socket.create_connection(place, timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ServiceUnavailable(f"cluster.address: no Ray at {address}: {error}") from None


@cache  # Ray reads the token once in a process
def _token_file() -> str:
    """Write a new token into a private folder, which is removed when this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="onepolicy-ray-")
    _TOKEN_FOLDERS.append(folder)
    path = Path(folder.name) / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32), encoding="utf-8")
    return str(path)


def _check_token_file(path: str) -> None:
    try:
        token = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(
            f"cluster.auth: {path} (RAY_AUTH_TOKEN_PATH) cannot be read: {error.strerror}"
        ) from error
    # Ray strips the token too.
    check_token(token.strip(), f"cluster.auth: the file {path} (RAY_AUTH_TOKEN_PATH)")


_TOKEN_FOLDERS: list[tempfile.TemporaryDirectory] = []


def _token_variables() -> dict[str, str]:
    """Return the variables that make Ray require a token on every connection."""
    variables = {"RAY_AUTH_MODE": "token"}
    if "RAY_AUTH_TOKEN" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        variables["RAY_AUTH_TOKEN_PATH"] = _token_file()
    return variables


def _cpus(config: RunConfig, cluster: RayCluster) -> int:
    """Return a number of CPUs that is enough for the run.

    Ray only counts CPUs and binds nothing to them, so every request fits on the user's own machine.
    """
    ranks = max(config.train.ranks, 1) * (config.train.threads or 1)
    return max(os.cpu_count() or 1, ranks + cluster.replicas * cluster.cpus_per_replica)
