"""The trained adapter: its files in a checkpoint, and its frozen base as the KL's reference."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.models import lora
from onepolicy.models.checksum import weights_checksum
from onepolicy.train.scorer import PolicyScorer
from onepolicy.train.update_parts import UpdatePart
from onepolicy.types import TokenBatch


class Adapter:
    """The adapter inside the learner's model.

    On several ranks every rank has one with the same A and B, and the frozen weights are sharded.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        """Take over a model that has adapters. name: of the adapter in engines and replies."""
        self.model, self.name = model, name
        self.check: object = None  # of every sync (run/adapter_check.py)
        self.base_checksum = weights_checksum(self._base_tensors())
        self.stored_names = lora.stored_names(model)  # frozen weights in 4 bits

    def _base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        with self.off():
            for name, tensor in lora.merged_tensors(self.model):
                yield name, lora.gather_whole(tensor)

    def off(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes with its frozen weights alone."""
        return lora.adapters_off(self.model)

    def tensors(self) -> dict[str, Tensor]:
        """Return A and B of every adapted weight, under the names of its file: float32, CPU.

        Inside `off` every B is 0.
        """
        tensors = lora.adapter_tensors(self.model)
        kept = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        if any(layer.disable_adapters for layer in lora.adapted_layers(self.model).values()):
            zero = {n: torch.zeros_like(t) for n, t in kept.items() if ".lora_B." in n}
            return kept | zero
        return kept

    def copy_factors(self) -> lora.Factors:
        """Return copies of A and B, which later updates do not change."""
        return {name: (a.clone(), b.clone()) for name, (a, b) in self.factors().items()}

    def metadata(self) -> dict[str, str]:
        """Return the header of an adapter's file."""
        header = {"format": "pt", lora.BASE: self.base_checksum}
        if self.stored_names:
            dtype = str(self.model.dtype).removeprefix("torch.")
            header[lora.NF4] = json.dumps({"dtype": dtype, "weights": self.stored_names})
        return header

    def write(self, folder: Path) -> None:
        """Write the adapter's two files alone, as an engine loads them."""
        self.model.peft_config[lora.ADAPTER].save_pretrained(str(folder))
        save_file(self.tensors(), folder / lora.WEIGHTS, metadata=self.metadata())

    def factors(self) -> lora.Factors:
        """Return A and B by the name of the weight that they adapt. Inside `off` every B is 0."""
        return lora.factors(self.model)

    def save(self, folder: Path) -> None:
        """Write the adapter as peft and vLLM load it, and the config of its base."""
        self.model.config.save_pretrained(folder)
        self.write(folder)

    def load(self, folder: Path) -> None:
        """Load the adapter of a checkpoint.

        Raises UsageError if it was trained on other frozen weights, or with another scale, rank or
        targets.
        """
        trained_on = lora.read_header(folder).get(lora.BASE)
        if trained_on not in (None, self.base_checksum):
            raise UsageError(
                f"model.path: its weights are not those that the adapter in {folder} was trained "
                f"on (checksum {self.base_checksum}, the adapter's is {trained_on}); restore them"
            )
        own: Any = self.model.peft_config[lora.ADAPTER]
        stored = json.loads((folder / lora.CONFIG).read_text(encoding="utf-8"))
        scale, trained_with = own.lora_alpha / own.r, stored["lora_alpha"] / stored["r"]
        if not math.isclose(scale, trained_with):  # the same A and B would be another policy
            raise UsageError(
                f"train.lora.alpha: alpha / rank is {scale:.9g}, but the adapter in {folder} was "
                f"trained with {trained_with:.9g}; set train.lora.alpha = "
                f"{trained_with * own.r:.9g}"
            )
        lora.set_adapter(self.model, load_file(folder / lora.WEIGHTS), str(folder))


def check_start(folder: Path, config: LoraConfig | None) -> None:
    """Raise UsageError if a checkpoint cannot start a run with, or without, train.lora."""
    is_adapter = lora.is_adapter_folder(folder)
    if is_adapter and config is None:
        raise UsageError(
            f"train.lora: {folder} holds an adapter, but this run trains all weights; start a new "
            f"run with model.path={folder}, which merges it"
        )
    if not is_adapter and config is not None:
        raise UsageError(
            f"train.lora: {folder} holds a whole model, so there is no adapter to go on from; "
            f"start a new run with model.path={folder}"
        )
    if config is None:
        return
    trained_on = "same"
    if lora.NF4 in lora.read_header(folder):
        trained_on = "nf4"
    if trained_on != config.base:
        raise UsageError(
            f"train.lora.base: {config.base}, but the adapter in {folder} was trained on frozen "
            f"weights of format {trained_on}; set train.lora.base = {trained_on}"
        )


class FrozenReference(UpdatePart):
    """The reference of objective.kl that takes no memory: the policy without its adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    @torch.no_grad()
    def fill_fields(self, batch: TokenBatch, scorer: PolicyScorer) -> TokenBatch:
        """Set `logp_ref`. The frozen policy routes every token itself."""
        with self._adapter.off():
            logp = scorer.compute_per_slot(batch, lambda micro: scorer.forward(micro).logp)
        return batch.replace(logp_ref=logp)
