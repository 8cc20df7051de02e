"""Runs with an adapter, and what they saved of it."""

import contextlib
import io

import torch
from safetensors.torch import load_file

from onepolicy.cli import main
from onepolicy.train import checkpoint
from support.metrics import rows


def trained(recipe, out, *settings):
    """Train in the folder `out` and return what was printed, in one line."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["train", str(recipe), f"out={out}", *settings]) == 0
    return " ".join(said.getvalue().split())


def updates(run):
    """Return the rows of the run's updates."""
    return [row for row in rows(run) if "train/reward" in row]


def last_evaluation(run):
    return next(row for row in reversed(rows(run)) if "eval/greedy" in row)


def adapter_files(run, step):
    folder = checkpoint.checkpoint_folder(run, step)
    names = ("adapter_model.safetensors", "optimizer.safetensors")
    return {name: load_file(folder / name) for name in names}


def assert_same_adapters(a, b, step):
    first, second = adapter_files(a, step), adapter_files(b, step)
    for name in first:
        assert first[name].keys() == second[name].keys()
        assert all(torch.equal(first[name][key], second[name][key]) for key in first[name])
