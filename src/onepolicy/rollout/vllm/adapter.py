"""Adapters that vLLM computes with (train.lora.sync = native): loaded and unloaded by name.

vLLM knows an adapter by a number and loads each number once, so every load gets a new one. An
adapter that misses a layer's name is not an error in vLLM: the layer samples its frozen weight.
The check after every sync (run/adapter_check.py) is what finds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

from onepolicy.config import ModelConfig, UsageError
from onepolicy.config.lora import LoraConfig, Target
from onepolicy.interfaces import AdapterSource
from onepolicy.models.empty import empty_model
from onepolicy.sync.adapters import Targets, linear_layers
from onepolicy.sync.weight_files import WeightFiles


def layer_names(config: LoraConfig, model: ModelConfig) -> list[str]:
    """Return the last part of the name of every layer with an adapter, such as `q_proj`.

    Raises UsageError for targets that vLLM cannot compute with.
    """
    return linear_layers(
        config,
        model,
        refused=("experts", "routers"),
        reason="are not what vLLM computes with here (its CPU kernels of experts take none)",
    )


def lora_args(config: LoraConfig, model: ModelConfig) -> dict[str, Any]:
    """Return vLLM's EngineArgs for these adapters.

    Raises UsageError for targets and ranks that vLLM cannot compute with.
    """
    return _adapter_args(config.rank, layer_names(config, model), "train.lora.rank")


def server_args(rank: int, model: ModelConfig) -> dict[str, Any]:
    """Return the EngineArgs of a server for all adapters that vLLM computes with, up to this rank.

    Raises UsageError if it can compute with none on this model.
    """
    targets = Targets(empty_model(model))
    kinds: list[Target] = ["attention", "dense"]
    found = [kind for kind in kinds if targets.modules[kind] or targets.parameters.get(kind)]
    if not found:
        raise UsageError(
            f"lora_rank: {rank}, but vLLM could put adapters on no layer of {model.path}; leave it "
            "out, and use train.lora.sync = merged"
        )
    names = layer_names(LoraConfig(rank=rank, targets=tuple(found)), model)
    return _adapter_args(rank, names, "lora_rank")


def _adapter_args(rank: int, names: list[str], setting: str) -> dict[str, Any]:
    """Return EngineArgs for adapters of at most `rank` on layers of these names.

    setting: of the rank, for errors.
    """
    from vllm.config.lora import MaxLoRARanks

    ranks = [each for each in get_args(MaxLoRARanks) if each >= rank]
    if not ranks:
        largest = max(get_args(MaxLoRARanks))
        raise UsageError(
            f"{setting}: {rank} is more than vLLM's largest, {largest}; lower it, or use "
            "train.lora.sync = merged"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 2,  # the next one is loaded before the last one is dropped
        "max_lora_rank": min(ranks),
        "lora_target_modules": names,
    }


@contextmanager
def cpu_experts() -> Iterator[None]:
    """Let a vLLM that loads adapters keep the CPU's kernel for its experts inside the context.

    With adapters on any layer vLLM 0.30.0 gives the experts a Triton kernel, which a CPU does not
    have. Ours have no adapter (`lora_args`).
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    select = method.select_unquantized_moe_backend

    def select_plain(moe_config: Any) -> Any:
        return select(moe_config=dataclasses.replace(moe_config, is_lora_enabled=False))

    method.select_unquantized_moe_backend = select_plain
    try:
        yield
    finally:
        method.select_unquantized_moe_backend = select


class LoadedAdapter:
    """The adapter that a vLLM engine has now, and its files, which vLLM may read again."""

    def __init__(self, llm: Any) -> None:
        self._llm, self._number = llm, 0
        self._files: WeightFiles | None = None  # removes its folder when it is collected
        self.request: Any = None  # vLLM's LoRARequest, which every request of ours must carry

    def load(self, adapter: AdapterSource, version: int) -> None:
        """Load this version in place of the last one, which is unloaded."""
        from vllm.lora.request import LoRARequest

        files = WeightFiles(None, "TMPDIR")
        adapter.write(files.folder)
        before, self._number = self._number, self._number + 1
        name = f"{adapter.name}@{version}"
        request = LoRARequest(lora_name=name, lora_int_id=self._number, lora_path=str(files.folder))
        if before:
            self._llm.remove_lora(before)
        self._llm.add_lora(request)
        if self._number not in self._llm.list_loras():
            raise RuntimeError(f"vLLM did not load the adapter {name!r}")
        self._files, self.request = files, request


def adapter_of(output: Any) -> str | None:
    """Return the name of the adapter that vLLM says sampled this output, without its version."""
    request = getattr(output, "lora_request", None)
    if request is None:
        return None
    name: str = request.lora_name
    return name.rpartition("@")[0]
