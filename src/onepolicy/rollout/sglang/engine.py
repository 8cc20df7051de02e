"""`SGLangEngine`: a SGLang server in a process of its own. Implements the RolloutEngine protocol over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from transformers import PreTrainedConfig

from onepolicy.config import ModelConfig, SGLangConfig, TrainingError, UsageError
from onepolicy.interfaces import EngineCaps, NamedWeights
from onepolicy.models.checkpoint_names import CheckpointNames
from onepolicy.models.load import read_config
from onepolicy.replay.checks import RouteSpec
from onepolicy.rollout.hf.sampler import check_sampling
from onepolicy.rollout.hf.scheduler import check_request
from onepolicy.rollout.resume import join_partial_completions
from onepolicy.rollout.servers.http import EngineLost, RequestGate, for_running_loop, make_clients
from onepolicy.rollout.servers.start_up import (
    check_probabilities,
    connect_engine,
    refuse_nccl_without_cuda,
)
from onepolicy.rollout.sglang import weights as sync
from onepolicy.rollout.sglang.generate_api import (
    ModelShape,
    SGLangReply,
    SGLangRequest,
    parse_reply,
    uses_top_k_or_top_p,
)
from onepolicy.rollout.sglang.handshake import (
    INITIAL_VERSION,
    ServerInfo,
    WeightsId,
    handshake,
    read_weights_id,
)
from onepolicy.rollout.spec import EngineSpec
from onepolicy.sync.weight_files import WeightFiles
from onepolicy.types import Completion, Sampling

COLDEST = 1e-6  # SGLang takes lower temperatures for greedy
FLUSH_S = 10  # a request that ended may take the server a moment to clear away


def build(spec: EngineSpec) -> SGLangEngine:
    assert isinstance(spec.config, SGLangConfig)
    refuse_nccl_without_cuda(spec)
    engine = SGLangEngine(
        spec.model,
        read_config(spec.model),
        spec.config,
        route_spec=spec.route_spec,
        max_len=spec.max_len,
    )
    asyncio.run(connect_engine(engine, engine.client, spec.model))
    return engine


class SGLangEngine:
    """Requests may span a weight update; SGLang says which weights sampled which token."""

    def __init__(
        self,
        model: ModelConfig,
        hf_config: PreTrainedConfig,
        config: SGLangConfig,
        *,
        route_spec: RouteSpec | None,
        max_len: int,
    ) -> None:
        """route_spec: the experts of every token are wanted, of these layers. `connect` before anything else."""
        text = hf_config.get_text_config()
        vocab = int(text.vocab_size)
        self.version = 0
        self.caps = EngineCaps(
            returns_routes=route_spec is not None, max_len=max_len, top_logprobs=vocab
        )
        self.config = config
        self.client, self._once = make_clients(config, server="the SGLang server")
        self._model = ModelShape(vocab, int(text.num_hidden_layers), route_spec)
        self._hf_config = hf_config
        self._names = CheckpointNames(hf_config, trust_remote_code=model.trust_remote_code)
        self._files = WeightFiles(config.sync_dir) if config.sync == "disk" else None
        self._name = WeightsId()
        self._aborts = self._resumed = 0
        self._traffic: RequestGate | None = None
        self.served: ServerInfo | None = None

    async def connect(self) -> None:
        """Is the server there, of this model, and does it return what was sampled from? UsageError if not.

        Its weights are its own until load_checkpoint or load_weights.
        """
        with self.client.startup_errors(), self._once.startup_errors():
            self.served = await handshake(self.client, self._hf_config, self.config, self.caps)
            self.caps = dataclasses.replace(self.caps, seeded=self.served.seeded)
            self.version = self.served.name.version
            await self._rename(dataclasses.replace(self.served.name, run=secrets.token_hex(4)))
            await check_probabilities(self)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Sample until a stop token or max_tokens. What an update interrupts goes on from its tokens."""
        check_sampling(sampling)
        self._check(sampling)
        prompt = check_request(
            prompt_ids, sampling, self.caps, version=self.version, vocab=self._model.vocab
        ).tolist()
        return await self._sample(prompt, sampling, seed)

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Give these tensors to the server. All of the model's must be there, in its shapes.

        rollout.engine.pause says what becomes of requests that are running. After a failure the server stays paused.
        """
        folder = tensors = None
        if self._files is not None:
            folder = await asyncio.to_thread(
                self._files.write_version, self._names.stream_to_checkpoint(weights), version
            )
        else:
            tensors = self._names.to_checkpoint(weights)
        async with self._update(version) as (name, flush):
            if folder is not None:
                await sync.load_from_folder(self.client, str(folder), name, flush=flush)
            else:
                assert self.served is not None
                assert tensors is not None
                await sync.broadcast_weights(
                    self._once,
                    tensors,
                    name,
                    backend=self.config.sync,
                    ranks=self.served.ranks,
                    timeout_s=self.config.timeout_s,
                    flush=flush,
                )

    async def load_checkpoint(self, path: str | None, version: int) -> None:
        """A checkpoint both processes see; None: the one the server was started with."""
        assert self.served is not None
        async with self._update(version) as (name, flush):
            await sync.load_from_folder(self.client, path or self.served.model, name, flush=flush)

    def has_initial_checkpoint(self, path: str) -> bool:
        """Whether it still has the weights it was started with, and they are those of `path`."""
        assert self.served is not None
        return self._name.weights == INITIAL_VERSION and os.path.realpath(
            self.served.model
        ) == os.path.realpath(path)

    def initial_canary(self) -> list[float] | None:
        """What `remember` was given since the server started. UsageError if it is too late to make one."""
        if not self._name.probe and self._name.weights != INITIAL_VERSION:
            raise UsageError(
                f"rollout.engine.url: the SGLang server at {self.client.url} was given other weights before a run had "
                "probed those it was started with; restart it"
            )
        return self._name.initial_canary()

    async def store_initial_canary(self, canary: list[float]) -> None:
        """The name of its weights is all that a server keeps for us."""
        await self._rename(self._name.with_probe(canary))

    async def reset_cache(self) -> None:
        """Forget every cached prefix."""
        if running := self._here().running:
            raise RuntimeError(
                f"reset_cache while {running} requests are running; await them first"
            )
        await self.client.post("/flush_cache", params={"timeout": str(FLUSH_S)})

    def take_metrics(self) -> dict[str, float]:
        """Since the last call; see run/metric_names.py."""
        resumed, self._resumed = self._resumed, 0
        return self.client.take_metrics() | {"rollout/requests_resumed": resumed}

    async def _rename(self, name: WeightsId) -> None:
        """Not while requests are running: their tokens would seem to be of other weights."""
        body = {
            "new_version": str(name),
            "abort_all_requests": False,
        }  # by default it aborts all, whoever's
        await self.client.post("/update_weight_version", body, parse=sync.check_success)
        self._name = name

    def _version_of(self, name: str) -> int:
        found = WeightsId.parse(name)
        if found is None or found.run != self._name.run:
            raise self._not_ours(name)
        return found.version

    def _not_ours(self, name: str) -> EngineLost:
        return EngineLost(
            f"rollout.engine.url: the SGLang server at {self.client.url} holds weights {name!r}, not this run's "
            f"'{self._name}': it was restarted, or another run uses it; continue from the last checkpoint with "
            "`onepolicy train --resume RUN`"
        )

    async def confirm_weights(self) -> None:
        """EngineLost if the server holds other weights than were given to it."""
        if (name := await read_weights_id(self.client)) != str(self._name):
            raise self._not_ours(name)

    @asynccontextmanager
    async def _update(self, version: int) -> AsyncIterator[tuple[str, bool]]:
        """The server takes weights of `version` meanwhile. Yields their name, and whether to flush the cache with them.

        Requests that keep their keys and values rule that out; the key of prefixes keeps later ones apart from them.
        """
        await self.confirm_weights()
        mode, name, traffic = (
            self.config.pause,
            dataclasses.replace(self._name, weights=str(version)),
            self._here(),
        )
        traffic.open.clear()
        self._aborts += mode == "abort"
        try:
            await self.client.post("/pause_generation", {"mode": mode})
            yield str(name), mode != "in_place" or not traffic.running
            self._name, self.version = name, version
            await self.confirm_weights()
            await self.client.post("/continue_generation", {})
        except BaseException:
            self.version = -1  # neither the old nor the new one
            raise
        finally:
            traffic.open.set()

    def _here(self) -> RequestGate:
        self._traffic = for_running_loop(self._traffic, self.config.max_num_seqs)
        return self._traffic

    def _check(self, sampling: Sampling) -> None:
        """UsageError for what SGLang would do in another way, or not report."""
        if 0 < sampling.temperature < COLDEST:
            raise UsageError(
                f"temperature: SGLang takes {sampling.temperature} for 0; use 0 (greedy) or at least {COLDEST}"
            )
        most = 0 if self.served is None else self.served.masked
        if uses_top_k_or_top_p(sampling) and not (sampling.top_k or self._model.vocab) <= most:
            raise UsageError(
                f"top_k: SGLang returns the log-probabilities of a narrowed distribution for up to {most} tokens; set "
                f"top_k to 1..{most} beside top_p, or start the server with a larger --sampling-mask-max-tokens"
            )
        if uses_top_k_or_top_p(sampling) and sampling.top_logprobs:
            raise UsageError(
                "top_logprobs: SGLang returns those of the whole distribution; leave out top_k and top_p"
            )

    async def _sample(self, prompt: list[int], sampling: Sampling, seed: int) -> Completion:
        parts: list[SGLangReply] = []
        path, strangers = list(prompt), 0
        while True:
            left = dataclasses.replace(
                sampling, max_tokens=len(prompt) + sampling.max_tokens - len(path)
            )
            # the last token of a part was never fed: its row and what follows come with the next part
            first_row = len(path) - 1 if parts else sampling.routes_from
            async with self._here().admit_request():
                aborts = self._aborts
                part = await self._ask(path, left, seed, first_row)
            if len(part.token_ids):
                parts.append(part)
                path += part.token_ids.tolist()
            if parts and path[-1] in sampling.stop:
                return join_partial_completions(parts, "stop", sampling.routes_from)
            if len(path) - len(prompt) == sampling.max_tokens:
                return join_partial_completions(parts, "length", sampling.routes_from)
            self._resumed += 1  # aborted, or it took one of the model's own end tokens for a stop
            strangers += part.aborted and aborts == self._aborts
            if strangers > self.config.retries:
                raise TrainingError(
                    f"rollout.engine.url: somebody else aborted one of our requests {strangers} times"
                )

    async def _ask(
        self, path: list[int], sampling: Sampling, seed: int, first_row: int
    ) -> SGLangReply:
        if self.version < 0:
            raise RuntimeError(
                "the last load_weights failed half-way; load a complete set of weights first"
            )
        asked = SGLangRequest(path, sampling, seed, first_row, self.version, self._name.key)
        return await self.client.post(
            "/generate",
            asked.body(self._model),
            parse=lambda reply: parse_reply(reply, asked, self._model, self._version_of),
            max_bytes=asked.most_bytes(self._model),
        )
