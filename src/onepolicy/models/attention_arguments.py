"""What our attention functions share: the arguments they refuse, and that they need no mask."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn


def refuse_unsupported_arguments(
    module: nn.Module,
    what: str,
    arguments: Mapping[str, Any],
    unsupported: Collection[str],
    *,
    dropout: float,
    attention_mask: Tensor | None = None,
) -> None:
    """ValueError if a family hands over something that `what` would have to leave out."""
    refused = [name for name in unsupported if arguments.get(name) is not None]
    refused += ["dropout"] * bool(dropout) + ["attention_mask"] * (attention_mask is not None)
    if refused:
        raise ValueError(f"{type(module).__name__}: {what} does not know {', '.join(refused)}")


def no_mask(*args: Any, **kwargs: Any) -> None:
    """What a token must not see is in an argument of the attention function."""
