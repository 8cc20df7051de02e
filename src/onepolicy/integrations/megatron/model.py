"""`record(model)` and `replay(model, trace)`: the functions that a Megatron training loop calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

from onepolicy.integrations.megatron.find import find_routers, megatron_classes
from onepolicy.integrations.megatron.routers import MegatronReplay, MegatronRouters, MegatronTape
from onepolicy.replay.private_names import check_private_names
from onepolicy.replay.recompute import carry_also, check_checkpoints
from onepolicy.types import RoutingTrace

_bound: WeakKeyDictionary[nn.Module, MegatronRouters] = WeakKeyDictionary()


def routers_of(model: nn.Module) -> MegatronRouters:
    """Return the MoE routers of a Megatron model.

    The model is not changed. Calling it again gives the same object.

    Args:
        model: a GPTModel or another model of Megatron-core, also inside its DDP or Float16Module.
            With pipeline parallelism the stage (or the chunk of a virtual stage) of this rank.

    Raises:
        UsageError: the model has no MoE layer, or one whose router cannot be replayed. Or
            Megatron-core is missing or older than 0.16.
    """
    if isinstance(model, nn.Module) and model in _bound:
        return _bound[model]
    check_private_names()
    check_checkpoints()
    routers = MegatronRouters(find_routers(model))
    carry_also(megatron_classes().checkpoint)
    _bound[model] = routers
    return routers


@contextmanager
def record(model: nn.Module) -> Iterator[MegatronTape]:
    """Record the routes of every forward of a Megatron model in this context.

        with record(model) as tape:
            model(tokens, position_ids, None)
        trace = tape.trace()  # ids [B * S, L, K] uint8 or uint16, sample by sample

    Recomputes of a backward are not recorded. With pipeline parallelism the trace has the layers of
    this stage.

    Raises:
        UsageError: as of `routers_of`, or a setting under which the router does not choose by its
            top-k (settings.py).
        RoutingError: the model is being recorded or replayed already. Also when the context is
            left, unless every router ran once per forward on the same rows.
    """
    with routers_of(model).record() as tape:
        yield tape


@contextmanager
def replay(
    model: nn.Module,
    trace: RoutingTrace,
    *,
    batch: int = 1,
    native: bool = False,
    check: bool = True,
) -> Iterator[MegatronReplay]:
    """Make the next forward of a Megatron model in this context use the trace's experts.

        with replay(model, trace, batch=len(tokens)):
            losses = model(tokens, position_ids, None, labels=labels)
        losses.mean().backward()

    Row b * S + s of the trace belongs to token s of sample b of the tokens [B, S] that this rank
    feeds. Megatron's own order (by position) and the share of a rank under sequence parallelism are
    made here. With pipeline parallelism the trace may have the layers of all stages. Rows that are
    not valid are routed by the model itself.

    The backward may run anywhere. Megatron's activation recompute and torch's checkpoints recompute
    with the routes of their own forward, in whatever order micro-batches run.

    Args:
        trace: ids [B * S, L, K] and valid [B * S], on any device. It is copied.
        batch: B, samples of the micro-batch; 1 for packed sequences.
        native: also keep the routers' own choice, for `native()` and `check_alignment()`.
        check: when the context is left, compare the routes of every sample with the routers' own
            choice, see docs/replay.md.

    Raises:
        UsageError: as of `routers_of`; the trace is not one of this model; its rows are not those
            of `batch` samples; or a setting that replay cannot stand beside (settings.py).
        RoutingError: a router was not called, was called twice, or was given other rows. Or, with
            `check`, the routes are not those of this forward's tokens and weights.
    """
    bound = routers_of(model).replay(trace, batch=batch, native=native, check=check)
    with bound as handle:
        yield handle
