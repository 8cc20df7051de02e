"""Lengths from which engine and trainer would compute a sample in other ways than the model's."""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from onepolicy.config import ModelConfig, UsageError
from onepolicy.models.empty import empty_model
from onepolicy.models.layer_kinds import layer_kinds


def constant_rope_length(text: PreTrainedConfig) -> int | None:
    """Return up to which length of a forward's longest sequence rotary frequencies are constant.

    None: they do not depend on it. Above it, longrope and dynamic scaling change the frequencies of
    all sequences of the forward. text: config of the LM, one for all layers or one per layer type.
    """
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    lengths = []
    for each in (rope, *rope.values()):
        if not isinstance(each, dict):
            continue
        kind = str(each.get("rope_type"))
        if kind == "longrope":
            lengths.append(int(each["original_max_position_embeddings"]))
        elif "dynamic" in kind:
            lengths.append(int(text.max_position_embeddings))
    return min(lengths, default=None)


def check_long_samples(model: ModelConfig, config: PreTrainedConfig, max_len: int) -> None:
    """Check that samples of `max_len` tokens are computed alike whatever stands beside them.

    Raises:
        UsageError: their rotary frequencies depend on the others of a forward, or attention would
            not be given the model's sliding window.
    """
    text = config.get_text_config()
    length = constant_rope_length(text)
    if length is not None and max_len > length:
        raise UsageError(
            f"rollout.engine.max_len: {max_len}, but the rotary frequencies of {model.path} change "
            f"for all samples of a forward once one has more than {length} tokens, so engine and "
            f"trainer would compute a sample with different ones; set rollout.engine.max_len = "
            f"{length} or less"
        )
    window, kinds = getattr(text, "sliding_window", None), layer_kinds(text)
    slides = not kinds or any("sliding" in kind for kind in kinds)
    slides = slides and getattr(text, "use_sliding_window", True)
    if not window or not slides or max_len <= window:
        return
    if not any(_hands_window_on(module) for module in empty_model(model).modules()):
        raise UsageError(
            f"rollout.engine.max_len: {max_len}, but {model.path} attends to {window} tokens by "
            "its mask alone, and engine and trainer would attend to all; set "
            f"rollout.engine.max_len = {window} or less"
        )


def _hands_window_on(module: nn.Module) -> bool:
    """Return whether the module calls a function with the argument `sliding_window=`."""
    pending: list[Any] = [getattr(inspect.unwrap(type(module).forward), "__code__", None)]
    while pending:
        for constant in getattr(pending.pop(), "co_consts", ()):
            if isinstance(constant, tuple) and "sliding_window" in constant:
                return True  # the names of a call's arguments
            if isinstance(constant, CodeType):
                pending.append(constant)
    return False
