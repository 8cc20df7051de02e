"""`VLLMEngine`: a RolloutEngine that samples with vLLM in this process."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from onepolicy.config import ModelConfig, QuantFormat, UsageError, VLLMEngineConfig
from onepolicy.config.lora import LoraConfig
from onepolicy.interfaces import AdapterSource, EngineCaps, NamedWeights
from onepolicy.models.checkpoint_names import CheckpointNames
from onepolicy.models.load import read_config
from onepolicy.replay.checks import RouteSpec
from onepolicy.replay.payloads.vllm import RoutePayloadFormat, request_trace
from onepolicy.rollout.hf.sampler import check_sampling
from onepolicy.rollout.hf.scheduler import BatchRunner, SequenceRequest, check_request
from onepolicy.rollout.remote.dialects.vllm_replies import requested_logprobs, top_and_support
from onepolicy.rollout.spec import EngineSpec
from onepolicy.rollout.vllm.adapter import LoadedAdapter, adapter_of
from onepolicy.rollout.vllm.memory import GPU_SHARE
from onepolicy.rollout.vllm.quant import PartTensors, measure_part_tensors, part_sizes
from onepolicy.rollout.vllm.start import check_cpu_hybrid, start_llm_engine
from onepolicy.rollout.vllm.weights import reload_weights, send_to_workers
from onepolicy.sync.canary import inexact_dtype
from onepolicy.types import Completion, RoutingTrace, Sampling

LOG = logging.getLogger(__name__)
MIN_TEMPERATURE = 0.01  # vLLM raises lower temperatures to this


def build(spec: EngineSpec) -> VLLMEngine:
    """Build the engine and load the model."""
    assert isinstance(spec.config, VLLMEngineConfig)
    return VLLMEngine(
        spec.model,
        read_config(spec.model),
        spec.config,
        route_spec=spec.route_spec,
        max_len=spec.max_len,
        cpu=spec.device.type == "cpu",
        quant=spec.quant,
        gpu_share=spec.gpu_share,
        sleeps=spec.sleeps,
        lora=spec.lora,
    )


class VLLMEngine:
    """A RolloutEngine over vLLM, which loads the model from `model.path`."""

    def __init__(
        self,
        model: ModelConfig,
        hf_config: PreTrainedConfig,
        config: VLLMEngineConfig,
        *,
        route_spec: RouteSpec | None,
        max_len: int,
        cpu: bool,
        quant: QuantFormat | None = None,
        gpu_share: float = 1.0,
        sleeps: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        """Start vLLM and load the model.

        route_spec: layers whose experts are returned for every token. max_len: prompt + completion
        tokens. quant: format of the engine's weights, now and after every sync, by vLLM's own
        methods (rollout/vllm/quant.py). gpu_share: of the GPU that is the engine's.
        sleeps: `sleep` frees that share until the next use. lora: adapters that it computes with.
        """
        text = hf_config.get_text_config()
        if cpu:
            check_cpu_hybrid(config, text)
        self.version = 0
        self.adapter: str | None = None  # name of the LoRA adapter that it samples with
        self._vocab, self._devices = int(text.vocab_size), config.tensor_parallel_size
        self.caps = EngineCaps(
            returns_routes=route_spec is not None,
            max_len=max_len,
            top_logprobs=self._vocab,
            weights_dtype=config.dtype,
            takes_adapter=lora is not None,
            inexact_dtype=inexact_dtype(config.dtype, cpu=cpu),
        )
        self._names = CheckpointNames(hf_config, trust_remote_code=model.trust_remote_code)
        LOG.info("starting vLLM and loading %s", model.path)
        begun = time.perf_counter()
        self.llm, payload_format = start_llm_engine(
            config,
            model.path,
            max_len=max_len,
            top_logprobs=self._vocab,
            return_routes=route_spec is not None,
            cpu=cpu,
            trust_remote_code=model.trust_remote_code,
            quant=quant,
            gpu_share=GPU_SHARE * gpu_share,
            sleeps=sleeps,
            lora=lora,
        )
        self._sleeps, self._asleep = sleeps, False
        if quant is not None:
            tensors = self.llm.apply_model(measure_part_tensors)[0]
            sizes = part_sizes(quant, (PartTensors(**each) for each in tensors), config.dtype)
            self.caps = dataclasses.replace(self.caps, sizes=sizes)
        self.loaded = LoadedAdapter(self.llm)
        batch = _VLLMBatch(self.llm, self.loaded, route_spec, payload_format, text)
        loaded = time.perf_counter()
        batch.warm_up([i % self._vocab for i in range(min(8, max_len - 1))])
        self._runner = BatchRunner(batch)
        LOG.info(
            "vLLM loaded in %.1f s, warmed up in %.1f s",
            loaded - begun,
            time.perf_counter() - loaded,
        )

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Sample until a stop token or max_tokens.

        The random numbers depend on the seed only. The last bits of the logits depend on the batch.
        """
        self._wake()
        check_sampling(sampling)
        check_temperature(sampling)
        prompt = check_request(
            prompt_ids, sampling, self.caps, version=self.version, vocab=self._vocab
        )
        completion = await self._runner.run_request(prompt, sampling, seed, self.version)
        if self.caps.takes_adapter:
            return completion  # with the name that vLLM says
        return dataclasses.replace(completion, adapter=self.adapter)

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load all of the model's tensors, cast to the engine's dtype."""
        self._wake()
        self._runner.clear_cache("load_weights")
        self.version = -1  # until the last tensor is loaded
        named = self._names.stream_to_checkpoint(weights)
        if self._devices > 1:
            await send_to_workers(self.llm, named, version, self._devices)
        else:
            self.llm.collective_rpc(reload_weights, args=(named,))
        self._runner.clear_cache("load_weights")
        self.version = version

    async def lacks_base(self) -> bool:
        """Return False: it is built with the frozen weights."""
        return False

    async def load_adapter(self, adapter: AdapterSource, version: int) -> None:
        """Load A and B of the adapter as `version`, and drop all caches."""
        self._wake()
        self._runner.clear_cache("load_adapter")
        self.version = -1
        self.loaded.load(adapter, version)
        self._runner.clear_cache("load_adapter")
        self.version = version

    async def reset_cache(self) -> None:
        """Drop every cached prefix, so that later samples do not depend on earlier ones."""
        self._wake()
        self._runner.clear_cache("reset_cache")

    def sleep(self) -> None:
        """Free the GPU's memory until the engine is used again. No request may be running.

        The cache is dropped and the weights wait in host memory. Does nothing unless the engine was
        built to sleep.
        """
        if self._sleeps and not self._asleep:
            self._runner.clear_cache("sleep")
            self.llm.sleep(level=1)
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            torch.cuda.empty_cache()  # what the learner has freed, torch still holds
            self.llm.wake_up()
            self._asleep = False


class _VLLMBatch:
    """A `Batch` (rollout/hf/scheduler.py) over vLLM's scheduler."""

    def __init__(
        self,
        llm: Any,
        loaded: LoadedAdapter,
        route_spec: RouteSpec | None,
        payload_format: RoutePayloadFormat | None,
        text: PreTrainedConfig,
    ) -> None:
        self._llm, self._route_spec = llm, route_spec
        self._depth, self._vocab = int(text.num_hidden_layers), int(text.vocab_size)
        self._payload_format, self._loaded = payload_format, loaded
        self._running: dict[str, SequenceRequest] = {}
        self._numbers = itertools.count()

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def step_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def admit(self, waiting: deque[SequenceRequest]) -> None:
        """Pass all requests to vLLM, which queues those that do not fit yet."""
        while waiting:
            request = waiting.popleft()
            name = str(next(self._numbers))
            prompt = {"type": "token", "prompt_token_ids": request.prompt.tolist()}
            params = _sampling_params(request.sampling, request.seed, self._vocab)
            self._llm.add_request(name, prompt, params, lora_request=self._loaded.request)
            self._running[name] = request

    def step(self, version: int) -> list[tuple[SequenceRequest, Completion]]:
        """Make one step of vLLM and return the requests that ended."""
        self._abort([name for name, request in self._running.items() if request.future.cancelled()])
        ended: list[tuple[SequenceRequest, Completion]] = []
        if not self._running:
            return ended
        for output in self._llm.step():
            request = self._running.pop(output.request_id, None)
            if request is not None:  # else it was aborted
                ended.append((request, self._completion(request, output, version)))
        return ended

    def warm_up(self, prompt: list[int]) -> None:
        """Run one request, so that the first real one does not pay vLLM's one-time costs.

        Raises UsageError if its routes are all zeros or not of the model's layers.
        """
        params = _sampling_params(Sampling(temperature=1.0, max_tokens=1), 0, self._vocab)
        self._llm.add_request("warm-up", {"type": "token", "prompt_token_ids": prompt}, params)
        while self._llm.has_unfinished_requests():
            for output in self._llm.step():
                self._routing(output, len(prompt), version=0)
        self.clear()

    def clear(self) -> None:
        """Drop running requests and all caches."""
        self._abort(list(self._running))
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache: it still holds blocks of a request"
            )

    def _abort(self, names: list[str]) -> None:
        if names:
            self._llm.abort_request(names)
        for name in names:
            del self._running[name]

    def _completion(self, request: SequenceRequest, output: Any, version: int) -> Completion:
        result = output.outputs[0]
        assert result.finish_reason in ("stop", "length")
        tokens = torch.tensor(result.token_ids, dtype=torch.int32)
        wanted = requested_logprobs(request.sampling, self._vocab)
        logp, top_ids, top_logp = _logprobs(result, wanted)
        return Completion(
            tokens,
            logp,
            torch.full_like(tokens, version),
            result.finish_reason,
            self._routing(output, len(request.prompt), version, request.sampling.routes_from),
            request.sampling.routes_from,
            adapter=adapter_of(output),
            **top_and_support(top_ids, top_logp, request.sampling, _own_sets(result)),
        )

    def _routing(
        self, output: Any, prompt: int, version: int, first: int = 0
    ) -> RoutingTrace | None:
        """Return the routes from slot `first` on, None for a dense model."""
        if self._route_spec is None or self._payload_format is None:
            return None
        rows = self._payload_format.read_output(output)
        if rows is not None:
            rows = rows[first:]
        return request_trace(
            rows,
            self._payload_format,
            prompt=prompt,
            completion=len(output.outputs[0].token_ids),
            cached=output.num_cached_tokens or 0,
            route_spec=self._route_spec,
            depth=self._depth,
            version=version,
            first=first,
        )


def _logprobs(result: Any, k: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return logp [n] of the sampled tokens, and top_ids and top_logp [n, k], None if k is 0."""
    # flat: for every token the sampled one's, then those of the most likely ones
    logp = torch.from_numpy(np.array(result.logprobs.logprobs, dtype=np.float32))
    logp = logp.view(len(result.token_ids), -1)
    assert logp.shape[1] == 1 + k
    if not k:
        return logp[:, 0].contiguous(), None, None
    ids = torch.tensor(result.logprobs.token_ids, dtype=torch.int32).view(logp.shape)
    return logp[:, 0].contiguous(), ids[:, 1:].contiguous(), logp[:, 1:].contiguous()


def _own_sets(result: Any) -> list[list[int]] | None:
    """Return vLLM's own sets; None unless it was started with return_sampling_mask."""
    mask = getattr(result, "sampling_mask", None)  # from 0.28 on
    if mask is None:
        return None
    sets: list[list[int]] = mask.token_ids
    return sets


def check_temperature(sampling: Sampling) -> None:
    """Raise UsageError for a temperature that vLLM would replace."""
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise UsageError(
            f"temperature: vLLM raises {sampling.temperature} to {MIN_TEMPERATURE}; use 0 (greedy) "
            f"or at least {MIN_TEMPERATURE}"
        )


def _sampling_params(sampling: Sampling, seed: int, vocab: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop),
        ignore_eos=True,  # only our stop tokens end a sequence
        seed=seed,
        logprobs=requested_logprobs(sampling, vocab),  # beside the sampled token's own
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
