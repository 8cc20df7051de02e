"""`VLLMServer`: a vLLM server in a process of its own. Implements the RolloutEngine protocol over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from onepolicy.config import ModelConfig, QuantFormat, TrainingError, UsageError, VLLMServerConfig
from onepolicy.config.base import short_repr
from onepolicy.interfaces import EngineCaps, NamedWeights
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
    for_running_loop,
    host_and_port,
    make_clients,
)
from onepolicy.rollout.servers.replies import MalformedReply, get_field
from onepolicy.rollout.servers.start_up import (
    check_probabilities,
    connect_engine,
    refuse_nccl_without_cuda,
)
from onepolicy.rollout.spec import EngineSpec
from onepolicy.rollout.vllm.engine import check_temperature
from onepolicy.rollout.vllm.generate_api import resumed_seed, sampling_params
from onepolicy.rollout.vllm.handshake import (
    INITIAL_WEIGHTS_ID,
    ServerInfo,
    handshake,
    read_weights_id,
)
from onepolicy.sync.broadcast import Sender, UpdateCancelled
from onepolicy.sync.checksum import ChecksumAccumulator, ChecksumTable
from onepolicy.sync.group import local_address, run_in_daemon_thread
from onepolicy.sync.weight_files import WeightFiles
from onepolicy.types import Completion, Sampling

CallWorkers = Callable[..., Awaitable[list[Any]]]
"""A method of rollout/vllm/worker.py and its arguments -> what each worker returned."""


def write_weight_files(
    files: WeightFiles, weights: NamedWeights, version: int
) -> tuple[Path, ChecksumTable]:
    """Files of these tensors, and their checksums."""
    checksums = ChecksumAccumulator()
    folder = files.write_version(checksums.add_each(weights), version)
    return folder, checksums.pop_all()


async def load_weight_files(
    call: CallWorkers, folder: Path, sums: ChecksumTable, version: int
) -> None:
    """TrainingError if a worker has read other bytes than were written."""
    for worker, problem in enumerate(await call("onepolicy_load_files", str(folder), sums)):
        if problem["difference"] is not None:
            raise TrainingError(
                f"rollout.engine.sync_dir: weights of version {version} in {folder}, as worker {worker} of the vLLM "
                f"server read them: {problem['difference']}"
            )


async def broadcast_weights(
    call: CallWorkers,
    weights: NamedWeights,
    version: int,
    *,
    config: VLLMServerConfig,
    workers: int,
) -> None:
    """call: one that tries once, because a broadcast cannot be repeated from one end."""
    assert config.sync != "disk"
    try:
        host = local_address(*host_and_port(config.url))
    except OSError as error:
        raise EngineLost(
            f"rollout.engine.url: the vLLM server at {config.url} cannot be reached: {error}"
        ) from error
    with Sender(
        receivers=workers, backend=config.sync, host=host, timeout_s=config.timeout_s
    ) as sender:

        async def receive() -> list[str]:
            try:
                told = await call("onepolicy_receive", sender.invitation, version)
                problems = [each["problem"] for each in told if each["problem"]]
            except BaseException:
                sender.cancel()  # nobody will come any more
                raise
            if problems:
                sender.cancel()
            return problems

        sending = run_in_daemon_thread(partial(sender.send, weights, version))
        problems, sent = await asyncio.gather(receive(), sending, return_exceptions=True)
        if isinstance(problems, BaseException):
            raise problems
        if problems and isinstance(sent, UpdateCancelled):
            raise TrainingError(problems[0])
        if isinstance(sent, BaseException):
            raise sent


INCOMPLETE = "incomplete"  # ends the name of weights of which some may have come
ABORT_EVERY = 0.1  # s, while requests that reached a paused server are waited for


def build(spec: EngineSpec) -> VLLMServer:
    assert isinstance(spec.config, VLLMServerConfig)
    refuse_nccl_without_cuda(spec)
    server = VLLMServer(
        spec.model,
        read_config(spec.model),
        spec.config,
        route_spec=spec.route_spec,
        max_len=spec.max_len,
        quant=spec.quant,
    )
    asyncio.run(connect_engine(server, server.client, spec.model))
    return server


class VLLMServer:
    """vLLM's replies do not say which weights sampled them, so no request of ours ever spans an update: all are aborted
    before it and go on from their tokens after it."""

    def __init__(
        self,
        model: ModelConfig,
        hf_config: PreTrainedConfig,
        config: VLLMServerConfig,
        *,
        route_spec: RouteSpec | None,
        max_len: int,
        quant: QuantFormat | None = None,
    ) -> None:
        """route_spec: the experts of every token are wanted, of these layers. quant: what the server was started with.
        `connect` before anything else."""
        text = hf_config.get_text_config()
        self.version = 0
        self.caps = EngineCaps(returns_routes=route_spec is not None, max_len=max_len)
        self.client, self._once = make_clients(config, server="the vLLM server")
        self.config, self._text, self._route_spec, self._quant = config, text, route_spec, quant
        self._names = CheckpointNames(hf_config, trust_remote_code=model.trust_remote_code)
        self._files = WeightFiles(config.sync_dir) if config.sync == "disk" else None
        self._run = secrets.token_hex(4)
        self._pauses = 0
        self._resumed = 0
        self._traffic: RequestGate | None = None
        self._served: ServerInfo | None = None
        self._weights = ""  # the server's name of what it was last given

    async def connect(self) -> None:
        """Is the server there, of this model, and does it return what was sampled from? UsageError if not.

        Its weights are its own until load_checkpoint or load_weights.
        """
        self.version = 0
        with self.client.startup_errors():
            served = await handshake(
                self.client, self._text, self.config, self.caps, self._route_spec, self._quant
            )
            self.caps = dataclasses.replace(
                self.caps, top_logprobs=served.top_logprobs, sizes=served.sizes
            )
            self._served, self._weights = served, served.weights
            if served.weights.endswith(
                INCOMPLETE
            ):  # an update broke off: it cannot be asked for anything
                await self.load_checkpoint(None, 0)
            await check_probabilities(self)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Sample until a stop token or max_tokens.

        What a pause interrupts goes on from its tokens, with random numbers that follow from the seed and their
        number. finish is "aborted" only if somebody else aborted the request.
        """
        check_sampling(sampling)
        check_temperature(sampling)
        prompt = check_request(
            prompt_ids, sampling, self.caps, version=self.version, vocab=self._known.reader.vocab
        ).tolist()
        parts: list[Completion] = []
        path = list(prompt)
        while True:
            done = len(path) - len(prompt)
            left = dataclasses.replace(sampling, max_tokens=sampling.max_tokens - done)
            # the last token of a part was never fed: its row comes with the next part
            routed = len(path) - 1 if done else sampling.routes_from
            part, paused = await self._sample(
                path, left, resumed_seed(seed, done) if done else seed, routed
            )
            if len(part.token_ids):
                parts.append(part)
                path += part.token_ids.tolist()
            if part.finish != "aborted" or not paused:
                return join_partial_completions(parts, part.finish, sampling.routes_from)
            self._resumed += 1

    async def pause(self, mode: str = "abort") -> None:
        """Abort every request and take no further ones; those of `generate` wait with their tokens for `resume`."""
        if mode != "abort":
            raise UsageError(
                f"pause: vLLM's replies do not say which weights sampled a token, so a request that is kept over an "
                f"update (mode {mode}) would mix them unseen; use abort, which keeps the tokens and goes on from them"
            )
        traffic = self._here()
        if not traffic.open.is_set():
            return
        traffic.open.clear()
        self._pauses += 1
        await self.client.post("/pause", params={"mode": "abort"})
        while (
            traffic.running
        ):  # one that was on its way is queued until resume: under other weights than it asked for
            try:
                async with asyncio.timeout(ABORT_EVERY):
                    await traffic.idle.wait()
            except TimeoutError:
                await self.client.post("/abort_requests", {})

    async def resume(self) -> None:
        """Let requests run again."""
        await self.client.post("/resume")
        self._here().open.set()

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Give these tensors to the server. All of the model's must be there, in its shapes.

        TrainingError if what arrives is not what was sent; the engine then has no version and answers nothing.
        """
        tensors, files = self._names.stream_to_checkpoint(weights), self._files
        ready = (
            None
            if files is None
            else await asyncio.to_thread(write_weight_files, files, tensors, version)
        )
        async with self._between_requests():
            await self.confirm_weights()
            async with self._replacing(version):
                if ready is not None:
                    await load_weight_files(self.call_workers, *ready, version)
                else:
                    call, workers = (
                        partial(self.call_workers, client=self._once),
                        self._known.workers,
                    )
                    await broadcast_weights(
                        call, tensors, version, config=self.config, workers=workers
                    )

    def has_initial_checkpoint(self, path: str) -> bool:
        """Whether it still has the weights it was started with, and they are those of `path` (folder or hub id)."""
        model = self._known.model
        same = (
            Path(model).resolve() == Path(path).resolve() if Path(path).exists() else model == path
        )
        return same and self._weights == INITIAL_WEIGHTS_ID

    def initial_canary(self) -> list[float] | None:
        """What `remember` was given since the server started. UsageError if it is too late to make one."""
        known = self._known
        if known.first_probe is None and known.weights != INITIAL_WEIGHTS_ID:
            raise UsageError(
                f"rollout.engine.url: the vLLM server at {self.client.url} holds weights {known.weights!r}, which "
                "another program gave it, so that its reload cannot be checked; restart it"
            )
        return known.first_probe

    async def store_initial_canary(self, canary: list[float]) -> None:
        """Keep, in the server, a probe of the weights it was started with, for later runs."""
        await self.call_workers("onepolicy_remember", canary)

    async def load_checkpoint(self, path: str | None, version: int) -> None:
        """A checkpoint both processes see; None: the one the server was started with. No request may be running."""
        async with self._replacing(version):
            await self.call_workers("onepolicy_load", *([] if path is None else [path]))

    async def reset_cache(self) -> None:
        """Forget every cached prefix."""
        if running := self._here().running:
            raise RuntimeError(
                f"reset_cache while {running} requests are running; await them first"
            )
        await self.confirm_weights()
        await self._drop_caches()

    async def confirm_weights(self) -> None:
        """EngineLost if the server holds other weights than were given to it: it was restarted, or shared."""
        found = await read_weights_id(self.client)
        if found != self._weights:
            raise EngineLost(
                f"rollout.engine.url: the vLLM server at {self.client.url} holds weights {found!r}, not this run's "
                f"{self._weights!r}: it was restarted, or another run uses it; continue from the last checkpoint "
                "with `onepolicy train --resume RUN`"
            )

    async def call_workers(
        self, method: str, *args: Any, client: EngineClient | None = None
    ) -> list[Any]:
        """Call a method of rollout/vllm/worker.py on every worker."""
        body = {"method": method, "args": list(args)}
        return await (client or self.client).post(
            "/collective_rpc", body, parse=lambda reply: get_field(reply, "results", list)
        )

    def take_metrics(self) -> dict[str, float]:
        """Since the last call; see run/metric_names.py."""
        resumed, self._resumed = self._resumed, 0
        return self.client.take_metrics() | {"rollout/requests_resumed": resumed}

    @property
    def _known(self) -> ServerInfo:
        if self._served is None:
            raise RuntimeError("VLLMServer: await connect() first")
        return self._served

    async def _sample(
        self, path: list[int], sampling: Sampling, seed: int, first: int
    ) -> tuple[Completion, bool]:
        """One request, when there is room for it and nothing is paused. True: a pause of ours began meanwhile."""
        async with self._here().admit_request():
            if self.version < 0:
                raise RuntimeError(
                    "the last load_weights failed half-way; load a complete set of weights first"
                )
            pauses, known = self._pauses, self._known.reader
            read = partial(
                known.parse, prompt=len(path), first=first, sampling=sampling, version=self.version
            )

            def parse(reply: Any) -> Completion:
                part = read(reply)
                if not len(part.token_ids) and pauses == self._pauses:
                    raise MalformedReply("no token, and nothing of ours aborted the request")
                return part

            body = {
                "token_ids": path,
                "sampling_params": sampling_params(sampling, seed, first=first, vocab=known.vocab),
            }
            most = known.most_bytes(prompt=len(path), sampling=sampling)
            ask = partial(self.client.post, "/inference/v1/generate", body, max_bytes=most)
            part = await ask(parse=parse, confirm=self.confirm_weights)
            return part, pauses != self._pauses

    @asynccontextmanager
    async def _between_requests(self) -> AsyncIterator[None]:
        """Paused, unless it was already. After a failure the server stays paused: what it holds is no policy."""
        traffic = self._here()
        if not traffic.open.is_set():
            yield
            return
        try:
            await self.pause()
            yield
            await self.resume()
        except BaseException:
            traffic.open.set()  # whoever waits finds out
            raise

    @asynccontextmanager
    async def _replacing(self, version: int) -> AsyncIterator[None]:
        """The server is given weights meanwhile; none of its caches outlives them. No request may be running."""
        assert not self._here().running
        self.version = (
            -1
        )  # until the last tensor is in, the model is neither the old nor the new one
        await self._rename(f"onepolicy-{self._run}-{INCOMPLETE}")
        yield
        await self._drop_caches()
        await self._rename(f"onepolicy-{self._run}-{version}")
        self.version = version

    async def _rename(self, weights: str) -> None:
        await self.client.post("/update_weight_version", {"new_version": weights})
        self._weights = weights

    async def _drop_caches(self) -> None:
        def dropped(reply: Any) -> None:
            if not isinstance(reply, dict) or reply.get("success") is not True:
                raise MalformedReply(f"the prefix cache was not reset: {short_repr(reply)}")

        await self.client.post("/reset_prefix_cache", parse=dropped)

    def _here(self) -> RequestGate:
        self._traffic = for_running_loop(self._traffic, self.config.max_num_seqs)
        return self._traffic
