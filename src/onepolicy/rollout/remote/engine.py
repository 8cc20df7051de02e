"""`RemoteEngine`: a RolloutEngine that samples from a server over HTTP."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from onepolicy.config import (
    ModelConfig,
    QuantFormat,
    ServerEngineConfig,
    TrainingError,
    UsageError,
)
from onepolicy.config.lora import LoraConfig
from onepolicy.interfaces import AdapterSource, EngineCaps, NamedWeights
from onepolicy.models.checkpoint_names import CheckpointNames
from onepolicy.models.load import read_config
from onepolicy.replay.checks import RouteSpec
from onepolicy.rollout.hf.sampler import check_sampling
from onepolicy.rollout.hf.scheduler import check_request
from onepolicy.rollout.remote.adapters import ServerAdapters
from onepolicy.rollout.remote.client import EngineLost, RequestGate
from onepolicy.rollout.remote.dialect import Dialect, ModelShape, Request
from onepolicy.rollout.remote.dialects.sglang import SGLangDialect
from onepolicy.rollout.remote.dialects.vllm import VLLMDialect
from onepolicy.rollout.remote.replies import MalformedReply
from onepolicy.rollout.remote.start_up import check_processed_logprobs
from onepolicy.rollout.resume import join_partial_completions
from onepolicy.rollout.spec import EngineSpec
from onepolicy.sync.canary import Canary, canary_logp, inexact_dtype
from onepolicy.sync.group import run_in_daemon_thread
from onepolicy.sync.weight_files import is_indexed, read_weights
from onepolicy.types import Completion, FinishReason, Sampling

LOG = logging.getLogger(__name__)
DIALECTS: dict[str, type[Dialect]] = {"vllm-server": VLLMDialect, "sglang": SGLangDialect}
"""The dialect of each rollout.engine.kind."""
HALF_LOADED = "the last load_weights failed half-way; load a complete set of weights first"


def make_client(spec: EngineSpec) -> RemoteEngine:
    """Build the engine without connecting it."""
    assert isinstance(spec.config, ServerEngineConfig)
    return RemoteEngine(
        spec.model,
        read_config(spec.model),
        spec.config,
        route_spec=spec.route_spec,
        max_len=spec.max_len,
        quant=spec.quant,
        lora=spec.lora,
    )


class RemoteEngine:
    """A RolloutEngine over a server.

    No request of ours runs while weights are loaded, unless the server's replies name the weights
    that sampled each token: the others are aborted, and resumed from their tokens.
    """

    def __init__(
        self,
        model: ModelConfig,
        hf_config: PreTrainedConfig,
        config: ServerEngineConfig,
        *,
        route_spec: RouteSpec | None,
        max_len: int,
        quant: QuantFormat | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        """Make a client. Call `connect` before any other method.

        route_spec: layers whose experts are returned for every token. quant: format that the server
        was started with. lora: adapters that it is sent, which it computes with.
        """
        self.version = 0
        self.caps = EngineCaps(
            returns_routes=route_spec is not None,
            max_len=max_len,
            weights_dtype=config.dtype,
            takes_adapter=lora is not None,
        )
        self.adapter: str | None = None  # in its weights, without the version
        text = hf_config.get_text_config()
        shape = ModelShape(int(text.vocab_size), int(text.num_hidden_layers), route_spec)
        self.dialect = DIALECTS[config.kind](
            config, hf_config, shape, quant, adapters=lora is not None
        )
        self.name, self.client = self.dialect.where, self.dialect.client
        self._adapters: ServerAdapters | None = None
        if lora is not None:
            self._adapters = ServerAdapters(self.dialect, lora, model)
        self._names = CheckpointNames(hf_config, trust_remote_code=model.trust_remote_code)
        self._aborts = self._resumed = 0
        self._lost = ""  # why the last update failed, if the server was lost
        self._gate: RequestGate | None = None

    async def start(self, path: str) -> None:
        """Connect, and load the checkpoint at `path` (folder or hub id) into the server."""
        with self._startup_errors():
            await self.connect()
            await self.attach(path)
        self.take_metrics()

    async def come_back(self) -> None:
        """Connect to a server that was lost, and check its reload. The caller gives it weights."""
        with self._startup_errors():
            await self.connect()
            await self.check_reload()

    async def connect(self) -> None:
        """Connect, and check the server's model, settings and log-probabilities.

        This changes no weights, unless an interrupted update left them incomplete. Raises
        UsageError if the server does not answer or does not fit.
        """
        dialect = self.dialect
        with self._startup_errors():
            await dialect.handshake(self.caps)
            info = dialect.info
            self.caps = dataclasses.replace(
                self.caps,
                top_logprobs=info.top_logprobs,
                sizes=info.sizes,
                seeded=info.seeded,
                inexact_dtype=inexact_dtype(dialect.config.dtype, cpu=info.cpu),
            )
            self.version = dialect.version
            if self._adapters is not None:
                await self._adapters.start(info)
            await dialect.claim()
            if dialect.incomplete:
                await self.load_checkpoint(None, 0)
            await check_processed_logprobs(self)

    @contextmanager
    def _startup_errors(self) -> Iterator[None]:
        with self.client.startup_errors(), self.dialect.once.startup_errors():
            yield

    # --- requests ---------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Sample until a stop token or max_tokens.

        If the completion is interrupted, it is resumed from its tokens. Raises TrainingError if
        somebody else aborts it more than rollout.engine.retries times, and EngineLost if a server
        that aborts requests when it shuts down returns no token as often.
        """
        check_sampling(sampling)
        self.dialect.check_sampling(sampling, self.caps)
        self._check_loaded()
        prompt = check_request(
            prompt_ids, sampling, self.caps, version=self.version, vocab=self.dialect.shape.vocab
        ).tolist()
        parts: list[Completion] = []
        path, foreign_aborts = list(prompt), 0
        while True:
            aborts = self._aborts
            part = await self._sample(path, len(path) - len(prompt), sampling, seed)
            if part is not None and len(part.token_ids):
                parts.append(part)
                path += part.token_ids.tolist()
            if parts and path[-1] in sampling.stop:
                return self._join(parts, "stop", sampling)
            if len(path) - len(prompt) == sampling.max_tokens:
                return self._join(parts, "length", sampling)
            # aborted, or the server stopped at an end token of the model
            self._resumed += 1
            foreign_aborts += (
                part is not None and part.finish == "aborted" and aborts == self._aborts
            )
            if foreign_aborts > self.dialect.config.retries:
                raise TrainingError(
                    "rollout.engine.url: somebody else aborted one of our requests "
                    f"{foreign_aborts} times; use a server of this run only"
                )

    async def _sample(
        self, path: list[int], done: int, sampling: Sampling, seed: int
    ) -> Completion | None:
        """Send a request for the rest when it is admitted. Return the reply.

        done: tokens of the path that were sampled. Return None if an update has replaced the
        adapter that the request names.
        """
        dialect, first_row = self.dialect, sampling.routes_from
        if done:  # the last token of a part was never fed: its row comes with the next part
            first_row, seed = len(path) - 1, dialect.seed_of_rest(seed, done)
        rest = dataclasses.replace(sampling, max_tokens=sampling.max_tokens - done)
        confirm = None
        if not dialect.names_weights:
            confirm = self.confirm_weights
        async with self._request_gate().admit_request():
            self._check_loaded()
            aborts = self._aborts
            request = Request(path, rest, seed, first_row, self.version, self._adapter_name)
            try:
                return await self.client.post(
                    dialect.generate_path,
                    dialect.body(request),
                    parse=lambda reply: self._parse(reply, request, aborts),
                    max_bytes=dialect.max_reply_bytes(request),
                    confirm=confirm,
                    tokens=rest.max_tokens,
                )
            except TrainingError as error:
                if request.adapter is None or isinstance(error, EngineLost):
                    raise
                if request.adapter != self._adapter_name:
                    return None
                await self.confirm_weights()  # a restarted server does not know the adapter
                raise

    def _check_loaded(self) -> None:
        """Raise an error if the last update failed: EngineLost if it found the server lost."""
        if self.version < 0:
            if self._lost:
                raise EngineLost(self._lost)
            raise RuntimeError(HALF_LOADED)

    def _parse(self, reply: Any, request: Request, aborts: int) -> Completion:
        """Return the tokens of a reply. aborts: updates that had aborted requests when it was sent.

        Raises MalformedReply for no token, although no update came, from a server that may be
        shutting down. The client then waits, asks again, and raises EngineLost in the end.
        """
        part = self.dialect.parse(reply, request)
        ours = aborts != self._aborts
        if self.dialect.aborts_at_its_end and not len(part.token_ids) and not ours:
            raise MalformedReply("no token, and nothing of ours aborted the request")
        return part

    @property
    def _adapter_name(self) -> str | None:
        if self._adapters is None:
            return None
        return self._adapters.name

    def _join(
        self, parts: list[Completion], finish: FinishReason, sampling: Sampling
    ) -> Completion:
        """Return the completion with the adapter of its last tokens."""
        whole = join_partial_completions(parts, finish, sampling.routes_from)
        adapter = self.adapter
        if self._adapters is not None:
            adapter = parts[-1].adapter
        return dataclasses.replace(whole, adapter=adapter)

    # --- weights ----------------------------------------------------------------------------------

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load all of the model's tensors into the server. With adapters these are the frozen ones.

        Raises TrainingError if the server receives other tensors. Then it stays paused, and the
        engine has no version and answers no requests.
        """
        if self._adapters is not None:
            self._adapters.forget()
        dialect, tensors = self.dialect, self._names.stream_to_checkpoint(weights)
        if dialect.config.sync == "disk":
            # a thread of its own: a fleet's servers read one stream and wait for the slowest
            written = await run_in_daemon_thread(partial(dialect.write_files, tensors, version))
            async with self._update(version):
                await dialect.load_files(*written, version)
        else:
            async with self._update(version):
                await dialect.broadcast(tensors, version, backend=dialect.config.sync)
        if self._adapters is not None:
            self._adapters.lack_base = False

    async def lacks_base(self) -> bool:
        """Return whether the server needs the frozen weights before an adapter.

        It gets them at the start of a run and when it comes back. So they are the learner's.
        """
        return self._adapters is not None and self._adapters.lack_base

    async def load_adapter(self, adapter: AdapterSource, version: int) -> None:
        """Load A and B of the adapter as `version` in place of the last one.

        If the adapter cannot be read, the server and this engine stay as they were.
        """
        assert self._adapters is not None
        place = await self.dialect.prepare_adapter(adapter, version)
        async with self._update(version):
            await self._adapters.load(adapter.name, version, await place())

    async def load_checkpoint(self, path: str | None, version: int) -> None:
        """Load a checkpoint that both processes can read.

        path: None is the checkpoint that the server was started with.
        """
        async with self._update(version):
            await self.dialect.load_checkpoint(path, version)

    async def reset_cache(self) -> None:
        """Drop every cached prefix."""
        assert not self._request_gate().running, "await all requests first"
        await self.confirm_weights()
        await self.dialect.reset_cache()

    async def confirm_weights(self) -> None:
        """Raise EngineLost if the server has other weights than this run loaded last."""
        await self.dialect.confirm_weights()

    async def answers(self) -> bool:
        """Return whether the server answers within seconds. Does not retry."""
        return await self.dialect.once.answers()

    def take_metrics(self) -> dict[str, float]:
        """Return the run's metrics since the last call (run/metrics.toml)."""
        resumed, self._resumed = self._resumed, 0
        return self.client.take_metrics() | {"rollout/requests_resumed": resumed}

    @asynccontextmanager
    async def _update(self, version: int) -> AsyncIterator[None]:
        """Pause the server for weights of `version`, which are loaded inside the context.

        After a failure it stays paused, because its weights belong to no version.
        """
        await self.confirm_weights()
        gate = self._request_gate()
        gate.is_open.clear()
        self._aborts += self.dialect.aborts
        self._lost = ""
        try:
            await self.dialect.begin_update(gate)
            yield
            await self.dialect.end_update(version)
            self.version = version
            await self.confirm_weights()
            await self.dialect.resume()
        except BaseException as error:
            self.version = -1  # waiting requests then see that the engine has no version
            if isinstance(error, EngineLost):
                self._lost = str(error)  # a fleet repeats them elsewhere
            raise
        finally:
            gate.is_open.set()

    def _request_gate(self) -> RequestGate:
        self._gate = RequestGate.for_running_loop(self._gate, self.dialect.config.max_num_seqs)
        return self._gate

    # --- a server that outlasts a run -------------------------------------------------------------
    # A run that finds other weights in it cannot tell a reload that is always wrong from a correct
    # one. So the first run stores a canary of the start-up weights in the server.

    async def attach(self, path: str) -> None:
        """Load the checkpoint at `path` (folder or hub id).

        First the server reloads the weights it was started with. Raises UsageError if their
        log-probabilities are then not those from before any reload. A server that cannot load a
        checkpoint of a run, as on another machine, is sent its tensors.
        """
        if self.has_initial_checkpoint(path):
            await self._initial_canary()
            return
        await self.check_reload()
        if not os.path.exists(path):  # a hub id, or a path of the server's machine
            await self.load_checkpoint(path, 0)
            return
        path = os.path.realpath(path)
        try:
            await self.load_checkpoint(path, 0)
        except (UsageError, TrainingError) as error:
            if self.dialect.config.sync == "disk" or not is_indexed(path):
                raise type(error)(
                    f"{error}. It was to load {path}: if it cannot read that, put the folder where "
                    "both machines see it, or start it with this model"
                ) from error
            LOG.warning("%s could not load %s; it is sent the weights", self.name, path)
            async with self._update(0):
                await self.dialect.broadcast(read_weights(path), 0, backend="gloo")

    def has_initial_checkpoint(self, path: str) -> bool:
        """Return whether the server still has its start-up weights, and they come from `path`."""
        initial = os.path.realpath(self.dialect.info.model)
        return self.dialect.is_initial and initial == os.path.realpath(path)

    async def check_reload(self) -> None:
        """Reload the start-up weights. Raise UsageError if they are others then."""
        initial, vocab = await self._initial_canary(), self.dialect.shape.vocab
        await self.load_checkpoint(None, 0)
        now = await Canary.ask(self, vocab)
        if len(initial) != len(now.logp):
            raise UsageError(
                f"rollout.engine: the server has a canary of {len(initial)} numbers of its "
                f"start-up weights, expected {len(now.logp)}; another version of onepolicy stored "
                "it: restart the server"
            )
        at_start = Canary(self, vocab, torch.tensor(initial), now.noise)
        done = f"rollout.engine: reloading {self.name} with the weights it was started with"
        await at_start.require_same(done, "reload", UsageError, now.logp)

    async def _initial_canary(self) -> list[float]:
        """Return the canary, which the server gets now if it has its start-up weights still."""
        dialect = self.dialect
        if dialect.canary is None:
            if not dialect.is_initial:
                raise UsageError(
                    f"rollout.engine.url: {self.name} holds weights {dialect.weights_id!r}, which "
                    "another program gave it before a run had stored a canary of its start-up "
                    "weights, so that its reload cannot be checked; restart it"
                )
            canary = await canary_logp(self, dialect.shape.vocab)
            await dialect.store_canary(canary.tolist())
        assert dialect.canary is not None
        return dialect.canary
