"""Routes of a model with a planted difference."""

import torch

import onepolicy as op


def one_row_changed(trace):
    """Return the trace with other experts in row 4."""
    ids = trace.ids.clone()
    ids[4] = (ids[4].int() + 1).remainder(trace.num_experts).to(ids.dtype)
    return op.RoutingTrace(ids, trace.valid, trace.layers, trace.num_experts)


def one_row_late(trace):
    return trace.at((torch.arange(len(trace)) - 1).clamp(min=0))
