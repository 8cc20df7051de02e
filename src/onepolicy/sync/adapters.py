"""The weights of a model that get an adapter (train.lora), in the trainer and in engines."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from onepolicy.config import ModelConfig, UsageError
from onepolicy.config.lora import LoraConfig, Target
from onepolicy.models import lora
from onepolicy.models.empty import empty_model
from onepolicy.replay.layers import find_routers, is_moe

ALL_BUT_ROUTERS: tuple[Target, ...] = ("attention", "dense", "experts")


class Targets:
    """The names of a model's weights by kind: linear layers, and parameters.

    The dense layers of a Mixture-of-Experts model count as parameters: peft takes a layer of the
    name `down_proj` there for an expert of an older checkpoint.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.modules: dict[Target, list[str]] = {"attention": [], "dense": [], "routers": []}
        self.parameters: dict[Target, list[str]] = {"dense": [], "experts": [], "routers": []}
        routers: list[str] = []
        self._is_moe = is_moe(model.config)
        if self._is_moe:
            routers = [router.path for router in find_routers(model)]
        head = model.get_output_embeddings()
        for path, module in model.named_modules():
            router = any(path == each or path.startswith(f"{each}.") for each in routers)
            if router:
                self._add_router(path, module)
            elif isinstance(module, nn.Linear) and module is not head:
                self._add_linear(path)
            elif path.split(".")[-1] == "experts":
                names = [n for n, p in module.named_parameters(recurse=False) if p.dim() == 3]
                self.parameters["experts"] += [f"{path}.{name}" for name in names]

    def _add_router(self, path: str, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            self.modules["routers"].append(path)
            return
        names = [n for n, p in module.named_parameters(recurse=False) if p.dim() == 2]
        self.parameters["routers"] += [f"{path}.{name}" for name in names]

    def _add_linear(self, path: str) -> None:
        parts = path.split(".")
        if any("attn" in part or "attention" in part for part in parts[:-1]):
            self.modules["attention"].append(path)
        elif self._is_moe:
            self.parameters["dense"].append(f"{path}.weight")
        else:
            self.modules["dense"].append(path)

    def choose(self, targets: tuple[Target, ...] | None, kind: str) -> tuple[list[str], list[str]]:
        """Return the linear layers and the parameters of these targets.

        kind: of the model, for errors. Raises UsageError for a target that the model does not have.
        """
        modules: list[str] = []
        parameters: list[str] = []
        for target in targets or ALL_BUT_ROUTERS:
            linear, stacked = self.modules.get(target, []), self.parameters.get(target, [])
            if targets is not None and not linear and not stacked:
                raise UsageError(
                    f"train.lora.targets: {target}, but {kind} has no such weights that an adapter "
                    "can be put on; leave it out"
                )
            modules += linear
            parameters += stacked
        if not modules and not parameters:
            raise UsageError(f"train.lora: {kind} has no weights that an adapter can be put on")
        return modules, parameters

    @property
    def matrices(self) -> set[str]:
        """The weights that can be stored in 4 bits: all but routers, embedding and head."""
        layers = [
            f"{path}.weight" for each in ALL_BUT_ROUTERS for path in self.modules.get(each, [])
        ]
        return {*layers, *(n for each in ALL_BUT_ROUTERS for n in self.parameters.get(each, []))}


def peft_settings(model: PreTrainedModel, config: LoraConfig, base: str) -> lora.PeftConfig:
    """Return peft's settings of the adapter of this model.

    base: path or hub id of the frozen weights. Raises UsageError for targets that it does not have.
    """
    modules, parameters = Targets(model).choose(config.targets, type(model).__name__)
    all_modules = [path for path, module in model.named_modules() if path]
    all_parameters = [name for name, _ in model.named_parameters()]
    if Path(base).exists():
        base = str(Path(base).resolve())
    return lora.peft_config(
        rank=config.rank,
        alpha=config.scaling * config.rank,
        modules=_shorten(modules, all_modules, parts=1),
        parameters=_shorten(parameters, all_parameters, parts=2),
        base=base,
    )


def linear_layers(
    config: LoraConfig, model: ModelConfig, *, refused: tuple[Target, ...], reason: str
) -> list[str]:
    """Return the last part of the name of every layer with an adapter, such as `q_proj`.

    refused: targets that an engine cannot compute with; `dense` is so in a Mixture-of-Experts
    model only. reason: why, for the error. Raises UsageError for them.
    """
    empty = empty_model(model)
    targets = Targets(empty)
    chosen, parameters = targets.choose(config.targets, type(empty).__name__)
    wanted, found = {*chosen, *parameters}, []
    for kind in refused:
        names = set(targets.parameters[kind])
        if kind != "dense":
            names |= set(targets.modules.get(kind, []))
        if names & wanted:
            found.append(kind)
    if found:
        raise UsageError(
            f"train.lora.sync: native, but adapters of {' and '.join(found)} {reason}; use "
            'train.lora.sync = merged, or train.lora.targets=["attention"]'
        )
    linear = chosen + [name.removesuffix(".weight") for name in parameters]
    return sorted({name.rpartition(".")[2] for name in linear})


def _shorten(names: list[str], every: list[str], *, parts: int) -> list[str]:
    """Return the last parts of these names if no other name ends so, else the names.

    Other programs that load the adapter expect `q_proj`, and not a path for every layer.
    """
    short = {".".join(name.split(".")[-parts:]) for name in names}
    matched = [n for n in every if any(n == s or n.endswith(f".{s}") for s in short)]
    if sorted(matched) == sorted(names):
        return sorted(short)
    return sorted(names)


def add_adapter(model: PreTrainedModel, config: LoraConfig, base: str, seed: int) -> None:
    """Put the adapters of a run into its model, and its frozen weights into their format.

    Raises UsageError if that cannot be.
    """
    settings = peft_settings(model, config, base)
    targets = Targets(model)
    modules, parameters = targets.choose(config.targets, type(model).__name__)
    expected = {f"{path}.weight" for path in modules} | set(parameters)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # A is random, and every engine must draw the same
        lora.inject(model, settings)
    found = lora.adapted_layers(model).keys()
    if found != expected:
        raise UsageError(
            f"train.lora.targets: peft adapts {sorted(found ^ expected)[0]} otherwise than asked "
            f"for in {type(model).__name__}; choose other targets"
        )
    if config.base == "nf4":
        from onepolicy.models import nf4

        nf4.store(model, targets.matrices)
