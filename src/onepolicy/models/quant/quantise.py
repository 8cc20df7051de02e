"""Quantise a transformers model in place, and say what every part of it takes."""

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
    """One scale for all inputs of a layer, calibrated once; until then every token has its own.

    Calibration transfer (FlashRL): activations change little while RL trains, so the scale of the first policy is kept.
    Every call notes what says whether that still holds: the largest value seen, and how many the scale cuts off.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None  # [] float32
        self.reset_statistics()

    def reset_statistics(self) -> None:
        self.largest = torch.zeros(())
        self.clipped = torch.zeros((), dtype=torch.int64)
        self.values = 0

    def calibrate(self, largest: float) -> None:
        self.scale = torch.tensor(max(largest / INT8_MAX, MIN_SCALE))
        self.reset_statistics()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, in] -> codes [N, in] int8, scale [N, 1] float32."""
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
        """Largest value seen since `reset_statistics` over the calibrated one."""
        return float(self.largest) / self.limit


def scale_staleness(layers: dict[str, StaticScale]) -> dict[str, float]:
    """How well calibrated scales fit what was seen since the last call (run/log.py); {} if nothing was."""
    seen = [layer for layer in layers.values() if layer.values]
    if not seen:
        return {}
    drift = [layer.drift for layer in seen]
    found = {
        "quant/clipped": sum(int(layer.clipped) for layer in seen)
        / sum(layer.values for layer in seen),
        "quant/drift_mean": sum(drift) / len(drift),
        "quant/drift_max": max(drift),
    }
    for layer in seen:
        layer.reset_statistics()
    return found


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """One weight of the checkpoint that is kept in another form."""

    part: str
    shape: tuple[int, ...]  # in the checkpoint
    set_weight: Callable[[Tensor], None]
    nbytes: Callable[[], int]


class QuantisedModel:
    """What `quantise` made of a model: where its quantised weights are, and what they take."""

    def __init__(self, model: PreTrainedModel, config: QuantFormat) -> None:
        self.config, self._model = config, model
        self.quantised_weights: dict[str, QuantisedWeight] = {}  # by the name in the checkpoint
        self.static: dict[str, StaticScale] = {}  # by layer; empty unless activations are static

    def activations(self, name: str) -> Activations:
        if not (isinstance(self.config, Int8) and self.config.activations == "static"):
            return int8_rows
        self.static[name] = StaticScale()
        return self.static[name]

    def sizes(self) -> SizeReport:
        """Of every part of the model, counted from the tensors that are there."""
        itemsize = self._model.dtype.itemsize
        found = []
        for each in self.quantised_weights.values():
            count = torch.Size(each.shape).numel()
            found.append(PartSize(each.part, count, count * itemsize, each.nbytes()))
        for name, tensor in self._model.named_parameters():
            if name not in self.quantised_weights:
                found.append(
                    PartSize(
                        part_name(name), tensor.numel(), tensor.numel() * itemsize, tensor.nbytes
                    )
                )
        return SizeReport(self.config, sum_by_part(found))

    def calibrate(self) -> None:
        """Keep the largest activations seen since `reset_statistics` as the scales of all that come."""
        for layer in self.static.values():
            layer.calibrate(float(layer.largest))

    def scales(self) -> dict[str, float]:
        """Largest activation of every layer when it was calibrated."""
        return {name: layer.limit for name, layer in self.static.items()}

    def use_scales(self, largest: dict[str, float]) -> None:
        """Those of `scales`, of the same model. KeyError for a layer that is not in it."""
        for name, layer in self.static.items():
            layer.calibrate(float(largest[name]))

    def reset_statistics(self) -> None:
        for layer in self.static.values():
            layer.reset_statistics()

    def metrics(self) -> dict[str, float]:
        return scale_staleness(self.static)


def quantise(
    model: PreTrainedModel,
    config: QuantFormat,
    *,
    routers: Collection[str],
    experts_only: bool = False,
) -> QuantisedModel:
    """Replace weights of attention, MLPs and experts, and what `config.extra_modules` names. Norms and biases stay.

    Codes are made of the weights as they are, so do this before they are cast. `model.quantised` is what is returned.

    routers: paths of the modules that route. experts_only: leave all but 3-D experts as they are. UsageError if this
    device has no kernels for the format, or a part of the model cannot be quantised.
    """
    check_kernels(config, next(model.parameters()).device)
    made = QuantisedModel(model, config)
    tied = model.get_input_embeddings() is not None and _shares(model)
    if tied and {"lm_head", "embeddings"} & set(config.extra_modules):
        raise UsageError(
            f"rollout.quant.extra_modules: lm_head and embeddings are one tensor in {type(model).__name__}; leave both out"
        )
    left = []
    for path, module in list(model.named_modules()):
        if decode_experts.holds_experts(module):
            _experts(made, path, module)
        elif experts_only:
            continue
        elif path in routers and not is_plain_linear(module):
            if "router" in config.extra_modules:
                _router(made, path, module)
        elif (part := _wanted(model, path, module, config, routers)) is not None:
            _layer(made, model, path, module, part)
        elif any(
            p.ndim == 3 for n, p in module.named_parameters(recurse=False) if "conv" not in path
        ):
            left.append(path)
    if left:
        raise UsageError(
            f"rollout.quant: {type(model).__name__} keeps experts in a form that is not known how to quantise "
            f"({left[0]}); they are most of its weights, so leave rollout.quant out"
        )
    if missing := set(config.extra_modules) - {
        stored.part for stored in made.quantised_weights.values()
    }:
        raise UsageError(
            f"rollout.quant.extra_modules: {type(model).__name__} has no {min(missing)} of a kind to quantise"
        )
    if getattr(model, "set_experts_implementation", None) is not None:
        model.set_experts_implementation(decode_experts.NAME)
    _check_forward(model)
    made.reset_statistics()
    model.quantised = made  # type: ignore[assignment]
    return made


def check_kernels(config: QuantFormat, device: torch.device) -> None:
    """UsageError with the reason if this machine cannot run the format in the embedded engine."""
    if isinstance(config, Simulated):
        return
    check_device(config, device)
    if isinstance(config, Int8) and device.type == "cpu":
        try:
            Int8Matrices(torch.eye(8)[None], int8_rows, bags=True)._few(
                torch.ones(1, 8), torch.zeros(1).long()
            )
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"rollout.quant.format: torch has no kernels for int8 experts here: {reason}"
            ) from error


def _wanted(
    model: PreTrainedModel,
    path: str,
    module: nn.Module,
    config: QuantFormat,
    routers: Collection[str],
) -> str | None:
    """The part this layer belongs to, if it is to be quantised."""
    if module is model.get_output_embeddings():
        return "lm_head" if "lm_head" in config.extra_modules else None
    if module is model.get_input_embeddings():
        return "embeddings" if "embeddings" in config.extra_modules else None
    if not is_plain_linear(module):
        return None
    inside = any(path == router or path.startswith(f"{router}.") for router in routers)
    if (inside and "expert" not in path) or path.rpartition(".")[2] in ROUTER_NAMES:
        return "router" if "router" in config.extra_modules else None
    return part_name(path)


def _layer(made: QuantisedModel, model: PreTrainedModel, path: str, module: Any, part: str) -> None:
    name, config = f"{path}.weight", made.config
    if isinstance(config, Simulated):
        _simulate(made, name, module, "weight", part)
        return
    new: Int8Linear | E4M3Linear | QuantEmbedding
    if isinstance(module, nn.Linear):
        check_shape(config, path, module.weight)
        if isinstance(config, Int8):
            new = Int8Linear(module, made.activations(path))
        else:
            new = E4M3Linear(module, activations=isinstance(config, Fp8))
    elif type(module) is nn.Embedding:
        new = QuantEmbedding(module, int8=isinstance(config, Int8), dtype=lambda: model.dtype)
    else:
        raise UsageError(
            f"rollout.quant.extra_modules: {path} is {type(module).__name__}, not a plain embedding; leave {part} out"
        )
    made.quantised_weights[name] = QuantisedWeight(
        part, tuple(module.weight.shape), new.set_weight, lambda: new.nbytes
    )
    parent, _, own = path.rpartition(".")
    setattr(model.get_submodule(parent), own, new)


def _router(made: QuantisedModel, path: str, module: nn.Module) -> None:
    if not isinstance(made.config, Simulated) or not isinstance(
        getattr(module, "weight", None), nn.Parameter
    ):
        raise UsageError(
            f"rollout.quant.extra_modules: {path} computes its scores itself ({type(module).__name__}), so its weight cannot be "
            f"replaced by {made.config.format} codes; leave router out"
        )
    _simulate(made, f"{path}.weight", module, "weight", "router")


def _experts(made: QuantisedModel, path: str, module: Any) -> None:
    config, names = made.config, (decode_experts.up_name(module), "down_proj")
    if isinstance(config, Simulated):
        for name in names:
            _simulate(
                made, f"{path}.{name}", module, name, "experts", transposed=module.is_transposed
            )
        return
    shapes = [tuple(getattr(module, name).shape) for name in names]
    up, down = (getattr(module, name).detach() for name in names)
    if module.is_transposed:
        up, down = up.mT, down.mT
    for name, weight in zip(names, (up, down), strict=True):
        check_shape(config, f"{path}.{name}", weight)
    own: CodedExperts | E4M3Experts
    if isinstance(config, Int8):
        own = Int8Experts(up, down, [made.activations(f"{path}.{name}") for name in names])
    else:
        kind = E4M3Experts if up.device.type == "cpu" else E4M3CodedExperts
        own = kind(up, down, activations=isinstance(config, Fp8))
    module.quantised = own
    for name, shape, side in zip(names, shapes, ("up", "down"), strict=True):
        delattr(module, name)
        made.quantised_weights[f"{path}.{name}"] = QuantisedWeight(
            "experts", shape, _weight_setter(own, side, module), _byte_counter(own, side)
        )


def _weight_setter(experts: Any, side: str, module: Any) -> Callable[[Tensor], None]:
    return lambda weight: getattr(experts, side).set_weight(
        weight.mT if module.is_transposed else weight
    )


def _byte_counter(experts: Any, side: str) -> Callable[[], int]:
    return lambda: getattr(experts, side).nbytes


def _simulate(
    made: QuantisedModel,
    name: str,
    module: nn.Module,
    attribute: str,
    part: str,
    *,
    transposed: bool = False,
) -> None:
    assert isinstance(made.config, Simulated)
    bits = made.config.bits

    def set_weight(weight: Tensor) -> None:
        rounded = fake_quantise(weight.mT, bits).mT if transposed else fake_quantise(weight, bits)
        getattr(module, attribute).data.copy_(rounded)  # looked up now: a cast replaces its storage

    weight = getattr(module, attribute)
    made.quantised_weights[name] = QuantisedWeight(
        part, tuple(weight.shape), set_weight, lambda: getattr(module, attribute).nbytes
    )
    set_weight(weight.detach())


def _shares(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


@torch.no_grad()
def _check_forward(model: PreTrainedModel) -> None:
    ids = torch.arange(2, device=model.device)[None]
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    except AttributeError as error:
        raise UsageError(
            f"rollout.quant: {type(model).__name__} reads weights past their layers ({error}), so they cannot be "
            "replaced; leave rollout.quant out or use format = simulated"
        ) from error
    if not logits.isfinite().all():
        raise UsageError(
            f"rollout.quant: {type(model).__name__} quantised computes logits that are not finite"
        )
