"""Routing replay for the models of transformers that prime-rl falls back to.

prime-rl hands `routed_experts` to every model. Its own models replay them. A model of transformers
takes the keyword and ignores it: replay is on in the settings and off in fact, without a message.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.errors import describe_argument
from onepolicy.integrations.core.layout import sample_starts
from onepolicy.replay.checks import refuse_router_loss
from onepolicy.replay.routers import Routers, bind_routers
from onepolicy.types import TraceOrigin

ROUTES = "routed_experts"
_bound: weakref.WeakKeyDictionary[Any, Routers] = weakref.WeakKeyDictionary()


def replay_in_transformers() -> None:
    """Make every model of transformers replay the `routed_experts` that a call hands it.

    A model whose own forward names that argument is left alone. Calling this twice does nothing.
    """
    theirs = PreTrainedModel.__call__
    if getattr(theirs, "onepolicy", False):
        return

    @functools.wraps(theirs)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        routes = kwargs.get(ROUTES)
        if routes is None or _takes_routes(self.__class__):
            return theirs(self, *args, **kwargs)
        del kwargs[ROUTES]
        return _replayed(theirs, self, routes, args, kwargs)

    call.onepolicy = True  # type: ignore[attr-defined]
    PreTrainedModel.__call__ = call  # type: ignore[method-assign]


def _replayed(theirs: Any, model: Any, routes: Any, args: Any, kwargs: Any) -> Any:
    """Run a forward under the replay of routes [B, S, layers, K]; rows of zeros are not routes.

    Raises:
        UsageError: the routes are none of this model's, or it has no routers to replay.
        RoutingError: they are not the routes of these tokens.
    """
    if not isinstance(routes, Tensor) or routes.dim() != 4:
        raise UsageError(
            f"prime-rl: routed_experts is {describe_argument(routes)}, expected [B, S, layers, K]"
        )
    if model not in _bound:
        _bound[model] = bind_routers(model)
        refuse_router_loss(model.config)
    routers = _bound[model]
    ids = routes.flatten(0, 1)
    captured = None
    if routers.top_k > 1:
        captured = (ids != 0).flatten(1).any(1)
        if not captured.any():  # a micro-batch of padding
            return theirs(model, *args, **kwargs)
    origin = TraceOrigin(sample_starts(args, kwargs, len(ids)))
    with routers.replay(routers.trace_from(ids, valid=captured).with_origin(origin)):
        return theirs(model, *args, **kwargs)


@functools.cache
def _takes_routes(kind: Any) -> bool:
    return ROUTES in inspect.signature(kind.forward).parameters
