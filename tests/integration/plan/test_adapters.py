"""What `onepolicy plan` says of adapters (train.lora), beside what a run holds and sends."""

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from onepolicy.cli import main
from onepolicy.config import ModelConfig, load
from onepolicy.config.lora import LoraConfig
from onepolicy.models import lora
from onepolicy.models.load import load_model
from onepolicy.plan.hardware import parse_cluster
from onepolicy.plan.planner import Planner
from onepolicy.plan.splits import DeviceSplit
from onepolicy.plan.times import communication_volume
from onepolicy.sync.adapters import add_adapter
from onepolicy.train import checkpoint
from support.metrics import rows

ALL = '["attention","experts","routers"]'


@pytest.fixture(scope="module")
def planned(recipe, tmp_path_factory):
    """Return planned("a.b=c", ...), the plan of the recipe with these settings."""

    @cache
    def run(*settings):
        path = tmp_path_factory.mktemp("plan") / "plan.json"
        command = ["plan", str(recipe), "--cluster", "1xcpu", "--json", str(path), *settings]
        assert main(command) == 0
        return json.loads(path.read_text())

    return run


def within_5_percent(found):
    return pytest.approx(found, rel=0.05)


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        ("train.lora.rank=4",),
        ("train.lora.rank=16", f"train.lora.targets={ALL}", "train.lora.sync=native"),
        ("train.lora.rank=8", "model.dtype=bfloat16", 'train.lora.targets=["attention"]'),
    ],
)
def test_a_run_holds_and_sends_what_was_planned(train, planned, settings):
    plan = planned(*settings)
    run = train("lora", *settings, "steps=1", "eval.every=0")
    folder = checkpoint.checkpoint_folder(run, 1)
    moments = load_file(folder / "optimizer.safetensors")
    state = sum(t.nbytes for name, t in moments.items() if "exp_avg" in name)
    adapter = sum(t.nbytes for t in load_file(folder / "adapter_model.safetensors").values())
    learner = plan["chosen"]["learner_bytes"]
    assert state > 0
    assert learner["optimiser"] == within_5_percent(state)
    assert learner["masters"] == 0
    assert plan["model"]["adapter"] * 4 == adapter
    assert plan["chosen"]["checkpoint"]["size"] == within_5_percent(state + adapter)
    assert plan["traffic"]["weights"] == within_5_percent(rows(run)[-1]["sync/gib"] * 2**30)


@pytest.mark.full
def test_gradients_are_those_of_adapters(planned, policy):
    plan = planned("train.lora.rank=4")
    model = load_model(ModelConfig(path=str(policy)), torch.float32, torch.device("cpu"))
    base = sum(parameter.nbytes for parameter in model.parameters())
    add_adapter(model, LoraConfig(rank=4), str(policy), seed=0)
    for layer in lora.adapted_layers(model).values():
        lora.factors_of(layer)[1].data.fill_(0.01)
    model(input_ids=torch.arange(400).reshape(8, 50) % 11).logits.square().sum().backward()
    found = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    learner = plan["chosen"]["learner_bytes"]
    assert 0 < found < base / 2
    assert learner["gradients"] == within_5_percent(found)
    assert learner["parameters"] == within_5_percent(base + found)


@pytest.mark.full
def test_the_reference_of_the_kl_takes_nothing(planned, policy):
    settings = ("train.lora.rank=4", "objective.kl.coef=0.1")
    second = (*settings, f"objective.kl.reference={policy}")
    own = planned(*settings)["chosen"]["learner_bytes"]
    assert own["others"] == 0
    assert planned(*second)["chosen"]["learner_bytes"]["others"] > 0


@pytest.mark.full
def test_every_rank_has_the_whole_adapter_and_a_part_of_the_rest(recipe):
    """What ranks send is counted by hand: weights for two passes over each micro-batch, and A and B
    twice, since every rank gets the sum of their gradients."""
    config = load(recipe, ["train.lora.rank=4", "objective.num_minibatches=2"])
    planner = Planner(config, config.model, parse_cluster("4xcpu"))
    one, two = (planner.evaluate_split(DeviceSplit(ranks, 1, 1)) for ranks in (1, 2))
    held, shared = one.learner, two.learner
    dims = planner.dims
    assert (shared.optimiser, shared.gradients) == (held.optimiser, held.gradients)
    rest = held.parameters - 4 * dims.adapter
    assert shared.parameters - 4 * dims.adapter == within_5_percent(rest / 2)
    assert two.save.size == one.save.size
    gathers = 2 + config.scores_old
    micro_batches = planner.work.micro_batches(config.train.tokens_per_micro_batch, 2)
    sent = (micro_batches * gathers * 4 * dims.total + 2 * 2 * 4 * dims.adapter) / 2
    assert communication_volume(dims, config, planner.work, 2).gathered == sent


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "setting"), [("float32", []), ("bfloat16", ["model.dtype=bfloat16"])]
)
def test_frozen_weights_in_nf4_take_what_was_planned(planned, policy, dtype, setting):
    from onepolicy.models.nf4 import stored_bytes

    settings = ("train.lora.rank=4", *setting)
    whole, plan = planned(*settings), planned(*settings, "train.lora.base=nf4")
    model = load_model(ModelConfig(path=str(policy)), getattr(torch, dtype), torch.device("cpu"))
    add_adapter(model, LoraConfig(rank=4, base="nf4"), str(policy), seed=0)
    now, before = stored_bytes(model)
    assert plan["model"]["four_bit"] == before / model.dtype.itemsize
    saved = (each["chosen"]["learner_bytes"]["parameters"] for each in (whole, plan))
    assert next(saved) - next(saved) == within_5_percent(before - now)
