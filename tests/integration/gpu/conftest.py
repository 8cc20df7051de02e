"""The device of every test here: the CPU, and CUDA with `-m gpu`."""

import pytest
import torch

from support.gpu import DEVICES


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)
