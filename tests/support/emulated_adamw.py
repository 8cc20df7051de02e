"""AdamW with its state on the host, on the emulated device, which must be imported before this.

python -c "import support.emulated_device, support.emulated_adamw as adamw; adamw.main()"
"""

import json

import torch
from torch import nn

from onepolicy.config.model import OptimConfig
from onepolicy.train import streamed_adamw
from onepolicy.train.optim import MasterAdamW
from onepolicy.train.optimizers import adamw

from support.emulated_device import DEVICE, EmulatedTensor, move_model  # isort: skip

STEPS, WIDTH = 3, 50


def train(where: str) -> tuple[list[list[float]], MasterAdamW]:
    torch.manual_seed(0)
    model = move_model(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    optimizer = adamw(model, OptimConfig(lr=1e-2, state=where), DEVICE)
    for _ in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = EmulatedTensor(torch.randn(parameter.shape))
        optimizer.step()
    return [parameter.host.flatten().tolist() for parameter in model.parameters()], optimizer


def moments(optimizer: MasterAdamW) -> list[torch.Tensor]:
    return [v for s in optimizer.state.values() for key, v in s.items() if key != "step"]


def main() -> None:
    """Print as JSON whether the weights are equal, and the bytes of moments on each tier."""
    streamed_adamw.BUCKET_BYTES = 12 * (WIDTH + 1) * WIDTH  # a layer
    computed, step = [], MasterAdamW.step

    def counted(self: MasterAdamW) -> None:
        step(self)
        computed.append(sum(m.nbytes for m in moments(self) if isinstance(m, EmulatedTensor)))

    usual, _ = train("device")
    MasterAdamW.step = counted
    streamed, optimizer = train("host")
    at_rest = moments(optimizer)
    found = {
        "equal": usual == streamed,
        "host": sum(m.nbytes for m in at_rest if not isinstance(m, EmulatedTensor)),
        "device": sum(m.nbytes for m in at_rest if isinstance(m, EmulatedTensor)),
        "device_in_a_step": max(computed),
        "buckets": len(computed) // STEPS,
    }
    print(json.dumps(found))
