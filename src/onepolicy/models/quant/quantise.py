"""Quantisation of a transformers model in place, with a report of its parts' sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.config.quant import Fp8, Int8, QuantFormat, Simulated
from onepolicy.models import decode_experts
from onepolicy.models.linear import is_plain_linear
from onepolicy.models.quant.formats import (
    INT8_MAX,
    MIN_SCALE,
    check_device,
    check_shape,
    fake_quantise,
    int8_rows,
    to_int8,
)
from onepolicy.models.quant.layers import (
    Activations,
    CodedExperts,
    E4M3CodedExperts,
    E4M3Experts,
    E4M3Linear,
    Int8Experts,
    Int8Linear,
    Int8Matrices,
    QuantEmbedding,
)
from onepolicy.models.quant.size_report import (
    ROUTER_NAMES,
    PartSize,
    SizeReport,
    part_name,
    sum_by_part,
)


class StaticScale:
    """One scale for all inputs of a layer. Until it is calibrated, every token has its own scale.

    The first policy's scale is kept, because activations change little while RL trains (calibration
    transfer, FlashRL). Every call counts two numbers that show whether that still holds: the
    largest value, and the values that the scale cuts off.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None  # [] float32
        self.reset_statistics()

    def reset_statistics(self) -> None:
        """Start the counts anew."""
        self.largest = torch.zeros(())
        self.clipped = torch.zeros((), dtype=torch.int64)
        self.values = 0

    def calibrate(self, largest: float) -> None:
        """Fix the scale, so that `largest` becomes the largest code."""
        self.scale = torch.tensor(max(largest / INT8_MAX, MIN_SCALE))
        self.reset_statistics()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes [N, in] int8 and scales [N, 1] float32 of x [N, in]."""
        x = x.float()
        size = x.abs()
        self.largest = torch.maximum(self.largest, size.amax())
        if self.scale is None:
            return int8_rows(x)
        if self.scale.device != x.device:
            self.scale = self.scale.to(x.device)
        self.values += x.numel()
        self.clipped = self.clipped + (size > (INT8_MAX + 0.5) * self.scale).sum()
        return to_int8(x, self.scale), self.scale.expand(len(x), 1)

    @property
    def limit(self) -> float:
        """The calibrated largest value."""
        assert self.scale is not None
        return INT8_MAX * float(self.scale)

    @property
    def drift(self) -> float:
        """The largest value since `reset_statistics`, divided by the calibrated one."""
        return float(self.largest) / self.limit


def scale_staleness(layers: dict[str, StaticScale]) -> dict[str, float]:
    """Return metrics of how well calibrated scales fit the values since the last call.

    run/metrics.toml explains them. Empty if there were no values.
    """
    seen = [layer for layer in layers.values() if layer.values]
    if not seen:
        return {}
    drift = [layer.drift for layer in seen]
    clipped = sum(int(layer.clipped) for layer in seen)
    found = {
        "quant/clipped": clipped / sum(layer.values for layer in seen),
        "quant/drift_mean": sum(drift) / len(drift),
        "quant/drift_max": max(drift),
    }
    for layer in seen:
        layer.reset_statistics()
    return found


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight of the checkpoint that is kept in another form."""

    part: str
    shape: tuple[int, ...]  # in the checkpoint
    set_weight: Callable[[Tensor], None]
    nbytes: Callable[[], int]


class QuantisedModel:
    """The quantised weights of a model, with their sizes and calibrated scales."""

    def __init__(self, model: PreTrainedModel, config: QuantFormat) -> None:
        self.config, self._model = config, model
        self.quantised_weights: dict[str, QuantisedWeight] = {}  # by the name in the checkpoint
        self.static: dict[str, StaticScale] = {}  # by layer; empty unless activations are static

    def activations(self, name: str) -> Activations:
        """Return the conversion of a layer's activations to int8."""
        if not (isinstance(self.config, Int8) and self.config.activations == "static"):
            return int8_rows
        self.static[name] = StaticScale()
        return self.static[name]

    def sizes(self) -> SizeReport:
        """Return the sizes of the model's parts, counted from its tensors."""
        itemsize = self._model.dtype.itemsize
        sizes = []
        for weight in self.quantised_weights.values():
            count = torch.Size(weight.shape).numel()
            sizes.append(PartSize(weight.part, count, count * itemsize, weight.nbytes()))
        for name, tensor in self._model.named_parameters():
            if name not in self.quantised_weights:
                count = tensor.numel()
                sizes.append(PartSize(part_name(name), count, count * itemsize, tensor.nbytes))
        return SizeReport(self.config, sum_by_part(sizes))

    def calibrate(self) -> None:
        """Fix the scales at the largest activations since `reset_statistics`."""
        for layer in self.static.values():
            layer.calibrate(float(layer.largest))

    def scales(self) -> dict[str, float]:
        """Return the largest activation of every layer at its calibration."""
        return {name: layer.limit for name, layer in self.static.items()}

    def use_scales(self, largest: dict[str, float]) -> None:
        """Calibrate with the result of `scales` of the same model.

        Raises KeyError for a layer that is not in it.
        """
        for name, layer in self.static.items():
            layer.calibrate(float(largest[name]))

    def reset_statistics(self) -> None:
        """Start the counts of all layers anew."""
        for layer in self.static.values():
            layer.reset_statistics()

    def metrics(self) -> dict[str, float]:
        """Return `scale_staleness` of all layers with static scales."""
        return scale_staleness(self.static)


def use_scales(copy: PreTrainedModel, scales: dict[str, float]) -> None:
    """Give a quantised copy of an engine's model the engine's calibrated scales, if it has any."""
    if scales:
        quantised: Any = copy.quantised
        quantised.use_scales(scales)


def quantise(
    model: PreTrainedModel,
    config: QuantFormat,
    *,
    routers: Collection[str],
    experts_only: bool = False,
) -> QuantisedModel:
    """Quantise a model's weights in place, and set `model.quantised` to the result.

    These are the weights of attention, MLPs and experts, and of `config.extra_modules`. Norms and
    biases stay. Codes are made from the weights as they are, so quantise before a cast.

    Args:
        model: the model to change.
        config: the format.
        routers: paths of the routers' modules.
        experts_only: change 3-D experts only.

    Raises:
        UsageError: this device has no kernels for the format, or a part of the model cannot be
            quantised.
    """
    check_kernels(config, next(model.parameters()).device)
    _refuse_tied_embeddings(model, config)
    quantised = QuantisedModel(model, config)
    unknown = []
    for path, module in list(model.named_modules()):
        if decode_experts.holds_experts(module):
            _quantise_experts(quantised, path, module)
        elif experts_only:
            continue
        elif not _quantise_module(quantised, model, path, module, routers) and _has_3d_weight(
            path, module
        ):
            unknown.append(path)
    if unknown:
        raise UsageError(
            f"rollout.quant: {type(model).__name__} keeps experts in a form that is not known how "
            f"to quantise ({unknown[0]}); they are most of its weights, so leave rollout.quant out"
        )
    parts = {weight.part for weight in quantised.quantised_weights.values()}
    missing = set(config.extra_modules) - parts
    if missing:
        raise UsageError(
            f"rollout.quant.extra_modules: {type(model).__name__} has no {min(missing)} of a kind "
            "to quantise"
        )
    if getattr(model, "set_experts_implementation", None) is not None:
        model.set_experts_implementation(decode_experts.NAME)
    _check_forward(model)
    quantised.reset_statistics()
    model.quantised = quantised  # type: ignore[assignment]
    return quantised


def check_kernels(config: QuantFormat, device: torch.device) -> None:
    """Raise UsageError, with the reason, if the embedded engine cannot run the format here."""
    if isinstance(config, Simulated):
        return
    check_device(config, device)
    if isinstance(config, Int8) and device.type == "cpu":
        try:
            matrices = Int8Matrices(torch.eye(8)[None], int8_rows, bags=True)
            matrices.by_rows(torch.ones(1, 8), torch.zeros(1).long())
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"rollout.quant.format: torch has no kernels for int8 experts here: {reason}"
            ) from error


def _refuse_tied_embeddings(model: PreTrainedModel, config: QuantFormat) -> None:
    if not {"lm_head", "embeddings"} & set(config.extra_modules):
        return
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and embeddings is not None and head.weight is embeddings.weight:
        raise UsageError(
            "rollout.quant.extra_modules: lm_head and embeddings are one tensor in "
            f"{type(model).__name__}; leave both out"
        )


def _has_3d_weight(path: str, module: nn.Module) -> bool:
    return "conv" not in path and any(p.ndim == 3 for p in module.parameters(recurse=False))


def _quantise_module(
    quantised: QuantisedModel,
    model: PreTrainedModel,
    path: str,
    module: nn.Module,
    routers: Collection[str],
) -> bool:
    """Quantise a module if the config wants it; return whether its part is known."""
    if path in routers and not is_plain_linear(module):
        if "router" in quantised.config.extra_modules:
            _quantise_router(quantised, path, module)
        return True
    part = _part_to_quantise(model, path, module, quantised.config, routers)
    if part is None:
        return False
    _quantise_layer(quantised, model, path, module, part)
    return True


def _part_to_quantise(
    model: PreTrainedModel,
    path: str,
    module: nn.Module,
    config: QuantFormat,
    routers: Collection[str],
) -> str | None:
    """Return the part that a layer belongs to; None if it is not to be quantised."""
    if module is model.get_output_embeddings():
        part = "lm_head"
    elif module is model.get_input_embeddings():
        part = "embeddings"
    elif not is_plain_linear(module):
        return None
    elif _is_in_router(path, routers):
        part = "router"
    else:
        return part_name(path)
    if part in config.extra_modules:
        return part
    return None


def _is_in_router(path: str, routers: Collection[str]) -> bool:
    inside = any(path == router or path.startswith(f"{router}.") for router in routers)
    return (inside and "expert" not in path) or path.rpartition(".")[2] in ROUTER_NAMES


def _quantise_layer(
    quantised: QuantisedModel, model: PreTrainedModel, path: str, module: Any, part: str
) -> None:
    name, config = f"{path}.weight", quantised.config
    if isinstance(config, Simulated):
        _simulate(quantised, name, module, "weight", part)
        return
    new: Int8Linear | E4M3Linear | QuantEmbedding
    if isinstance(module, nn.Linear):
        check_shape(config, path, module.weight)
        if isinstance(config, Int8):
            new = Int8Linear(module, quantised.activations(path))
        else:
            new = E4M3Linear(module, activations=isinstance(config, Fp8))
    elif type(module) is nn.Embedding:
        new = QuantEmbedding(module, int8=isinstance(config, Int8), dtype=lambda: model.dtype)
    else:
        raise UsageError(
            f"rollout.quant.extra_modules: {path} is {type(module).__name__}, not a plain "
            f"embedding; leave {part} out"
        )
    quantised.quantised_weights[name] = QuantisedWeight(
        part, tuple(module.weight.shape), new.set_weight, lambda: new.nbytes
    )
    parent, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)


def _quantise_router(quantised: QuantisedModel, path: str, module: nn.Module) -> None:
    """Round the weight of a router that computes its scores itself."""
    is_simulated = isinstance(quantised.config, Simulated)
    if not is_simulated or not isinstance(getattr(module, "weight", None), nn.Parameter):
        raise UsageError(
            f"rollout.quant.extra_modules: {path} computes its scores itself "
            f"({type(module).__name__}), so its weight cannot be replaced by "
            f"{quantised.config.format} codes; leave router out"
        )
    _simulate(quantised, f"{path}.weight", module, "weight", "router")


def _quantise_experts(quantised: QuantisedModel, path: str, module: Any) -> None:
    config, names = quantised.config, (decode_experts.up_name(module), "down_proj")
    if isinstance(config, Simulated):
        transposed = module.is_transposed
        for name in names:
            _simulate(quantised, f"{path}.{name}", module, name, "experts", transposed=transposed)
        return
    shapes = [tuple(getattr(module, name).shape) for name in names]
    up, down = (getattr(module, name).detach() for name in names)
    if module.is_transposed:
        up, down = up.mT, down.mT
    for name, weight in zip(names, (up, down), strict=True):
        check_shape(config, f"{path}.{name}", weight)
    experts: CodedExperts | E4M3Experts
    if isinstance(config, Int8):
        activations = [quantised.activations(f"{path}.{name}") for name in names]
        experts = Int8Experts(up, down, activations)
    elif up.device.type == "cpu":
        experts = E4M3Experts(up, down, activations=isinstance(config, Fp8))
    else:
        experts = E4M3CodedExperts(up, down, activations=isinstance(config, Fp8))
    module.quantised = experts
    for name, shape, side in zip(names, shapes, ("up", "down"), strict=True):
        delattr(module, name)
        quantised.quantised_weights[f"{path}.{name}"] = QuantisedWeight(
            "experts", shape, _weight_setter(experts, side, module), _byte_counter(experts, side)
        )


def _weight_setter(experts: Any, side: str, module: Any) -> Callable[[Tensor], None]:
    """Return a function that sets a projection's weight, of the checkpoint's shape."""

    def set_weight(weight: Tensor) -> None:
        if module.is_transposed:
            weight = weight.mT
        getattr(experts, side).set_weight(weight)

    return set_weight


def _byte_counter(experts: Any, side: str) -> Callable[[], int]:
    return lambda: getattr(experts, side).nbytes


def _simulate(
    quantised: QuantisedModel,
    name: str,
    module: nn.Module,
    attribute: str,
    part: str,
    *,
    transposed: bool = False,
) -> None:
    """Round a weight in place, now and whenever it is set.

    transposed: the weight is [..., in, out], so that its columns are rounded.
    """
    assert isinstance(quantised.config, Simulated)
    bits = quantised.config.bits

    def set_weight(weight: Tensor) -> None:
        if transposed:
            rounded = fake_quantise(weight.mT, bits).mT
        else:
            rounded = fake_quantise(weight, bits)
        # The attribute is looked up in every call, because a cast replaces its storage.
        getattr(module, attribute).data.copy_(rounded)

    weight = getattr(module, attribute)
    quantised.quantised_weights[name] = QuantisedWeight(
        part, tuple(weight.shape), set_weight, lambda: getattr(module, attribute).nbytes
    )
    set_weight(weight.detach())


@torch.no_grad()
def _check_forward(model: PreTrainedModel) -> None:
    """Raise UsageError unless a forward works and gives finite logits."""
    ids = torch.arange(2, device=model.device)[None]
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    except AttributeError as error:
        raise UsageError(
            f"rollout.quant: {type(model).__name__} reads weights past their layers ({error}), so "
            "they cannot be replaced; leave rollout.quant out or use format = simulated"
        ) from error
    if not logits.isfinite().all():
        raise UsageError(
            f"rollout.quant: {type(model).__name__} quantised computes logits that are not finite"
        )
