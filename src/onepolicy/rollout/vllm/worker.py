"""What runs inside a vLLM server's workers for us: `onepolicy engine serve` names the class on its command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from onepolicy.config import TrainingError
from onepolicy.rollout.vllm.compatibility import Deployment, deployment_of
from onepolicy.rollout.vllm.quant import measure_part_tensors
from onepolicy.rollout.vllm.start import has_monolithic_kernel, head_dtypes
from onepolicy.rollout.vllm.weights import abort_reload, pack_experts, reload_weights
from onepolicy.sync.broadcast import Receiver
from onepolicy.sync.checksum import ChecksumAccumulator, ChecksumTable, describe_difference
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
"""Config fields that differ between models whose weights cannot stand in for each other's."""


def model_shape(text_config: Any) -> dict[str, str | int]:
    """The model type and SHAPE of a transformers text config, as far as it has them."""
    shape = {name: getattr(text_config, name, None) for name in SHAPE_FIELDS}
    return {"model_type": text_config.model_type} | {
        k: v for k, v in shape.items() if isinstance(v, int)
    }


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """What a server serves. Sent as JSON."""

    shape: dict[str, str | int]  # shape_of
    model: str  # path or hub id it was started with
    dtype: str
    head_dtypes: list[str]  # of the logits, `torch.float32`
    quantization: str | None
    held: list[dict[str, Any]]  # quant.Held, of the first worker
    device: str
    max_len: int
    max_logprobs: int  # -1: no limit
    logprobs_mode: str
    routes: bool
    deployment: dict[str, Any]  # known_bad.Deployment
    first_probe: list[float] | None  # what onepolicy_remember was given


class WorkerExtension:
    """Methods that vLLM adds to its workers, called through /collective_rpc. Names must not clash with a worker's."""

    rank: int  # among the server's workers
    device: torch.device
    vllm_config: Any
    reload_weights: Callable[..., None]
    get_model: Callable[[], Any]
    onepolicy_first_probe: list[float] | None = None
    onepolicy_own: tuple[str, str | None] | None = None

    def onepolicy_describe(self) -> dict[str, Any]:
        """A Description, as JSON."""
        config, model = self.vllm_config, self.vllm_config.model_config
        description = ServerDescription(
            shape=model_shape(model.hf_text_config),
            model=self._onepolicy_own()[0],
            dtype=str(model.dtype).removeprefix("torch."),
            head_dtypes=sorted(set(head_dtypes(self.get_model()))),
            quantization=model.quantization,
            held=measure_part_tensors(self.get_model()),
            device=config.device_config.device_type,
            max_len=model.max_model_len,
            max_logprobs=model.max_logprobs,
            logprobs_mode=str(model.logprobs_mode),
            routes=bool(model.enable_return_routed_experts),
            deployment=dataclasses.asdict(self._onepolicy_deployment()),
            first_probe=self.onepolicy_first_probe,
        )
        return dataclasses.asdict(description)

    def _onepolicy_deployment(self) -> Deployment:
        import vllm

        deployment = deployment_of(
            self.vllm_config, vllm.__version__, self.vllm_config.device_config.device_type
        )
        return dataclasses.replace(deployment, monolithic=has_monolithic_kernel(self.get_model()))

    def onepolicy_remember(self, first_probe: list[float]) -> None:
        """Keep what the weights this server started with answered, for a run that comes when they are long replaced."""
        self.onepolicy_first_probe = first_probe

    def onepolicy_receive(self, invitation: str, version: int) -> dict[str, str | None]:
        """Take over what a Sender sends. The problem, None if there is none; a sender that was reached knows it."""
        try:
            with Receiver(
                invitation, 1 + self.rank, version=version, device=self.device
            ) as weights:
                reload_weights(self, weights)
        except TrainingError as error:
            return {"problem": str(error)}
        return {"problem": None}

    def onepolicy_load_files(self, folder: str, sent: ChecksumTable) -> dict[str, str | None]:
        """Take over the safetensors of WeightFiles. How what was read differs from what was sent, None: it does not."""
        checksums = ChecksumAccumulator()
        reload_weights(self, checksums.add_each(read_weights(folder)))
        return {"difference": describe_difference(sent, checksums.pop_all())}

    def onepolicy_load(self, path: str | None = None) -> None:
        """Take over a checkpoint, by default the one the server was started with. Caches are the caller's business."""
        model = self.vllm_config.model_config
        own = self._onepolicy_own()
        try:
            self.reload_weights(weights_path=path or own[0])  # makes the path the model's own
        except BaseException:
            abort_reload(self)
            raise
        finally:
            model.model, model.revision = own
        pack_experts(self.get_model())

    def _onepolicy_own(self) -> tuple[str, str | None]:
        """Path or hub id, and revision, that the server was started with: what it says at the first call."""
        if self.onepolicy_own is None:
            self.onepolicy_own = (
                self.vllm_config.model_config.model,
                self.vllm_config.model_config.revision,
            )
        return self.onepolicy_own
