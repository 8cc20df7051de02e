"""`SGLangEngine`: a RolloutEngine that samples from a SGLang server over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from transformers import PreTrainedConfig

from onepolicy.config import ModelConfig, SGLangConfig, TrainingError, UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.interfaces import AdapterSource, EngineCaps, NamedWeights
from onepolicy.models.checkpoint_names import CheckpointNames
from onepolicy.models.load import read_config
from onepolicy.replay.checks import RouteSpec
from onepolicy.rollout.hf.sampler import check_sampling
from onepolicy.rollout.hf.scheduler import check_request
from onepolicy.rollout.resume import join_partial_completions
from onepolicy.rollout.servers.http import EngineLost, RequestGate, make_clients
from onepolicy.rollout.servers.start_up import (
    check_processed_logprobs,
    connect_engine,
    refuse_nccl_without_cuda,
    server_answers,
)
from onepolicy.rollout.sglang import weights as sync
from onepolicy.rollout.sglang.adapters import SGLangAdapters
from onepolicy.rollout.sglang.generate_api import (
    ModelShape,
    SGLangReply,
    SGLangRequest,
    kept_tokens,
    parse_reply,
    uses_top_k_or_top_p,
)
from onepolicy.rollout.sglang.handshake import (
    SGLangServerInfo,
    WeightsId,
    handshake,
    read_weights_id,
)
from onepolicy.rollout.spec import EngineSpec
from onepolicy.sync.canary import inexact_dtype
from onepolicy.sync.weight_files import WeightFiles, num_files
from onepolicy.types import Completion, FinishReason, Sampling

MIN_TEMPERATURE = 1e-6  # SGLang samples greedily below it
FLUSH_TIMEOUT_S = 10  # for the server to clean up requests that have ended


def build(spec: EngineSpec) -> SGLangEngine:
    """Build the engine, connect it and load the model's weights into the server."""
    refuse_nccl_without_cuda(spec)
    engine = make_client(spec)
    asyncio.run(connect_engine(engine, engine.client, spec.model))
    return engine


def make_client(spec: EngineSpec) -> SGLangEngine:
    """Build the engine without connecting it."""
    assert isinstance(spec.config, SGLangConfig)
    return SGLangEngine(
        spec.model,
        read_config(spec.model),
        spec.config,
        route_spec=spec.route_spec,
        max_len=spec.max_len,
        lora=spec.lora,
    )


class SGLangEngine:
    """A RolloutEngine over a SGLang server.

    A request may span a weight update, because SGLang returns the weights that sampled each token.
    """

    def __init__(
        self,
        model: ModelConfig,
        hf_config: PreTrainedConfig,
        config: SGLangConfig,
        *,
        route_spec: RouteSpec | None,
        max_len: int,
        lora: LoraConfig | None = None,
    ) -> None:
        """Make a client. Call `connect` before any other method.

        route_spec: layers whose experts are returned for every token. lora: adapters that the
        server is sent, which it computes with.
        """
        text = hf_config.get_text_config()
        vocab = int(text.vocab_size)
        self.version = 0
        self.caps = EngineCaps(
            returns_routes=route_spec is not None,
            max_len=max_len,
            top_logprobs=vocab,
            weights_dtype=config.dtype,
            takes_adapter=lora is not None,
        )
        self.adapter: str | None = None  # that it samples with, without the version
        self._adapters: SGLangAdapters | None = None
        if lora is not None:
            self._adapters = SGLangAdapters(lora, model, config)
        self.config = config
        self.client, self._client_without_retries = make_clients(config, server="the SGLang server")
        self._model = ModelShape(vocab, int(text.num_hidden_layers), route_spec)
        self._hf_config = hf_config
        self._names = CheckpointNames(hf_config, trust_remote_code=model.trust_remote_code)
        self._files: WeightFiles | None = None
        if config.sync == "disk":
            self._files = WeightFiles(config.sync_dir)
        self._weights_id = WeightsId()
        self._aborts = self._resumed = 0
        self._gate: RequestGate | None = None
        self.server_info: SGLangServerInfo | None = None

    async def connect(self) -> None:
        """Connect, and check the server's model, settings and log-probabilities.

        This changes no weights. Raises UsageError if the server does not answer or does not fit.
        """
        with self.client.startup_errors(), self._client_without_retries.startup_errors():
            info = await handshake(self.client, self._hf_config, self.config, self.caps)
            self.server_info = info
            inexact = inexact_dtype(self.config.dtype, cpu=info.cpu)
            self.caps = dataclasses.replace(self.caps, seeded=info.seeded, inexact_dtype=inexact)
            self.version = info.weights_id.version_number
            if self._adapters is not None:
                await self._adapters.start(self.client, info)
            run = secrets.token_hex(4)
            await self._set_weights_id(dataclasses.replace(info.weights_id, run=run))
            await check_processed_logprobs(self)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Sample until a stop token or max_tokens.

        If a weight update interrupts the completion, it is resumed from its tokens.
        """
        check_sampling(sampling)
        self._check_sampling_support(sampling)
        prompt = check_request(
            prompt_ids, sampling, self.caps, version=self.version, vocab=self._model.vocab
        ).tolist()
        return await self._sample(prompt, sampling, seed)

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load all of the model's tensors into the server. With adapters these are the frozen ones.

        rollout.engine.pause is the mode of running requests. After a failure the server stays
        paused.
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
            folder = await asyncio.to_thread(self._files.write_version, tensors, version)
            limit = self.config.timeout_s * num_files(folder)
            async with self._update(version) as (weights_id, flush):
                await sync.load_from_folder(
                    self.client, str(folder), weights_id, flush=flush, timeout_s=limit
                )
            return
        async with self._update(version) as (weights_id, flush):
            await sync.broadcast_weights(
                self._client_without_retries,
                tensors,
                weights_id,
                backend=self.config.sync,
                ranks=self._connected_info.ranks,
                timeout_s=self.config.timeout_s,
                flush=flush,
                bucket_bytes=self.config.bucket_bytes,
            )

    async def lacks_base(self) -> bool:
        """Return whether the server needs the frozen weights before an adapter.

        It gets them at the start of a run and when it comes back. So they are the learner's.
        """
        return self._adapters is not None and self._adapters.lack_base

    async def load_adapter(self, adapter: AdapterSource, version: int) -> None:
        """Load the adapter as `version` in place of the last one, from files."""
        assert self._adapters is not None
        async with self._update(version) as (weights_id, _):
            await self._adapters.load(self._client_without_retries, adapter, version)
            await self._name_weights(weights_id)
            await self._flush_cache()

    async def load_checkpoint(self, path: str | None, version: int) -> None:
        """Load a checkpoint that both processes can read.

        path: None is the checkpoint that the server was started with.
        """
        folder = path or self._connected_info.model
        async with self._update(version) as (weights_id, flush):
            await sync.load_from_folder(self.client, folder, weights_id, flush=flush)

    def has_initial_checkpoint(self, path: str) -> bool:
        """Return whether the server still has its start-up weights, and they come from `path`."""
        initial = os.path.realpath(self._connected_info.model)
        return self._weights_id.is_initial and initial == os.path.realpath(path)

    def initial_canary(self) -> list[float] | None:
        """Return the stored canary, None if none was stored since the server started.

        Raises UsageError if none was stored and the start-up weights are gone.
        """
        if not self._weights_id.canary and not self._weights_id.is_initial:
            raise UsageError(
                f"rollout.engine.url: the SGLang server at {self.client.url} was given other "
                "weights before a run had stored a canary of its start-up weights; restart it"
            )
        return self._weights_id.canary_values()

    async def store_initial_canary(self, canary: list[float]) -> None:
        await self._set_weights_id(self._weights_id.with_canary(canary))

    async def reset_cache(self) -> None:
        """Drop every cached prefix."""
        assert not self._request_gate().running, "await all requests first"
        await self._flush_cache()

    async def _flush_cache(self) -> None:
        await self.client.post("/flush_cache", params={"timeout": str(FLUSH_TIMEOUT_S)})

    async def answers(self) -> bool:
        """Return whether the server answers now. Does not retry."""
        return await server_answers(self._client_without_retries)

    def take_metrics(self) -> dict[str, float]:
        """Return the run's metrics since the last call (run/metrics.toml)."""
        resumed, self._resumed = self._resumed, 0
        return self.client.take_metrics() | {"rollout/requests_resumed": resumed}

    async def confirm_weights(self) -> None:
        """Raise EngineLost if the server has other weights than this run loaded last."""
        weights_id = await read_weights_id(self.client)
        if weights_id != str(self._weights_id):
            raise self._other_weights_error(weights_id)

    @property
    def _connected_info(self) -> SGLangServerInfo:
        assert self.server_info is not None, "await connect() first"
        return self.server_info

    async def _set_weights_id(self, weights_id: WeightsId) -> None:
        """Rename the server's weights. No request may be running.

        A running request's tokens would seem to be sampled by other weights.
        """
        await self._name_weights(str(weights_id))
        self._weights_id = weights_id

    async def _name_weights(self, weights_id: str) -> None:
        # by default SGLang aborts all requests, of other clients too
        body = {"new_version": weights_id, "abort_all_requests": False}
        await self.client.post("/update_weight_version", body, parse=sync.check_success)

    def _version_of(self, text: str) -> int:
        """Return the version of a weights id. Raise EngineLost if this run did not load it."""
        weights_id, newest = WeightsId.parse(text), self._weights_id
        if weights_id is None or weights_id.run != newest.run:
            raise self._other_weights_error(text)
        if weights_id.version_number > newest.version_number:
            raise self._other_weights_error(text)
        return weights_id.version_number

    def _other_weights_error(self, weights_id: str) -> EngineLost:
        return EngineLost(
            f"rollout.engine.url: the SGLang server at {self.client.url} holds weights "
            f"{weights_id!r}, not this run's '{self._weights_id}': it was restarted, or another "
            "run uses it; continue from the last checkpoint with `onepolicy train --resume RUN`"
        )

    @asynccontextmanager
    async def _update(self, version: int) -> AsyncIterator[tuple[str, bool]]:
        """Pause the server for weights of `version`.

        Yield their id, and whether the load must flush the cache. It must not while requests keep
        their keys and values; the new prefix key then separates later requests from them.
        """
        await self.confirm_weights()
        mode, gate = self.config.pause, self._request_gate()
        weights_id = dataclasses.replace(self._weights_id, version=str(version))
        gate.is_open.clear()
        self._aborts += mode == "abort"
        try:
            await self.client.post("/pause_generation", {"mode": mode})
            yield str(weights_id), mode != "in_place" or not gate.running
            self._weights_id, self.version = weights_id, version
            await self.confirm_weights()
            await self.client.post("/continue_generation", {})
        except BaseException:
            self.version = -1  # neither the old nor the new one
            raise
        finally:
            gate.is_open.set()

    def _request_gate(self) -> RequestGate:
        self._gate = RequestGate.for_running_loop(self._gate, self.config.max_num_seqs)
        return self._gate

    def _check_sampling_support(self, sampling: Sampling) -> None:
        """Raise UsageError if SGLang would sample in another way or not report it."""
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise UsageError(
                f"temperature: SGLang takes {sampling.temperature} for 0; use 0 (greedy) or at "
                f"least {MIN_TEMPERATURE}"
            )
        if sampling.min_p:
            raise UsageError(
                "min_p: SGLang returns the tokens that top_k and top_p leave, not those of min_p; "
                "leave it out"
            )
        if not uses_top_k_or_top_p(sampling):
            return
        limit = 0
        if self.server_info is not None:
            limit = self.server_info.max_masked_tokens
        if kept_tokens(sampling, self._model.vocab) > limit:
            fix = "start the server with a larger --sampling-mask-max-tokens"
            if limit:
                fix = f"set top_k to 1..{limit} beside top_p, or {fix}"
            raise UsageError(
                "top_k: SGLang returns the log-probabilities of a narrowed distribution for up to "
                f"{limit} tokens; {fix}"
            )
        if sampling.top_logprobs:
            raise UsageError(
                "top_logprobs: SGLang returns those of the whole distribution; leave out top_k and "
                "top_p"
            )

    async def _sample(self, prompt: list[int], sampling: Sampling, seed: int) -> Completion:
        parts: list[SGLangReply] = []
        path, foreign_aborts = list(prompt), 0
        while True:
            done = len(path) - len(prompt)
            rest = dataclasses.replace(sampling, max_tokens=sampling.max_tokens - done)
            first_row = sampling.routes_from
            if parts:  # the last token of a part was never fed: its row comes with the next part
                first_row = len(path) - 1
            async with self._request_gate().admit_request():
                aborts, request = self._aborts, self._make_request(path, rest, seed, first_row)
                part = await self._post_generate(request)
            if part is None:  # an update unloaded its adapter before the server saw the request
                self._resumed += 1
                continue
            if len(part.token_ids):
                parts.append(part)
                path += part.token_ids.tolist()
            if parts and path[-1] in sampling.stop:
                return self._join(parts, "stop", sampling, request)
            if len(path) - len(prompt) == sampling.max_tokens:
                return self._join(parts, "length", sampling, request)
            self._resumed += 1  # aborted, or SGLang stopped at an end token of the model
            foreign_aborts += part.aborted and aborts == self._aborts
            if foreign_aborts > self.config.retries:
                raise TrainingError(
                    "rollout.engine.url: somebody else aborted one of our requests "
                    f"{foreign_aborts} times; use a server of this run only"
                )

    def _join(
        self,
        parts: list[SGLangReply],
        finish: FinishReason,
        sampling: Sampling,
        request: SGLangRequest,
    ) -> Completion:
        """Return the completion with the adapter that its last request named, or of the weights."""
        whole = join_partial_completions(parts, finish, sampling.routes_from)
        adapter = self.adapter
        if self._adapters is not None:
            adapter = None
            if request.adapter is not None:
                adapter = request.adapter.rpartition("@")[0]
        return dataclasses.replace(whole, adapter=adapter)

    def _make_request(
        self, path: list[int], sampling: Sampling, seed: int, first_row: int
    ) -> SGLangRequest:
        if self.version < 0:
            raise RuntimeError(
                "the last load_weights failed half-way; load a complete set of weights first"
            )
        adapter: str | None = None
        if self._adapters is not None:
            adapter = self._adapters.name
        prefix_key = self._weights_id.prefix_key
        return SGLangRequest(path, sampling, seed, first_row, self.version, prefix_key, adapter)

    async def _post_generate(self, request: SGLangRequest) -> SGLangReply | None:
        """Return the reply, None if an update has replaced the adapter that the request names."""
        try:
            part = await self.client.post(
                "/generate",
                request.body(self._model),
                parse=lambda reply: parse_reply(reply, request, self._model, self._version_of),
                max_bytes=request.max_reply_bytes(self._model),
                tokens=request.sampling.max_tokens,
            )
            if self._adapters is not None:
                self._adapters.check_reply(part.version, request.adapter)
            return part
        except EngineLost:
            raise
        except TrainingError:
            if self._adapters is None or request.adapter in (None, self._adapters.name):
                raise
            return None
