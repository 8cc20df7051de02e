"""`onepolicy export` of runs with train.lora: loaded back by transformers and by peft."""

import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from onepolicy.cli import main
from onepolicy.config import ModelConfig
from onepolicy.models.load import load_model
from onepolicy.train import checkpoint
from onepolicy.train.adapter_export import export_merged
from support.metrics import rows

IDS = torch.arange(40).reshape(2, 20) % 11
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def runs(recipe, policy, tmp_path_factory):
    """Return {dtype: a run that trained an adapter in it} and the folder of their base."""
    folder = tmp_path_factory.mktemp("runs")
    base = shutil.copytree(policy, folder / "base")
    settings = (f"model.path={base}", "train.lora.rank=4", "optim.lr=5e-3", "steps=2")
    for dtype in DTYPES:
        own = (f"out={folder / dtype}", f"model.dtype={dtype}", "eval.every=0")
        assert main(["train", str(recipe), *settings, *own]) == 0
    return {dtype: folder / dtype for dtype in DTYPES}, base


@torch.no_grad()
def logp(model):
    return model.float().eval()(input_ids=IDS).logits.log_softmax(-1)


def opened(folder, dtype="float32"):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def exported(run, out, *options):
    assert main(["export", str(run), "--out", str(out), *options]) == 0
    return out


def last_checkpoint(run):
    return checkpoint.checkpoint_folder(run, 2)


def said(capsys):
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.full
def test_the_adapter_is_loaded_by_peft(runs, policy, tmp_path):
    """peft's own model computes what the checkpoint does, experts included."""
    run = runs[0]["float32"]
    out = exported(run, tmp_path / "adapter", "--adapter")
    own = ModelConfig(path=str(last_checkpoint(run)))
    expected = logp(load_model(own, torch.float32, torch.device("cpu")))
    assert (expected - logp(opened(policy))).abs().max() > 1e-2
    found = logp(PeftModel.from_pretrained(opened(policy), out))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    names = {path.name for path in out.iterdir()}
    assert "tokenizer.json" in names
    assert not names & {"config.json", "state.json", "optimizer.safetensors"}


@pytest.mark.full
@pytest.mark.parametrize("trained_in", DTYPES)
def test_base_and_adapter_are_merged(runs, policy, tmp_path, capsys, trained_in):
    """In float32 it is the policy that was trained, whose base a run in bfloat16 had rounded."""
    run = runs[0][trained_in]
    adapter = exported(run, tmp_path / "adapter", "--adapter")
    whole = exported(run, tmp_path / "float32", "--dtype", "float32")
    base = opened(policy, trained_in).float()
    expected = logp(PeftModel.from_pretrained(base, adapter))
    torch.testing.assert_close(logp(opened(whole)), expected, atol=1e-4, rtol=0)
    capsys.readouterr()
    rounded = exported(run, tmp_path / "bfloat16")
    assert "nats; merged into bfloat16 it moves them" in said(capsys)
    tensors, other = opened(rounded).state_dict(), opened(whole).state_dict()
    assert tensors.keys() == other.keys()
    for name, tensor in other.items():
        if tensor.dim() > 1:
            assert torch.equal(tensors[name], tensor.bfloat16().float()), name


def test_the_loss_that_is_said_is_that_of_the_rounding(runs, policy, tmp_path):
    """A merge into float32 loses nothing; one into bfloat16 loses part of the effect."""
    run = runs[0]["float32"]
    folder = last_checkpoint(run)
    _, exact = export_merged(folder, tmp_path / "float32", torch.float32)
    size, loss = export_merged(folder, tmp_path / "bfloat16", torch.bfloat16)
    assert exact.lost < 1e-4 * exact.effect
    assert 20 * exact.lost < loss.lost < loss.effect
    assert loss.effect == exact.effect == pytest.approx(rows(run)[-1]["adapter/effect"], rel=0.5)
    assert size < 0.51 * sum(p.nbytes for p in opened(policy).parameters()) + 1e5


def test_another_base_is_refused(runs, tmp_path, capsys):
    made, base = runs
    whole, model = (base / "model.safetensors").read_bytes(), opened(base)
    model.model.embed_tokens.weight.data[0] += 1
    try:
        model.save_pretrained(base)
        assert main(["export", str(made["float32"]), "--out", str(tmp_path / "out")]) == 2
    finally:
        (base / "model.safetensors").write_bytes(whole)
    assert "not those that this adapter was trained on" in said(capsys)
    assert not (tmp_path / "out").exists()
