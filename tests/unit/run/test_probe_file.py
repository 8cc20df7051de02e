"""Probe files: what of a batch is written, and how much of it."""

import torch
from safetensors.torch import load_file

from onepolicy.run.probe_file import save_counterfactual
from onepolicy.types import RoutingTrace
from support.objective_batches import batch

LAYERS, TOP_K, EXPERTS = 64, 8, 16


def test_routes_fill_four_mebibytes_at_most(tmp_path):
    """2,048 tokens of 64 layers and 8 experts are 2^20 ids of 4 bytes. The first tokens are kept,
    and a row that was not captured is -1."""
    slots = 2100
    trainable = torch.ones(slots, dtype=torch.bool)
    trainable[:3] = False
    valid = torch.ones(slots, dtype=torch.bool)
    valid[4] = False
    first = torch.arange(slots) % 9
    ids = (first[:, None, None] + torch.arange(TOP_K)).expand(-1, LAYERS, -1)
    traces = {
        name: RoutingTrace(each.to(torch.uint8).contiguous(), on, tuple(range(LAYERS)), EXPERTS)
        for name, each, on in (
            ("routing", ids, valid),
            ("routing_native", 15 - ids, torch.ones_like(valid)),
        )
    }
    whole = batch([1000, 1100], trainable, [0.0, 1.0]).replace(
        logp_old=torch.zeros(slots), entropy=torch.zeros(slots), **traces
    )
    save_counterfactual(tmp_path / "probes" / "step_1.safetensors", whole, None, "{}")
    saved = load_file(tmp_path / "probes" / "step_1.safetensors")
    assert len(saved["logp_trainer"]) == slots - 3
    rollout, trainer = saved["routes_rollout"], saved["routes_trainer"]
    assert rollout.nbytes == trainer.nbytes == 2**22
    assert rollout[:3, 0, 0].tolist() == [3, -1, 5]
    assert trainer[:3, 5, 1].tolist() == [11, 10, 9]
    assert rollout[-1, -1, -1] == (3 + 2047) % 9 + 7
