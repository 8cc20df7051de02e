"""Arguments of onepolicy's attention functions: the refused ones, and the mask that none needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn


def refuse_unsupported_arguments(
    module: nn.Module,
    function: str,
    arguments: Mapping[str, Any],
    unsupported: Collection[str],
    *,
    dropout: float,
    attention_mask: Tensor | None = None,
) -> None:
    """Raise ValueError if the model passes an argument that this attention function would ignore.

    function: the attention function's name, for the message.
    """
    refused = [name for name in unsupported if arguments.get(name) is not None]
    if dropout:
        refused.append("dropout")
    if attention_mask is not None:
        refused.append("attention_mask")
    if refused:
        raise ValueError(f"{type(module).__name__}: {function} does not know {', '.join(refused)}")


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask: the attention functions take an argument that decides which keys are seen."""
