"""vLLM's server, started by `onepolicy engine serve`."""

from __future__ import annotations

import asyncio
import math
import secrets
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from onepolicy.config import ModelConfig, TrainingError, UsageError, VLLMServerConfig
from onepolicy.config.lora import LoraConfig
from onepolicy.interfaces import AdapterSource, EngineCaps, NamedWeights
from onepolicy.models.checksum import ChecksumAccumulator, ChecksumTable
from onepolicy.replay.payloads.vllm import RoutePayloadFormat
from onepolicy.rollout.remote.client import EngineClient, RequestGate
from onepolicy.rollout.remote.dialect import Dialect, PlaceAdapter, Request
from onepolicy.rollout.remote.dialects.vllm_handshake import handshake
from onepolicy.rollout.remote.dialects.vllm_replies import (
    parse_reply,
    requested_logprobs,
    resumed_seed,
    sampling_params,
)
from onepolicy.rollout.remote.replies import MalformedReply, Reply, Results, check_success
from onepolicy.rollout.remote.update_ends import run_both_ends, sender_address
from onepolicy.rollout.vllm.adapter import layer_names
from onepolicy.rollout.vllm.engine import check_temperature
from onepolicy.rollout.vllm.served_adapter import CONFIG, WEIGHTS
from onepolicy.sync.broadcast import Sender
from onepolicy.sync.group import run_in_daemon_thread
from onepolicy.sync.weight_files import WeightFiles, num_files
from onepolicy.types import Completion, Sampling

INITIAL = "default"  # vLLM's name of its start-up weights
INCOMPLETE = "incomplete"  # suffix of the name of weights of which only some may be loaded
ABORT_INTERVAL_S = 0.1  # while requests on a paused server end


class _WeightInfo(Reply):
    weight_version: str


class _Read(Reply):
    difference: str | None  # of what a worker read from what was written


class _Received(Reply):
    problem: str | None


class _AdapterRead(_Read):
    folder: str | None  # where the worker put it


class _AdapterReceived(_Received):
    folder: str | None


REPORTS: dict[str, type[Reply]] = {
    "onepolicy_load_files": _Read,
    "onepolicy_receive": _Received,
    "onepolicy_receive_adapter": _AdapterReceived,
    "onepolicy_read_adapter": _AdapterRead,
}
"""Worker method -> what each worker reports."""


class VLLMDialect(Dialect):
    """A vLLM server.

    Its replies do not say which weights sampled a token. So no request spans a weight update: all
    are aborted before it.
    """

    server = "the vLLM server"
    generate_path = "/inference/v1/generate"
    names_weights = False
    aborts_at_its_end = True

    config: VLLMServerConfig
    weights_id = ""
    version = 0
    canary: list[float] | None = None
    _format: RoutePayloadFormat

    async def handshake(self, caps: EngineCaps) -> None:
        self.info, self._format, self.canary = await handshake(
            self.client, self.hf_config, self.config, caps, self.shape, self.quant
        )
        self._run = secrets.token_hex(4)
        self.weights_id = await self.read_weights_id()

    async def claim(self) -> None:
        """Do nothing: the first update renames the weights."""

    async def read_weights_id(self) -> str:
        return (await self.client.get("/weight_info", parse=_WeightInfo.read)).weight_version

    @property
    def is_initial(self) -> bool:
        return self.weights_id == INITIAL

    @property
    def incomplete(self) -> bool:
        return self.weights_id.endswith(INCOMPLETE)

    async def store_canary(self, canary: list[float]) -> None:
        await self.call_workers("onepolicy_remember", canary)
        self.canary = canary

    # --- requests ---------------------------------------------------------------------------------

    def check_sampling(self, sampling: Sampling, caps: EngineCaps) -> None:
        check_temperature(sampling)
        wanted = self.num_likeliest(sampling)
        if wanted > max(caps.top_logprobs, sampling.top_logprobs):
            raise UsageError(
                f"rollout.sampling.top_k: {sampling.top_k} and ties are up to {wanted} "
                f"log-probabilities, but the server returns at most {caps.top_logprobs}; "
                f"lower it, or start the server with --max-logprobs {wanted + 1}"
            )

    def seed_of_rest(self, seed: int, done: int) -> int:
        return resumed_seed(seed, done)

    def body(self, request: Request) -> dict[str, Any]:
        params = sampling_params(
            request.sampling, request.seed, first=request.first_row, vocab=self.shape.vocab
        )
        body: dict[str, Any] = {"token_ids": request.path, "sampling_params": params}
        if request.adapter is not None:
            body["model"] = request.adapter
        return body

    def num_likeliest(self, sampling: Sampling) -> int:
        return requested_logprobs(sampling, self.shape.vocab)

    def parse(self, reply: Any, request: Request) -> Completion:
        return parse_reply(reply, request, self.shape, self._format)

    # --- weights ----------------------------------------------------------------------------------

    async def begin_update(self, gate: RequestGate) -> None:
        await self.client.post("/pause", params={"mode": "abort"})
        # A request may arrive after the pause. The server would queue it and run it with newer
        # weights than it was sent for, so abort it.
        while gate.running:
            try:
                async with asyncio.timeout(ABORT_INTERVAL_S):
                    await gate.all_done.wait()
            except TimeoutError:
                await self.client.post("/abort_requests", {})
        await self.confirm_weights()  # it may have been replaced meanwhile
        await self._name_weights(INCOMPLETE)

    async def end_update(self, version: int) -> None:
        await self.reset_cache()
        await self._name_weights(str(version))

    async def resume(self) -> None:
        await self.client.post("/resume")

    async def reset_cache(self) -> None:
        await self.client.post("/reset_prefix_cache", parse=check_success)

    async def _name_weights(self, suffix: str) -> None:
        weights_id = f"onepolicy-{self._run}-{suffix}"
        await self.client.post("/update_weight_version", {"new_version": weights_id})
        self.weights_id = weights_id

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
        return await (client or self.client).post(
            "/collective_rpc",
            {"method": method, "args": list(args)},
            parse=partial(_read_results, method=method, workers=self.info.workers),
            timeout_s=timeout_s,
        )

    def write_files(self, tensors: NamedWeights, version: int) -> tuple[Path, ChecksumTable]:
        assert self.files is not None
        return write_weight_files(self.files, tensors, version)

    async def load_files(self, folder: Path, sums: ChecksumTable, version: int) -> None:
        limit = self.config.timeout_s * num_files(folder)
        reports = await self.call_workers(
            "onepolicy_load_files", str(folder), sums, timeout_s=limit
        )
        for worker, report in enumerate(reports):
            if report.difference is not None:
                raise TrainingError(
                    f"rollout.engine.sync_dir: weights of version {version} in {folder}, as worker "
                    f"{worker} of the vLLM server read them: {report.difference}"
                )

    async def load_checkpoint(self, path: str | None, version: int) -> None:
        arguments: list[str] = []
        if path is not None:
            arguments.append(path)
        limit = self.checkpoint_limit(path or self.info.model)
        # once: a repeated load would wait for the first one
        await self.call_workers("onepolicy_load", *arguments, client=self.once, timeout_s=limit)

    async def broadcast(self, tensors: NamedWeights, version: int, *, backend: str) -> None:
        await self._broadcast(tensors, version, "onepolicy_receive", backend=backend)

    async def _broadcast(
        self, tensors: NamedWeights, version: int, method: str, *args: str, backend: str
    ) -> list[Any]:
        """Broadcast the tensors to this method of the workers. Return their reports.

        The request is sent once, because one end cannot repeat a broadcast alone, and has no time
        limit: rollout.engine.timeout_s limits every wait of the sender, and the workers' replies
        once it has ended. A broadcast may take as long as it makes progress.
        """
        config, reports = self.config, []
        with Sender(
            receivers=self.info.workers,
            backend=backend,
            host=sender_address(config.one_url, self.server),
            timeout_s=config.timeout_s,
            bucket_bytes=config.bucket_bytes,
        ) as sender:

            async def receive() -> list[str]:
                try:
                    found = await self.call_workers(
                        method,
                        sender.invitation,
                        version,
                        *args,
                        client=self.once,
                        timeout_s=math.inf,
                    )
                    problems = [report.problem for report in found if report.problem]
                except BaseException:
                    sender.cancel()
                    raise
                if problems:
                    sender.cancel()
                reports.extend(found)
                return problems

            send = run_in_daemon_thread(partial(sender.send, tensors, version))
            await run_both_ends(receive(), send, config.timeout_s, self.server)
        return reports

    # --- adapters ---------------------------------------------------------------------------------

    load_adapter_path, unload_adapter_path = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

    def adapter_layers(self, config: LoraConfig, model: ModelConfig) -> list[str]:
        return layer_names(config, model)

    def missing_layers(self, layers: list[str], taken: set[str]) -> list[str]:
        return sorted(set(layers) - taken)

    def start_with_adapters(self, path: str, rank: int, layers: list[str]) -> str:
        return f"start it with `onepolicy engine serve {path} lora_rank={rank}`"

    async def prepare_adapter(self, adapter: AdapterSource, version: int) -> PlaceAdapter:
        """Read the adapter, and write it to the folder of the weights if these travel as files.

        The call sends it to the only worker, which writes it to a folder of its own. It raises
        TrainingError if the worker reads other bytes.
        """
        tensors, settings = _read_adapter(adapter)
        if self.files is None:
            return partial(self._broadcast_adapter, tensors, settings, version)
        folder, sums = await asyncio.to_thread(
            write_weight_files, self.files, tensors.items(), version
        )
        return partial(self._load_adapter_files, folder, sums, settings, version)

    async def _broadcast_adapter(
        self, tensors: dict[str, Tensor], settings: str, version: int
    ) -> str:
        """Broadcast by gloo whatever rollout.engine.sync is: the tensors are in host memory."""
        (report,) = await self._broadcast(
            tensors.items(), version, "onepolicy_receive_adapter", settings, backend="gloo"
        )
        return _folder_of(report)

    async def _load_adapter_files(
        self, folder: Path, sums: ChecksumTable, settings: str, version: int
    ) -> str:
        (report,) = await self.call_workers("onepolicy_read_adapter", str(folder), sums, settings)
        if report.difference is not None:
            raise TrainingError(
                f"rollout.engine.sync_dir: the adapter of version {version} in {folder}, as the "
                f"vLLM server read it: {report.difference}"
            )
        return _folder_of(report)

    async def unload_adapter(self, name: str) -> None:
        await self.once.post(self.unload_adapter_path, {"lora_name": name})

    async def load_adapter(self, name: str, folder: str, version: int) -> None:
        await self.once.post(self.load_adapter_path, {"lora_name": name, "lora_path": folder})


def _read_results(reply: Any, method: str, workers: int) -> list[Any]:
    """Return each worker's result of a method, checked if it reports of an update."""
    results = Results.read(reply).results
    if method not in REPORTS:
        return results
    if len(results) != workers:
        raise MalformedReply(f"results of {method}: {len(results)} of {workers} workers")
    return [REPORTS[method].read(result, f"a result of {method}") for result in results]


def _folder_of(report: _AdapterRead | _AdapterReceived) -> str:
    """Return the folder where the worker put the adapter."""
    if not report.folder:
        raise TrainingError("weight sync: the vLLM server did not say where it put the adapter")
    return report.folder


def write_weight_files(
    files: WeightFiles, weights: NamedWeights, version: int
) -> tuple[Path, ChecksumTable]:
    """Write the tensors to files. Return their folder and their checksums."""
    checksums = ChecksumAccumulator()
    folder = files.write_version(checksums.add_each(weights), version)
    return folder, checksums.pop_all()


def _read_adapter(adapter: AdapterSource) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of an adapter as its file names them, and its adapter_config.json."""
    with tempfile.TemporaryDirectory(prefix="onepolicy-adapter-") as folder:
        adapter.write(Path(folder))
        tensors = load_file(Path(folder) / WEIGHTS)
        settings = (Path(folder) / CONFIG).read_text(encoding="utf-8")
    return tensors, settings
