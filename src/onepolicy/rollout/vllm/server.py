"""`VLLMServer`: a RolloutEngine that samples from a vLLM server over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from onepolicy.config import (
    ModelConfig,
    QuantFormat,
    TrainingError,
    UsageError,
    VLLMServerConfig,
)
from onepolicy.config.lora import LoraConfig
from onepolicy.errors import short_repr
from onepolicy.interfaces import AdapterSource, EngineCaps, NamedWeights
from onepolicy.models.checkpoint_names import CheckpointNames
from onepolicy.models.load import read_config
from onepolicy.replay.checks import RouteSpec
from onepolicy.rollout.hf.sampler import check_sampling
from onepolicy.rollout.hf.scheduler import check_request
from onepolicy.rollout.resume import join_partial_completions
from onepolicy.rollout.servers.http import (
    EngineClient,
    EngineLost,
    RequestGate,
    make_clients,
)
from onepolicy.rollout.servers.replies import MalformedReply
from onepolicy.rollout.servers.start_up import (
    check_processed_logprobs,
    connect_engine,
    refuse_nccl_without_cuda,
    server_answers,
)
from onepolicy.rollout.spec import EngineSpec
from onepolicy.rollout.vllm.engine import check_temperature
from onepolicy.rollout.vllm.generate_api import (
    requested_logprobs,
    resumed_seed,
    sampling_params,
)
from onepolicy.rollout.vllm.handshake import (
    INITIAL_WEIGHTS_ID,
    VLLMServerInfo,
    handshake,
    read_weights_id,
)
from onepolicy.rollout.vllm.server_adapters import ServerAdapters, read_adapter
from onepolicy.rollout.vllm.weight_update import (
    broadcast_adapter,
    broadcast_weights,
    load_weight_files,
    read_results,
    write_adapter_files,
    write_weight_files,
)
from onepolicy.sync.canary import inexact_dtype
from onepolicy.sync.weight_files import WeightFiles, num_files
from onepolicy.types import Completion, Sampling

INCOMPLETE = "incomplete"  # suffix of the id of weights of which only some may be loaded
ABORT_INTERVAL_S = 0.1  # while requests on a paused server end


def build(spec: EngineSpec) -> VLLMServer:
    """Build the engine, connect it and load the model's weights into the server."""
    refuse_nccl_without_cuda(spec)
    server = make_client(spec)
    asyncio.run(connect_engine(server, server.client, spec.model))
    return server


def make_client(spec: EngineSpec) -> VLLMServer:
    """Build the engine without connecting it."""
    assert isinstance(spec.config, VLLMServerConfig)
    return VLLMServer(
        spec.model,
        read_config(spec.model),
        spec.config,
        route_spec=spec.route_spec,
        max_len=spec.max_len,
        quant=spec.quant,
        lora=spec.lora,
    )


class VLLMServer:
    """A RolloutEngine over a vLLM server.

    vLLM does not return which weights sampled a token. So no request spans a weight update: all are
    aborted before it and resumed from their tokens after it.
    """

    def __init__(
        self,
        model: ModelConfig,
        hf_config: PreTrainedConfig,
        config: VLLMServerConfig,
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
        self.adapter: str | None = None  # that it samples with, without the version
        self._adapters: ServerAdapters | None = None
        if lora is not None:
            self._adapters = ServerAdapters(lora, model, config.one_url)
        self.client, self._client_without_retries = make_clients(config, server="the vLLM server")
        self.config, self._text = config, hf_config.get_text_config()
        self._route_spec, self._quant = route_spec, quant
        self._names = CheckpointNames(hf_config, trust_remote_code=model.trust_remote_code)
        self._files: WeightFiles | None = None
        if config.sync == "disk":
            self._files = WeightFiles(config.sync_dir)
        self._run = secrets.token_hex(4)
        self._pauses = 0
        self._resumed = 0
        self._gate: RequestGate | None = None
        self._server_info: VLLMServerInfo | None = None
        self._weights_id = ""  # of the weights that were loaded last

    async def connect(self) -> None:
        """Connect, and check the server's model, settings and log-probabilities.

        This changes no weights, unless an interrupted update left them incomplete. Raises
        UsageError if the server does not answer or does not fit.
        """
        self.version = 0
        with self.client.startup_errors():
            info = await handshake(
                self.client, self._text, self.config, self.caps, self._route_spec, self._quant
            )
            self.caps = dataclasses.replace(
                self.caps,
                top_logprobs=info.top_logprobs,
                sizes=info.sizes,
                inexact_dtype=inexact_dtype(self.config.dtype, cpu=info.cpu),
            )
            self._server_info, self._weights_id = info, info.weights_id
            if self._adapters is not None:
                await self._adapters.start(self.client, info)
            if info.weights_id.endswith(INCOMPLETE):
                await self.load_checkpoint(None, 0)
            await check_processed_logprobs(self)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Sample until a stop token or max_tokens.

        If a pause interrupts the completion, it is resumed from its tokens. Its later random
        numbers follow from the seed and the number of tokens. finish is "aborted" only if somebody
        else aborted the request.
        """
        check_sampling(sampling)
        check_temperature(sampling)
        vocab = self._connected_info.reply_parser.vocab
        wanted = requested_logprobs(sampling, vocab)
        if wanted > max(self.caps.top_logprobs, sampling.top_logprobs):
            raise UsageError(
                f"rollout.sampling.top_k: {sampling.top_k} and ties are up to {wanted} "
                f"log-probabilities, but the server returns at most {self.caps.top_logprobs}; "
                "lower it, or start the server with a larger --max-logprobs"
            )
        prompt = check_request(
            prompt_ids, sampling, self.caps, version=self.version, vocab=vocab
        ).tolist()
        parts: list[Completion] = []
        path = list(prompt)
        part_seed, first = seed, sampling.routes_from
        while True:
            done = len(path) - len(prompt)
            if done:  # the last token of a part was never fed: its row comes with the next part
                part_seed, first = resumed_seed(seed, done), len(path) - 1
            rest = dataclasses.replace(sampling, max_tokens=sampling.max_tokens - done)
            part, paused = await self._sample(path, rest, part_seed, first)
            if len(part.token_ids):
                parts.append(part)
                path += part.token_ids.tolist()
            if part.finish != "aborted" or not paused:
                whole = join_partial_completions(parts, part.finish, sampling.routes_from)
                adapter = self.adapter
                if self._adapters is not None:
                    adapter = part.adapter  # that the server says
                return dataclasses.replace(whole, adapter=adapter)
            self._resumed += 1

    async def pause(self, mode: str = "abort") -> None:
        """Abort every request and admit no further ones.

        Calls of `generate` keep their tokens and wait for `resume`.
        """
        if mode != "abort":
            raise UsageError(
                "pause: vLLM's replies do not say which weights sampled a token, so a request that "
                f"is kept over an update (mode {mode}) would mix them unseen; use abort, which "
                "keeps the tokens and goes on from them"
            )
        gate = self._request_gate()
        if not gate.is_open.is_set():
            return
        gate.is_open.clear()
        self._pauses += 1
        await self.client.post("/pause", params={"mode": "abort"})
        # A request may arrive after the pause. The server would queue it and run it with newer
        # weights than it was sent for, so abort it.
        while gate.running:
            try:
                async with asyncio.timeout(ABORT_INTERVAL_S):
                    await gate.all_done.wait()
            except TimeoutError:
                await self.client.post("/abort_requests", {})

    async def resume(self) -> None:
        """Admit requests again."""
        await self.client.post("/resume")
        self._request_gate().is_open.set()

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load all of the model's tensors into the server. With adapters these are the frozen ones.

        Raises TrainingError if the server receives other tensors. Then the engine has no version
        and answers no requests.
        """
        if self._adapters is None:
            await self._load_whole(weights, version)
            return
        self._adapters.forget()
        await self._load_whole(weights, version)
        self._adapters.lack_base = False

    async def _load_whole(self, weights: NamedWeights, version: int) -> None:
        tensors = self._names.stream_to_checkpoint(weights)
        if self._files is not None:
            folder, sums = await asyncio.to_thread(
                write_weight_files, self._files, tensors, version
            )
            async with self._update(version):
                limit = self.config.timeout_s * num_files(folder)
                call = partial(self.call_workers, timeout_s=limit)
                await load_weight_files(call, folder, sums, version)
            return
        call = partial(self.call_workers, client=self._client_without_retries, timeout_s=math.inf)
        async with self._update(version):
            workers = self._connected_info.workers
            await broadcast_weights(call, tensors, version, config=self.config, workers=workers)

    async def lacks_base(self) -> bool:
        """Return whether the server needs the frozen weights before an adapter.

        It gets them at the start of a run and when it comes back. So they are the learner's.
        """
        return self._adapters is not None and self._adapters.lack_base

    async def load_adapter(self, adapter: AdapterSource, version: int) -> None:
        """Load A and B of the adapter as `version` in place of the last one."""
        assert self._adapters is not None
        tensors, settings = read_adapter(adapter)
        async with self._update(version):
            if self._files is not None:
                folder = await write_adapter_files(
                    self.call_workers, self._files, tensors, version, settings
                )
            else:
                client = self._client_without_retries
                call = partial(self.call_workers, client=client, timeout_s=math.inf)
                folder = await broadcast_adapter(
                    call, tensors, version, settings, config=self.config
                )
            await self._adapters.load(self._client_without_retries, adapter.name, version, folder)

    def has_initial_checkpoint(self, path: str) -> bool:
        """Return whether the server still has its start-up weights, and they come from `path`.

        path: folder or hub id.
        """
        model = self._connected_info.model
        same = model == path
        if Path(path).exists():
            same = Path(model).resolve() == Path(path).resolve()
        return same and self._weights_id == INITIAL_WEIGHTS_ID

    def initial_canary(self) -> list[float] | None:
        """Return the stored canary, None if none was stored since the server started.

        Raises UsageError if none was stored and the start-up weights are gone.
        """
        info = self._connected_info
        if info.initial_canary is None and info.weights_id != INITIAL_WEIGHTS_ID:
            raise UsageError(
                f"rollout.engine.url: the vLLM server at {self.client.url} holds weights "
                f"{info.weights_id!r}, which another program gave it, so that its reload cannot be "
                "checked; restart it"
            )
        return info.initial_canary

    async def store_initial_canary(self, canary: list[float]) -> None:
        """Store a canary of the start-up weights in the server, for later runs."""
        await self.call_workers("onepolicy_remember", canary)

    async def load_checkpoint(self, path: str | None, version: int) -> None:
        """Load a checkpoint that both processes can read. No request may be running.

        path: None is the checkpoint that the server was started with.
        """
        arguments: list[str] = []
        if path is not None:
            arguments.append(path)
        async with self._replace_weights(version):
            await self.call_workers("onepolicy_load", *arguments)

    async def reset_cache(self) -> None:
        """Drop every cached prefix."""
        assert not self._request_gate().running, "await all requests first"
        await self.confirm_weights()
        await self._reset_prefix_cache()

    async def confirm_weights(self) -> None:
        """Raise EngineLost if the server has other weights than this run loaded last."""
        found = await read_weights_id(self.client)
        if found != self._weights_id:
            raise EngineLost(
                f"rollout.engine.url: the vLLM server at {self.client.url} holds weights "
                f"{found!r}, not this run's {self._weights_id!r}: it was restarted, or another run "
                "uses it; continue from the last checkpoint with `onepolicy train --resume RUN`"
            )

    async def call_workers(
        self,
        method: str,
        *args: Any,
        client: EngineClient | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call a method of rollout/vllm/worker.py on every worker. Return their results.

        timeout_s: of the call; None: rollout.engine.timeout_s.
        """
        body = {"method": method, "args": list(args)}
        return await (client or self.client).post(
            "/collective_rpc",
            body,
            parse=partial(read_results, method=method, workers=self._connected_info.workers),
            timeout_s=timeout_s,
        )

    async def answers(self) -> bool:
        """Return whether the server answers now. Does not retry."""
        return await server_answers(self._client_without_retries)

    def take_metrics(self) -> dict[str, float]:
        """Return the run's metrics since the last call (run/metrics.toml)."""
        resumed, self._resumed = self._resumed, 0
        return self.client.take_metrics() | {"rollout/requests_resumed": resumed}

    @property
    def _connected_info(self) -> VLLMServerInfo:
        assert self._server_info is not None, "await connect() first"
        return self._server_info

    async def _sample(
        self, path: list[int], sampling: Sampling, seed: int, first: int
    ) -> tuple[Completion, bool]:
        """Send one request when it is admitted. Return the reply, and whether a pause came."""
        async with self._request_gate().admit_request():
            if self.version < 0:
                raise RuntimeError(
                    "the last load_weights failed half-way; load a complete set of weights first"
                )
            pauses, version = self._pauses, self.version
            named = None
            if self._adapters is not None:
                named = self._adapters.name
            parser = self._connected_info.reply_parser

            def parse(reply: Any) -> Completion:
                part = parser.parse(
                    reply, prompt=len(path), first=first, sampling=sampling, version=version
                )
                if not len(part.token_ids) and pauses == self._pauses:
                    raise MalformedReply("no token, and nothing of ours aborted the request")
                if self._adapters is None:
                    return part
                return self._adapters.read_reply(part, reply, named)

            params = sampling_params(sampling, seed, first=first, vocab=parser.vocab)
            body: dict[str, Any] = {"token_ids": path, "sampling_params": params}
            if named is not None:
                body["model"] = named
            try:
                part = await self.client.post(
                    "/inference/v1/generate",
                    body,
                    parse=parse,
                    max_bytes=parser.max_reply_bytes(prompt=len(path), sampling=sampling),
                    confirm=self.confirm_weights,
                    tokens=sampling.max_tokens,
                )
            except TrainingError as error:
                if named is not None and not isinstance(error, EngineLost):
                    await self.confirm_weights()  # a restarted server does not know the adapter
                raise
            return part, pauses != self._pauses

    @asynccontextmanager
    async def _update(self, version: int) -> AsyncIterator[None]:
        """Pause the server for weights of `version`."""
        async with self._paused():
            await self.confirm_weights()
            async with self._replace_weights(version):
                yield

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause the server, unless it is paused already.

        After a failure the server stays paused, because its weights belong to no version.
        """
        gate = self._request_gate()
        if not gate.is_open.is_set():
            yield
            return
        try:
            await self.pause()
            yield
            await self.resume()
        except BaseException:
            gate.is_open.set()  # waiting requests then see that the engine has no version
            raise

    @asynccontextmanager
    async def _replace_weights(self, version: int) -> AsyncIterator[None]:
        """Mark the weights incomplete inside the context, and drop caches at its end.

        No request may be running.
        """
        assert not self._request_gate().running
        self.version = -1  # until the last tensor is loaded
        await self._set_weights_id(f"onepolicy-{self._run}-{INCOMPLETE}")
        yield
        await self._reset_prefix_cache()
        await self._set_weights_id(f"onepolicy-{self._run}-{version}")
        self.version = version

    async def _set_weights_id(self, weights_id: str) -> None:
        await self.client.post("/update_weight_version", {"new_version": weights_id})
        self._weights_id = weights_id

    async def _reset_prefix_cache(self) -> None:
        def check_reset(reply: Any) -> None:
            if not isinstance(reply, dict) or reply.get("success") is not True:
                raise MalformedReply(f"the prefix cache was not reset: {short_repr(reply)}")

        await self.client.post("/reset_prefix_cache", parse=check_reset)

    def _request_gate(self) -> RequestGate:
        self._gate = RequestGate.for_running_loop(self._gate, self.config.max_num_seqs)
        return self._gate
