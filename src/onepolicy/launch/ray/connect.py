"""Ray, for as long as a run lasts: connected to or started, with room for all processes of the run."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onepolicy.config import NotThere, RunConfig, UsageError
from onepolicy.config.address import check_ray_address
from onepolicy.config.cluster import RayCluster
from onepolicy.no_statistics import turn_off
from onepolicy.rollout.servers.token import checked

if TYPE_CHECKING:
    from onepolicy.interfaces import Progress
    from onepolicy.launch.launcher import Launcher

QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or it warns of what it will not do one day
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's switch for "this machine only": its processes then listen on the loopback."""
ANSWER_S = 10.0
OBJECTS = 2**30
"""Bytes of shared memory for messages, of a Ray that is started here."""


@contextmanager
def open_ray_launcher(config: RunConfig, progress: Progress) -> Iterator[Launcher]:
    """Ray with the room that the run needs; its processes end with it. UsageError if there is no Ray, or no room."""
    cluster = config.cluster
    assert isinstance(cluster, RayCluster)
    if importlib.util.find_spec("ray") is None:
        raise UsageError("cluster.kind: ray is not installed; pip install 'onepolicy[ray]'")
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise UsageError(
            "cluster.kind: ray starts the learner's ranks itself; start this without torchrun"
        )
    with _connected(cluster):
        from onepolicy.launch.ray.actors import ray_launcher

        with ray_launcher(config, cluster, progress) as launcher:
            yield launcher


@contextmanager
def _connected(cluster: RayCluster) -> Iterator[None]:
    prepare_environment(own=cluster.address is None)
    if cluster.address is not None:
        check_address(cluster.address, cluster.auth)
        _refuse_silence(cluster.address)
    import ray
    from ray.exceptions import RaySystemError

    start: AbstractContextManager[None] = nullcontext()
    if cluster.address is None:
        start = _without_api_server()
    limits: dict[str, Any] = (
        {} if cluster.address else {"num_cpus": _cpus(cluster), "object_store_memory": OBJECTS}
    )
    try:
        with start:
            ray.init(
                address=cluster.address or "local",
                include_dashboard=None if cluster.address else False,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                **limits,
            )
    except (ConnectionError, RuntimeError, RaySystemError, ValueError) as error:
        where = f"no Ray at {cluster.address}" if cluster.address else "Ray does not start"
        raise NotThere(f"cluster.address: {where}: {str(error).strip().splitlines()[0]}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _without_api_server() -> Iterator[None]:
    """Start no API server, which Ray has no switch for.

    Without a dashboard its one task is statistics. Also where those are off, it asks 169.254.169.254 and
    metadata.google.internal which cloud this machine is in (Ray 2.60).
    """
    from ray._private import services

    started = services.start_api_server
    services.start_api_server = lambda *arguments, **settings: (
        None,
        None,
    )  # what it returns if it does not start
    try:
        yield
    finally:
        services.start_api_server = started


def prepare_environment(*, own: bool) -> None:
    """The environment, before Ray is imported, which is when it reads some of it. own: Ray will be started here.

    UsageError, which does not repeat it, for a token that Ray could not send and would show in its error.
    """
    if "RAY_AUTH_TOKEN" in os.environ:
        checked(
            os.environ["RAY_AUTH_TOKEN"], "cluster.auth: the environment variable RAY_AUTH_TOKEN"
        )
    elif "RAY_AUTH_TOKEN_PATH" in os.environ:
        _check_token_file(os.environ["RAY_AUTH_TOKEN_PATH"])
    turn_off()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if own:
        os.environ.update(_protected() | ON_LOOPBACK)


def check_address(address: str, auth: str) -> None:
    """UsageError for what is no address of a Ray, or one that everybody can command."""
    check_ray_address(address)
    if auth == "token" and os.environ.get("RAY_AUTH_MODE") != "token":
        raise UsageError(
            "cluster.auth: a Ray without token authentication runs code for everybody who reaches its ports; start it "
            "with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=<file> on all nodes and set both here, or set "
            "cluster.auth=none"
        )


def _refuse_silence(address: str) -> None:
    """NotThere if nothing listens at host:port, which Ray itself would go on asking for many minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise NotThere(f"cluster.address: no Ray at {address}: {error}") from None


@cache  # Ray reads the token once in a process
def _token_file() -> str:
    """In a private folder that goes when this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="onepolicy-ray-")
    _KEPT.append(folder)
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
    checked(
        token.strip(), f"cluster.auth: the file {path} (RAY_AUTH_TOKEN_PATH)"
    )  # Ray strips it too


_KEPT: list[tempfile.TemporaryDirectory] = []


def _protected() -> dict[str, str]:
    """What makes Ray ask every connection for a token."""
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return {"RAY_AUTH_MODE": "token"}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": _token_file()}


def _cpus(cluster: RayCluster) -> int:
    """CPUs are what Ray counts, not what it binds to: on one's own machine everything that is asked for fits."""
    return max(os.cpu_count() or 1, 1 + cluster.replicas * cluster.cpus_per_replica)
