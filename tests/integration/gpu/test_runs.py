"""Runs of `onepolicy train` with a rank on a device: start, checkpoint, resume."""

import pytest

from onepolicy.cli import main
from support.gpu import NO_CUDA, need_commands
from support.metrics import rows

pytestmark = pytest.mark.process


@pytest.mark.slow
def test_a_rank_trains_and_resumes_on_the_cpu(recipe, tmp_path):
    train_and_resume(recipe, tmp_path, "cpu")


@pytest.mark.gpu
@NO_CUDA
def test_a_rank_trains_and_resumes_over_nccl(recipe, tmp_path):
    """NCCL's start, the scatter of weights, FSDP2 in bfloat16, a checkpoint in the background."""
    need_commands()
    train_and_resume(recipe, tmp_path, "cuda")


def train_and_resume(recipe, tmp_path, device):
    settings = ["train.ranks=1", "train.fsdp_param_dtype=bfloat16", f"train.device={device}"]
    settings += ["eval.every=0", "checkpoint.every=2"]
    whole, out = tmp_path / "whole", tmp_path / "parts"
    assert main(["train", str(recipe), f"out={whole}", "steps=4", *settings]) == 0
    assert main(["train", str(recipe), f"out={out}", "steps=2", *settings]) == 0
    assert main(["train", "--resume", str(out), "steps=4"]) == 0
    assert len(rows(out)) == len(rows(whole)) == 4
    for again, at_once in zip(rows(out), rows(whole), strict=True):
        assert again["train/grad_norm"] > 0
        if device == "cpu":
            assert again["train/grad_norm"] == at_once["train/grad_norm"]
        else:
            close = pytest.approx(at_once["train/grad_norm"], rel=0.05)
            assert again["train/grad_norm"] == close
