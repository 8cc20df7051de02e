"""LoRA (arXiv:2106.09685) in a transformers model, by peft: W + B A alpha / rank.

peft puts a layer around every adapted module or parameter. The model stays a `PreTrainedModel`, so
all other code sees the same forward. Adapters are float32 whatever dtype the frozen weights have,
and B starts at 0. Stacked weights of experts [E, O, I] have one A [r, I] and B [O, r] per expert,
which peft stores as A [r E, I] and B [O, r E].
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from transformers import PreTrainedModel

from onepolicy.bounded import refuse_pipes
from onepolicy.config import UsageError
from onepolicy.errors import short_repr

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig
    from peft import LoraModel
    from peft.tuners.lora.layer import LoraLayer

ADAPTER = "default"  # peft's name of the adapter inside the model
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of every name in an adapter's file: the path of the model inside peft's own wrapper."""
Factors = dict[str, tuple[Tensor, Tensor]]
"""A and B of every adapted weight, by the weight's name in the plain model."""
WRAPPED = ".base_layer"  # part of a tensor's name for every layer of peft around its module
STORED = re.compile(r"\.parametrizations\.(\w+)\.original$")
"""The end of a tensor's name if the weight is stored in another format (models/nf4.py)."""
BASE = "base_checksum"
"""In the header of an adapter's file: the checksum of the frozen weights as its run had them."""
NF4 = "nf4"
"""In the header of an adapter's file: the weights of its base in nf4, and the others' dtype."""


def load_peft() -> ModuleType:
    """Return the module peft. Raises UsageError if it is not installed: it is an extra."""
    try:
        import peft
    except ImportError:
        raise UsageError(
            "train.lora: peft is not installed; run pip install 'onepolicy[lora]', or leave it out"
        ) from None
    return peft


def inject(model: PreTrainedModel, config: PeftConfig) -> LoraModel:
    """Put adapters of float32 into the model and freeze all other weights. Return peft's tuner.

    Raises UsageError if peft adapts other weights than `config` names.
    """
    tuner: LoraModel = load_peft().LoraModel(model, config, ADAPTER)
    for name, parameter in model.named_parameters():
        is_adapter = _is_adapter(name)
        parameter.requires_grad_(is_adapter)
        if is_adapter:
            parameter.data = parameter.data.float()
    return tuner


def peft_config(
    *, rank: int, alpha: float, modules: list[str], parameters: list[str], base: str
) -> PeftConfig:
    """Return peft's settings of an adapter.

    modules: linear layers. parameters: weights that are no linear layer's. base: path or hub id of
    the frozen weights.
    """
    settings: PeftConfig = load_peft().LoraConfig(
        r=rank,
        lora_alpha=alpha,  # a float serves as well
        target_modules=modules,
        target_parameters=parameters or None,
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
    )
    return settings


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return peft's layer of every adapted weight, by the weight's name in the plain model."""
    found, layers = {}, load_peft().tuners.lora.layer
    for path, module in model.named_modules():
        if isinstance(module, layers.LoraLayer):
            parameter = "weight"
            if isinstance(module, layers.ParamWrapper):
                parameter = module.parameter_name
            found[f"{path.replace(WRAPPED, '')}.{parameter}"] = module
    return found


def factors_of(layer: LoraLayer) -> tuple[Tensor, Tensor]:
    """Return A and B of a layer as peft stores them."""
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return a, b


@torch.no_grad()
def delta(layer: LoraLayer) -> Tensor:
    """Return B A alpha / rank of one weight, in its shape: float32.

    Unlike peft's own, the product is not rounded to the dtype of the frozen weight.
    """
    a, b = factors_of(layer)
    transposed = getattr(layer.get_base_layer(), "is_transposed", False)
    experts = getattr(layer, "num_experts", 1)
    return product(a, b, layer.scaling[ADAPTER], experts, transposed=transposed)


@torch.no_grad()
def product(a: Tensor, b: Tensor, scaling: float, experts: int, *, transposed: bool) -> Tensor:
    """Return B A times `scaling`: [O, I] float32, or [E, O, I] of several experts.

    a, b: [r E, I] and [O, r E]. transposed: the weights of experts are stored as [E, I, O].
    """
    a, b = a.detach().float(), b.detach().float()
    if experts == 1:
        return (b @ a) * scaling
    a = a.reshape(experts, -1, a.shape[1])  # [E, r, I]
    b = b.reshape(len(b), -1, experts)  # [O, r, E]
    if transposed:
        return torch.einsum("ore,eri->eio", b, a) * scaling
    return torch.einsum("ore,eri->eoi", b, a) * scaling


@torch.no_grad()
def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the plain model: base + adapter, in float32 where there is an adapter.

    Inside `adapters_off` these are the frozen weights themselves. Of a sharded model every adapted
    weight is gathered, so that this rank's A and B alone count. All ranks must read it together;
    which of them have their adapters off does not matter. Other tensors stay shards.
    """
    layers = adapted_layers(model)
    for name, tensor in model.state_dict().items():
        if _is_adapter(name):
            continue
        plain = _plain(name)
        layer = layers.get(plain)
        if STORED.search(name):
            tensor = _dequantised(model, name, tensor)
        if layer is None:
            yield plain, tensor
        elif layer.disable_adapters:
            yield plain, gather_whole(tensor)
        else:
            yield plain, gather_whole(tensor).float() + delta(layer)


def rules_of(module: nn.Module, parameter: str) -> ParametrizationList:
    """Return what reads a module's weight that is stored in another format (models/nf4.py)."""
    rules = module.get_submodule(f"parametrizations.{parameter}")
    assert isinstance(rules, ParametrizationList)
    return rules


def _dequantised(model: nn.Module, name: str, codes: Tensor) -> Tensor:
    """Return a frozen weight, without the adapter that a forward may be adding to it."""
    path, _, rest = name.rpartition(".parametrizations.")
    weight = rules_of(model.get_submodule(path), rest.partition(".")[0])[0](codes)
    assert isinstance(weight, Tensor)
    return weight


def _plain(name: str) -> str:
    """Return a tensor's name in the plain model."""
    return STORED.sub(r".\1", name.replace(WRAPPED, ""))


def stored_names(model: nn.Module) -> list[str]:
    """Return the weights that are stored in nf4, by their names in the plain model."""
    return [_plain(name) for name in model.state_dict() if STORED.search(name)]


def gather_whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a shard. Every rank must call this together."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Compute with the frozen weights alone inside the context."""
    layers = [each for each in adapted_layers(model).values() if not each.disable_adapters]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextlib.contextmanager
def scaled_adapters(model: nn.Module, factor: float) -> Iterator[None]:
    """Compute with adapters times `factor` inside the context."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.scaling[ADAPTER] *= factor
    try:
        yield
    finally:
        for layer in layers:
            layer.scaling[ADAPTER] /= factor


@contextlib.contextmanager
def other_factors(model: nn.Module, others: Factors) -> Iterator[None]:
    """Compute with other A and B inside the context."""
    layers = adapted_layers(model)
    saved = [(weight, weight.data) for layer in layers.values() for weight in factors_of(layer)]
    for name, layer in layers.items():
        for weight, other in zip(factors_of(layer), others[name], strict=True):
            weight.data = other
    try:
        yield
    finally:
        for weight, data in saved:
            weight.data = data


@contextlib.contextmanager
def trial_adapter(model: nn.Module, size: float, seed: int) -> Iterator[None]:
    """Compute with every element of B at `size` or -`size` inside the context, as drawn by `seed`.

    The first update of AdamW moves every element of B, which starts at 0, by its learning rate.
    """
    generator = torch.Generator().manual_seed(seed)
    others = {}
    for name, layer in adapted_layers(model).items():
        a, b = factors_of(layer)
        signs = torch.randint(2, b.shape, generator=generator, device="cpu") * 2.0 - 1
        others[name] = a.data, (signs * size).to(b.device)
    with other_factors(model, others):
        yield


@contextlib.contextmanager
def merged_in(model: nn.Module, dtype: torch.dtype, *, adapter: bool) -> Iterator[None]:
    """Compute with adapted weights as an engine holds them after a merged sync.

    They are rounded to `dtype`. adapter: with the adapter; False: the frozen weights alone.
    """
    with contextlib.ExitStack() as undo:
        for name, layer in adapted_layers(model).items():
            module, parameter = layer.get_base_layer(), name.rsplit(".", 1)[1]
            if is_parametrized(module, parameter):
                rule = rules_of(module, parameter)[0]
                change = functools.partial(_merged, layer, dtype=dtype, adapter=adapter)
                undo.callback(setattr, rule, "change", None)
                setattr(rule, "change", change)  # noqa: B010  # a Module's type has no attributes
                continue
            weight = getattr(module, parameter)
            if isinstance(weight, DTensor):
                hook = functools.partial(_merge_gathered, name=name, dtype=dtype, adapter=adapter)
                assert isinstance(layer, nn.Module)
                undo.callback(layer.register_forward_pre_hook(hook).remove)
            else:
                undo.callback(_set_data, weight, weight.data.cpu())  # for the CPU this is no copy
                weight.data = _merged(layer, weight, dtype=dtype, adapter=adapter)
        undo.enter_context(adapters_off(model))
        yield


def _merged(layer: LoraLayer, weight: Tensor, *, dtype: torch.dtype, adapter: bool) -> Tensor:
    """Return the weight of a layer, with its adapter or without, rounded to `dtype`."""
    merged = weight.data.float()
    if adapter:
        merged = merged + delta(layer)
    return merged.to(dtype).to(weight.dtype)


def _set_data(weight: Tensor, data: Tensor) -> None:
    weight.data = data.to(weight.device)


@torch.no_grad()
def _merge_gathered(
    layer: LoraLayer, _: object, *, name: str, dtype: torch.dtype, adapter: bool
) -> None:
    """Merge into the copy of a sharded weight that was gathered for this forward alone."""
    weight = getattr(layer.get_base_layer(), name.rsplit(".", 1)[1])
    weight.copy_(_merged(layer, weight, dtype=dtype, adapter=adapter))


@torch.no_grad()
def factors(model: nn.Module) -> Factors:
    """Return A and B of every adapted weight: float32. Inside `adapters_off` every B is 0."""
    found = {}
    for name, layer in adapted_layers(model).items():
        a, b = factors_of(layer)
        if layer.disable_adapters:
            b = torch.zeros_like(b)
        found[name] = a.detach(), b.detach()
    return found


def summed_factors(model: nn.Module, one: Factors, other: Factors) -> Factors:
    """Return A and B of twice the rank, whose products are the sum of those of two adapters."""
    summed = {}
    for name, layer in adapted_layers(model).items():
        experts = getattr(layer, "num_experts", 1)
        (a, b), (more_a, more_b) = one[name], other[name]
        a_parts = [each.reshape(experts, -1, a.shape[1]) for each in (a, more_a)]  # [E, r, I]
        b_parts = [each.reshape(len(b), -1, experts) for each in (b, more_b)]  # [O, r, E]
        summed[name] = (
            torch.cat(a_parts, 1).reshape(-1, a.shape[1]),
            torch.cat(b_parts, 1).reshape(len(b), -1),
        )
    return summed


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return A and B of every adapted weight under the names of an adapter's file: float32."""
    return {
        PREFIX + name.replace(f".{ADAPTER}.", "."): tensor.detach()
        for name, tensor in model.state_dict().items()
        if _is_adapter(name)
    }


@torch.no_grad()
def set_adapter(model: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Copy A and B into the model.

    tensors: as `adapter_tensors` returns them. where: begins every error. Raises UsageError unless
    these are all of the model's, in its shapes.
    """
    own = adapter_tensors(model)
    different = sorted(own.keys() ^ tensors.keys())
    if different:
        raise UsageError(
            f"{where}: adapts other weights than train.lora, first {different[0]!r}; use the "
            "targets that it was trained with"
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise UsageError(
                f"{where}: {name} has shape {tuple(tensor.shape)}, train.lora makes it "
                f"{tuple(own[name].shape)}; use the rank that it was trained with"
            )
        own[name].copy_(tensor)


def is_adapter_folder(folder: Path) -> bool:
    """Return whether this folder holds an adapter, and not a whole model."""
    return (folder / CONFIG).is_file()


def base_path(folder: Path) -> str:
    """Return the path or hub id of the frozen weights of the adapter in `folder`."""
    try:
        path = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{folder / CONFIG}: damaged: {error!r}") from None
    if not isinstance(path, str):
        raise UsageError(f"{folder / CONFIG}: names no base_model_name_or_path; add it")
    return path


def read_header(folder: Path) -> dict[str, str]:
    """Return the header of the adapter's file in `folder`."""
    refuse_pipes(folder / WEIGHTS)
    with safe_open(folder / WEIGHTS, "pt") as file:
        return file.metadata() or {}


def merge_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return a float32 model of the base with the adapter in `folder` merged into it."""
    return merge(put_adapter(model, folder))


def put_adapter(model: PreTrainedModel, folder: Path) -> LoraModel:
    """Put the adapter in `folder` into the model. Return peft's tuner.

    Raises UsageError for a rank that its tensors cannot have, before peft makes matrices of it.
    """
    config = load_peft().LoraConfig.from_pretrained(str(folder))
    _refuse_patterns(config, folder / CONFIG)
    tensors = load_file(folder / WEIGHTS)
    rank = max(config.r, *config.rank_pattern.values(), 1)
    stored = max((max(tensor.shape, default=0) for tensor in tensors.values()), default=0)
    if rank > stored:
        raise UsageError(
            f"{folder / CONFIG}: its rank is {rank}, but no side of a stored matrix is above "
            f"{stored}; restore the file that was changed"
        )
    tuner = inject(model, config)
    set_adapter(model, tensors, str(folder))
    return tuner


def _refuse_patterns(config: PeftConfig, path: Path) -> None:
    """Raise UsageError for what peft would run as a regular expression, or repeat layers by."""
    fields = ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern")
    for field in (*fields, "rank_pattern", "alpha_pattern"):
        names = getattr(config, field)
        if isinstance(names, str):
            if names == "all-linear":  # peft's word, which it looks up
                continue
            patterns = [names]
        else:
            patterns = [x for x in map(str, names or ()) if not re.fullmatch(r"[\w.]+", x)]
        if patterns:
            raise UsageError(
                f"{path}: {field}: {short_repr(patterns[0])} may be a pattern, and patterns of a "
                "file are not run; write a list with the modules' names"
            )
    if config.layer_replication:
        raise UsageError(
            f"{path}: layer_replication: {short_repr(config.layer_replication)} repeats layers, "
            "which is not supported; merge the adapter into its base with peft"
        )


def merge(tuner: LoraModel) -> PreTrainedModel:
    """Return the plain model with its adapter added to its weights, in their dtype."""
    merged = tuner.merge_and_unload()
    assert isinstance(merged, PreTrainedModel)
    merged.requires_grad_(True)
    merged.__dict__.pop("peft_config", None)
    return merged
