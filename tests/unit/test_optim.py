"""AdamW with float32 weights behind parameters of another dtype."""

import copy

import torch
from torch import nn

from onepolicy.config.model import OptimConfig
from onepolicy.train.optim import MASTER, adamw

CONFIG = OptimConfig(lr=1e-4, weight_decay=0.1)


def test_bfloat16_parameters_are_float32_weights_rounded():
    torch.manual_seed(0)
    low, whole = nn.Linear(7, 5).bfloat16(), nn.Linear(7, 5)
    whole.load_state_dict(low.state_dict())
    first = copy.deepcopy(low)
    addresses = [p.data_ptr() for p in low.parameters()]
    ours, plain = (
        adamw(low, CONFIG, torch.device("cpu")),
        torch.optim.AdamW(
            whole.parameters(), lr=CONFIG.lr, betas=CONFIG.betas, eps=CONFIG.eps, weight_decay=0.1, fused=True
        ),
    )
    for _ in range(40):
        for p, q in zip(low.parameters(), whole.parameters(), strict=True):
            p.grad = torch.rand_like(p)
            q.grad = p.grad.float()
        ours.step()
        plain.step()
    for p, q, begun in zip(low.parameters(), whole.parameters(), first.parameters(), strict=True):
        assert p.dtype == torch.bfloat16
        assert torch.equal(p, q.bfloat16())
        assert torch.equal(ours.state[p][MASTER], q)
        assert not torch.equal(p, begun)  # 40 updates, each too small for bfloat16, have added up
    assert [p.data_ptr() for p in low.parameters()] == addresses


def test_float32_parameters_have_no_copy():
    model = nn.Linear(3, 2)
    optimizer = adamw(model, CONFIG, torch.device("cpu"))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert all(MASTER not in optimizer.state[p] for p in model.parameters())
