"""What a checked replay of Megatron keeps, on a stand-in for its router: no Megatron is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from onepolicy.integrations.megatron.routers import MegatronReplay, SequenceRanks
from onepolicy.replay.layers import Router
from onepolicy.types import RoutingTrace, TraceOrigin

SAMPLES, LENGTH, HIDDEN, EXPERTS, TOP_K = 2, 9, 16, 8, 2
HIDDEN_STATES = torch.randn(LENGTH, SAMPLES, HIDDEN, generator=torch.Generator().manual_seed(0))


class MegatronRouter(nn.Module):
    """A router that asks for its experts as Megatron's does, of all groups or of the best half."""

    def __init__(self, groups: int | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.groups, self.router_replay = groups, None
        self.config = SimpleNamespace(sequence_parallel=False)

    def own(self, scores: Tensor, k: int, groups: int | None, top: int | None):
        if groups is not None:
            best = scores.view(len(scores), groups, -1).amax(-1).topk(top).indices
            mask = torch.zeros(len(scores), groups, dtype=torch.bool).scatter(1, best, True)
            mask = mask.repeat_interleave(EXPERTS // groups, 1)
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores.topk(k)

    def forward(self, hidden: Tensor):  # [S, B, H]
        scores = (hidden @ self.weight.T).flatten(0, 1)
        top = None if self.groups is None else self.groups // 2
        if self.router_replay is None:
            return self.own(scores, TOP_K, self.groups, top)
        return self.router_replay.get_replay_topk(scores, TOP_K, self.groups, top, self.own)


@pytest.mark.parametrize("groups", [None, 4])
def test_rows_are_compared_sample_by_sample(groups):
    module = MegatronRouter(groups)
    own = module(HIDDEN_STATES)[1].view(LENGTH, SAMPLES, TOP_K).transpose(0, 1).flatten(0, 1)
    wrong = own.clone()
    wrong[5] = (own[5] + 4) % EXPERTS  # of sample 0; the others are the router's own
    valid = torch.ones(SAMPLES * LENGTH, dtype=torch.bool)
    trace = RoutingTrace(wrong[:, None].to(torch.uint8), valid, (0,), EXPERTS)
    router = Router("router", 0, module, EXPERTS, TOP_K, num_groups=0, top_groups=0)
    compared = torch.tensor([0, 5, 8, 9, 17])
    handle = MegatronReplay([router], trace, batch=SAMPLES, native=False, compared=compared)
    with handle.replaying(), torch.no_grad():
        module(HIDDEN_STATES)
    lacking = handle.lacking_experts()[:, 0]
    assert lacking[5] > 0
    assert lacking.count_nonzero() == 1
    assert torch.equal(handle.native_rows()[:, 0].sort(-1)[0], own[compared].sort(-1)[0])


def test_a_rank_of_sequence_parallelism_knows_where_packed_samples_begin() -> None:
    ids = torch.zeros(8, 1, TOP_K, dtype=torch.uint8)
    trace = RoutingTrace(ids, torch.ones(8, dtype=torch.bool), (0,), EXPERTS)
    packed = trace.with_origin(TraceOrigin((0, 3, 6)))
    starts = [SequenceRanks(None, rank, 2).own_rows(packed, 1).origin.starts for rank in (0, 1)]
    assert starts == [(0, 3), (0, 2)]
