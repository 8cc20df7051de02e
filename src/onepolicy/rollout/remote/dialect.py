"""`Dialect`: the paths, bodies, replies and abilities of one kind of server."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedConfig

from onepolicy.config import ModelConfig, QuantFormat, ServerEngineConfig
from onepolicy.config.lora import LoraConfig
from onepolicy.interfaces import AdapterSource, EngineCaps, NamedWeights
from onepolicy.models.checksum import ChecksumTable
from onepolicy.models.quant.size_report import SizeReport
from onepolicy.replay.checks import RouteSpec
from onepolicy.rollout.remote.bodies import MAX_REPLY_BYTES
from onepolicy.rollout.remote.client import OtherWeights, RequestGate, make_clients
from onepolicy.rollout.remote.replies import AdapterLimits
from onepolicy.sync.weight_files import INDEX, WeightFiles, num_files
from onepolicy.types import Completion, Sampling

ENTRY_BYTES = 512  # of JSON for one token and its log-probability
PATH_ID_BYTES = 16  # of JSON for a token of the prompt
EXPERT_ID_BYTES = 4  # at most

PlaceAdapter: TypeAlias = Callable[[], Awaitable[str]]
"""Gives the server the files of an adapter. Returns their folder there."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of the model, against which replies are checked."""

    vocab: int
    depth: int  # decoder layers
    route_spec: RouteSpec | None  # None: requests ask for no routes


@dataclass(frozen=True, slots=True)
class Request:
    """A request to sample `sampling.max_tokens` tokens after `path`."""

    path: list[int]
    sampling: Sampling
    seed: int
    first_row: int  # of the routes to return
    version: int  # of the weights at the time of the request
    adapter: str | None = None  # that the server samples with, by its name there: NAME@VERSION


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The properties of a connected server."""

    model: str  # path or hub id of its start-up weights
    workers: int  # processes that receive broadcast weights
    cpu: bool
    top_logprobs: int  # most that it returns of one token
    adapters: AdapterLimits | None  # that it takes; None: it takes none
    seeded: bool = True  # a request's seed determines its random numbers
    sizes: SizeReport | None = None  # of quantised weights


class Dialect(ABC):
    """The protocol of one server, and the name that its weights have there."""

    server: ClassVar[str]
    """Name of the server in errors."""
    generate_path: ClassVar[str]
    load_adapter_path: ClassVar[str]
    unload_adapter_path: ClassVar[str]
    names_weights: ClassVar[bool]
    """A reply names the weights that sampled each token."""
    aborts_at_its_end: ClassVar[bool] = False
    """It aborts all requests when it shuts down, so an abort may mean that it is lost."""
    adapters_are_files: ClassVar[bool] = False
    """An adapter travels as files whatever rollout.engine.sync is."""
    info: ServerInfo
    """Of the server since `handshake`."""

    def __init__(
        self,
        config: ServerEngineConfig,
        hf_config: PreTrainedConfig,
        shape: ModelShape,
        quant: QuantFormat | None,
        *,
        adapters: bool,
    ) -> None:
        """Make the clients, and a folder where weights or adapters travel as files."""
        self.config, self.hf_config, self.shape, self.quant = config, hf_config, shape, quant
        self.client, self.once = make_clients(config, server=self.server)  # once: without retries
        self.where = f"{self.server} at {config.one_url}"
        self.files: WeightFiles | None = None
        if config.sync == "disk" or (adapters and self.adapters_are_files):
            self.files = WeightFiles(config.sync_dir)

    # --- the server and its weights ---------------------------------------------------------------

    @abstractmethod
    async def handshake(self, caps: EngineCaps) -> None:
        """Check the server's model and settings, and lift a pause of an interrupted run.

        Raises UsageError if the server does not fit this run.
        """

    @abstractmethod
    async def claim(self) -> None:
        """Take the server from an earlier run, if its weights have the name of a run."""

    @property
    @abstractmethod
    def weights_id(self) -> str:
        """Name of the weights that were loaded last, in the server."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights that `handshake` has found."""

    @property
    @abstractmethod
    def is_initial(self) -> bool:
        """Return whether the server has the weights that it was started with."""

    @property
    def incomplete(self) -> bool:
        """Return whether an interrupted update left only some of the weights."""
        return False

    @property
    @abstractmethod
    def canary(self) -> list[float] | None:
        """Log-probabilities of a fixed batch under the start-up weights, if a run stored some."""

    @abstractmethod
    async def store_canary(self, canary: list[float]) -> None:
        """Store it in the server, for later runs."""

    @abstractmethod
    async def read_weights_id(self) -> str:
        """Return the name that the server's weights have now."""

    async def confirm_weights(self) -> None:
        """Raise OtherWeights if the server's are not those that this run loaded last."""
        found = await self.read_weights_id()
        if found != self.weights_id:
            raise self.other_weights(found)

    def other_weights(self, found: str) -> OtherWeights:
        """Return the error for a server whose weights have another name."""
        return OtherWeights(
            f"rollout.engine.url: {self.where} holds weights {found!r}, not this run's "
            f"{self.weights_id!r}: it was restarted, or another run uses it; continue from the "
            "last checkpoint with `onepolicy train --resume RUN`"
        )

    # --- requests ---------------------------------------------------------------------------------

    @abstractmethod
    def check_sampling(self, sampling: Sampling, caps: EngineCaps) -> None:
        """Raise UsageError if the server would sample in another way or not report it."""

    def seed_of_rest(self, seed: int, done: int) -> int:
        """Return the seed of a request that is resumed after `done` tokens."""
        return seed

    @abstractmethod
    def body(self, request: Request) -> dict[str, Any]:
        """Return the JSON body of the request."""

    def max_reply_bytes(self, request: Request) -> int:
        """Return the most bytes that a reply to this request may have."""
        sampling, spec, path, ids = request.sampling, self.shape.route_spec, len(request.path), 0
        if spec is not None:
            ids = (path + sampling.max_tokens) * self.shape.depth * spec.top_k
        entries = 3 + self.num_likeliest(sampling)  # the token, its own two and the top tokens
        base64_bytes = 4 * math.ceil(ids * EXPERT_ID_BYTES / 3)
        sampled = ENTRY_BYTES * sampling.max_tokens * entries
        return MAX_REPLY_BYTES + sampled + PATH_ID_BYTES * path + base64_bytes

    @abstractmethod
    def num_likeliest(self, sampling: Sampling) -> int:
        """Return of how many likeliest tokens a reply has the log-probabilities."""

    @abstractmethod
    def parse(self, reply: Any, request: Request) -> Completion:
        """Return the tokens of a reply: a whole completion, or its part before an interruption.

        finish is "aborted" if the reply says so, even after the last token.

        Raises MalformedReply for anything but a complete reply to the request, TrainingError for
        another adapter, and OtherWeights for weights that this run did not load.
        """

    # --- updates, between `begin_update` and `resume` ---------------------------------------------

    @property
    def aborts(self) -> bool:
        """Return whether an update aborts the requests that run."""
        return True

    @abstractmethod
    async def begin_update(self, gate: RequestGate) -> None:
        """Pause the server."""

    @abstractmethod
    async def end_update(self, version: int) -> None:
        """Drop the caches and give the weights their name, if the load has not."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def reset_cache(self) -> None:
        """Drop every cached prefix. No request may be running."""

    @abstractmethod
    async def broadcast(self, tensors: NamedWeights, version: int, *, backend: str) -> None:
        """Broadcast the tensors. backend: gloo, from wherever they are, or nccl, from a GPU."""

    def write_files(self, tensors: NamedWeights, version: int) -> tuple[Path, ChecksumTable]:
        """Write the tensors to files. Return their folder, and checksums if the server checks."""
        assert self.files is not None
        return self.files.write_version(tensors, version), {}

    @abstractmethod
    async def load_files(self, folder: Path, sums: ChecksumTable, version: int) -> None: ...

    @abstractmethod
    async def load_checkpoint(self, path: str | None, version: int) -> None:
        """Make the server load a checkpoint. path: None is that of its start."""

    def checkpoint_limit(self, path: str) -> float:
        """Return the seconds for a checkpoint, folder or hub id: timeout_s for each of its files.

        One that this machine does not have counts as one file.
        """
        folder = Path(path)
        if not folder.exists():
            with suppress(HFValidationError):  # a path of the server's machine
                index = try_to_load_from_cache(path, INDEX)
                if isinstance(index, str):
                    folder = Path(index).parent
        return self.config.timeout_s * num_files(folder)

    # --- adapters ---------------------------------------------------------------------------------

    @abstractmethod
    def adapter_layers(self, config: LoraConfig, model: ModelConfig) -> list[str]:
        """Return the last part of the name of every layer with an adapter, such as `q_proj`.

        Raises UsageError for targets that the server cannot compute with.
        """

    @abstractmethod
    def missing_layers(self, layers: list[str], taken: set[str]) -> list[str]:
        """Return the layers that are not among those that the server takes adapters on."""

    @abstractmethod
    def start_with_adapters(self, path: str, rank: int, layers: list[str]) -> str:
        """Return the advice to start a server of the model at `path` for these adapters."""

    @abstractmethod
    async def prepare_adapter(self, adapter: AdapterSource, version: int) -> PlaceAdapter:
        """Read the adapter while the server still samples. Return the call that places it."""

    @abstractmethod
    async def load_adapter(self, name: str, folder: str, version: int) -> None: ...

    @abstractmethod
    async def unload_adapter(self, name: str) -> None: ...
