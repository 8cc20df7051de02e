"""Methods for the workers of a vLLM server. `onepolicy engine serve` passes the class to vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ConfigDict
from torch import Tensor

from onepolicy.config import TrainingError
from onepolicy.models.checksum import ChecksumAccumulator, ChecksumTable, describe_difference
from onepolicy.rollout.remote.replies import AdapterLimits
from onepolicy.rollout.vllm.compatibility import Deployment, deployment_of
from onepolicy.rollout.vllm.quant import PartTensors, measure_part_tensors
from onepolicy.rollout.vllm.served_adapter import AdapterFiles, adapter_limits
from onepolicy.rollout.vllm.start import has_monolithic_kernel, head_dtypes
from onepolicy.rollout.vllm.weights import abort_reload, finish_reload, reload_weights
from onepolicy.sync.broadcast import Receiver
from onepolicy.sync.weight_files import read_weights

SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
)
"""Config fields that distinguish models with incompatible weights."""


def model_shape(text_config: Any) -> dict[str, str | int]:
    """Return the model type and the SHAPE_FIELDS that a transformers text config has."""
    shape = {name: getattr(text_config, name, None) for name in SHAPE_FIELDS}
    sizes = {name: size for name, size in shape.items() if isinstance(size, int)}
    return {"model_type": text_config.model_type} | sizes


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """The model and settings of a server. Sent as JSON."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # also of the dataclasses in it

    shape: dict[str, str | int]  # of model_shape
    model: str  # path or hub id of the start-up weights
    dtype: str
    head_dtypes: list[str]  # of the logits, `torch.float32`
    quantization: str | None
    held: list[PartTensors]  # of the first worker
    device: str
    max_len: int
    max_logprobs: int  # -1: no limit
    logprobs_mode: str
    routes: bool
    deployment: Deployment
    initial_canary: list[float] | None  # argument of onepolicy_remember
    adapters: AdapterLimits | None  # None: it takes no adapters


class WorkerExtension:
    """Methods that vLLM adds to its workers. The engine calls them through /collective_rpc.

    Names must not clash with those of vLLM's workers.
    """

    rank: int  # among the server's workers
    device: torch.device
    vllm_config: Any
    reload_weights: Callable[..., None]
    get_model: Callable[[], Any]
    onepolicy_initial_canary: list[float] | None = None
    onepolicy_start_checkpoint: tuple[str, str | None] | None = None
    onepolicy_adapter_files: AdapterFiles | None = None

    def onepolicy_describe(self) -> dict[str, Any]:
        """Return the ServerDescription as JSON."""
        config, model = self.vllm_config, self.vllm_config.model_config
        description = ServerDescription(
            shape=model_shape(model.hf_text_config),
            model=self._onepolicy_start_checkpoint()[0],
            dtype=str(model.dtype).removeprefix("torch."),
            head_dtypes=sorted(set(head_dtypes(self.get_model()))),
            quantization=model.quantization,
            held=[PartTensors(**each) for each in measure_part_tensors(self.get_model())],
            device=config.device_config.device_type,
            max_len=model.max_model_len,
            max_logprobs=model.max_logprobs,
            logprobs_mode=str(model.logprobs_mode),
            routes=bool(model.enable_return_routed_experts),
            deployment=self._onepolicy_deployment(),
            initial_canary=self.onepolicy_initial_canary,
            adapters=adapter_limits(config.lora_config),
        )
        return dataclasses.asdict(description)

    def _onepolicy_deployment(self) -> Deployment:
        import vllm

        deployment = deployment_of(
            self.vllm_config, vllm.__version__, self.vllm_config.device_config.device_type
        )
        return dataclasses.replace(deployment, monolithic=has_monolithic_kernel(self.get_model()))

    def onepolicy_remember(self, initial_canary: list[float]) -> None:
        """Store a canary of the start-up weights for later runs, which find other weights."""
        self.onepolicy_initial_canary = initial_canary

    def onepolicy_receive(self, invitation: str, version: int) -> dict[str, str | None]:
        """Load the weights of a Sender. Return the problem, or None.

        The sender knows the problem too if it was reached.
        """
        try:
            with Receiver(
                invitation, 1 + self.rank, version=version, device=self.device
            ) as weights:
                reload_weights(self, weights)
        except TrainingError as error:
            return {"problem": str(error)}
        return {"problem": None}

    def onepolicy_load_files(self, folder: str, sent: ChecksumTable) -> dict[str, str | None]:
        """Load the safetensors of WeightFiles.

        Return the difference between the tensors read and sent, or None.
        """
        checksums = ChecksumAccumulator()
        reload_weights(self, checksums.add_each(read_weights(folder)))
        return {"difference": describe_difference(sent, checksums.pop_all())}

    def onepolicy_receive_adapter(
        self, invitation: str, version: int, settings: str
    ) -> dict[str, str | None]:
        """Write the adapter of a Sender to a folder of this process.

        settings: content of adapter_config.json. Return the problem or None, and the folder.
        """
        try:
            with Receiver(invitation, 1 + self.rank, version=version) as tensors:
                received = {name: tensor.clone() for name, tensor in tensors}
        except TrainingError as error:
            return {"problem": str(error), "folder": None}
        return {"problem": None, "folder": self._onepolicy_write_adapter(received, settings)}

    def onepolicy_read_adapter(
        self, folder: str, sent: ChecksumTable, settings: str
    ) -> dict[str, str | None]:
        """Write the adapter that WeightFiles hold to a folder of this process.

        Return the difference between the tensors read and sent, or None, and the folder.
        """
        checksums = ChecksumAccumulator()
        read = dict(checksums.add_each(read_weights(folder)))
        difference = describe_difference(sent, checksums.pop_all())
        if difference is not None:
            return {"difference": difference, "folder": None}
        return {"difference": None, "folder": self._onepolicy_write_adapter(read, settings)}

    def _onepolicy_write_adapter(self, tensors: dict[str, Tensor], settings: str) -> str:
        if self.onepolicy_adapter_files is None:
            self.onepolicy_adapter_files = AdapterFiles()
        return self.onepolicy_adapter_files.write(tensors, settings)

    def onepolicy_load(self, path: str | None = None) -> None:
        """Load a checkpoint, by default that of the start-up. The caller drops all caches."""
        model = self.vllm_config.model_config
        checkpoint = self._onepolicy_start_checkpoint()
        try:
            # this overwrites model.model with the path
            self.reload_weights(weights_path=path or checkpoint[0])
        except BaseException:
            abort_reload(self)
            raise
        finally:
            model.model, model.revision = checkpoint
        finish_reload(self.get_model())

    def _onepolicy_start_checkpoint(self) -> tuple[str, str | None]:
        """Return path or hub id, and revision, as vLLM's config has them at the first call."""
        if self.onepolicy_start_checkpoint is None:
            model = self.vllm_config.model_config
            self.onepolicy_start_checkpoint = model.model, model.revision
        return self.onepolicy_start_checkpoint
