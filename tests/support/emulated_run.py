"""RL steps on the emulated device, which must be imported before onepolicy.

python -c "import support.emulated_device, support.emulated_run as r; r.main(['qwen3_moe r3 tis'])"
"""

import json
import traceback

import torch

from onepolicy.invariant import fingerprint

from support.emulated_device import (  # isort: skip - it changes torch
    DEVICE,
    READS,
    OtherDeviceError,
    move_model,
)

from support.whole_step import measure


def check_device() -> None:
    """Raise AssertionError unless the device refuses tensors of the CPU and counts reads."""
    there = torch.ones(2, device=DEVICE)
    try:
        there + torch.ones(2)
    except OtherDeviceError:
        READS.pop_all()
        assert (there.sum().item(), sum(READS.pop_all().values())) == (2.0, 1)
        return
    raise AssertionError("a tensor of the CPU was added to one of the device")


def main(cases: list[str]) -> None:
    """Run the cases and print a line of JSON for each, with its traceback if it fails."""
    torch.set_num_threads(1)
    check_device()
    fingerprint._gpu = lambda device: {"device": str(device)}
    for case in cases:
        try:
            found = measure(case, move_model)
        except Exception:
            found = {"case": case, "error": traceback.format_exc()[-3000:]}
        print(json.dumps(found), flush=True)
