"""`onepolicy export` of runs with train.lora: loaded back by transformers and by peft."""

import shutil
from functools import cache

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from onepolicy.cli import main
from onepolicy.config import ModelConfig
from onepolicy.models.load import load_model
from onepolicy.run.adapter_check import AdapterCheck
from onepolicy.train import checkpoint
from onepolicy.train.adapter_export import export_merged
from support.metrics import rows

IDS = torch.arange(40).reshape(2, 20) % 11
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def base(policy, tmp_path_factory):
    return shutil.copytree(policy, tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def trained(recipe, base, tmp_path_factory):
    """Return trained(dtype), a run that trains an adapter in it."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run(dtype):
        settings = (f"model.path={base}", "train.lora.rank=4", "optim.lr=5e-3", "steps=2")
        own = (f"out={folder / dtype}", f"model.dtype={dtype}", "eval.every=0")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AdapterCheck, "prompts", 8)
            assert main(["train", str(recipe), *settings, *own]) == 0
        return folder / dtype

    return run


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
def test_the_adapter_is_loaded_by_peft(trained, policy, tmp_path):
    """peft's own model computes what the checkpoint does, experts included."""
    run = trained("float32")
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
def test_base_and_adapter_are_merged(trained, policy, tmp_path, capsys, trained_in):
    """In float32 it is the policy that was trained, whose base a run in bfloat16 had rounded."""
    run = trained(trained_in)
    adapter = exported(run, tmp_path / "adapter", "--adapter")
    whole = exported(run, tmp_path / "float32", "--dtype", "float32")
    base = opened(policy, trained_in).float()
    expected = logp(PeftModel.from_pretrained(base, adapter))
    torch.testing.assert_close(logp(opened(whole)), expected, atol=1e-4, rtol=0)
    own = ModelConfig(path=str(last_checkpoint(run)))  # what `eval` and `measure` load
    found = load_model(own, torch.float32, torch.device("cpu")).state_dict()
    assert all(torch.equal(found[n], each) for n, each in opened(whole).state_dict().items())
    capsys.readouterr()
    rounded = exported(run, tmp_path / "bfloat16")
    assert "nats; merged into bfloat16 it moves them" in said(capsys)
    tensors, other = opened(rounded).state_dict(), opened(whole).state_dict()
    assert tensors.keys() == other.keys()
    for name, tensor in other.items():
        if tensor.dim() > 1:
            assert torch.equal(tensors[name], tensor.bfloat16().float()), name


@pytest.mark.full
def test_the_loss_that_is_said_is_that_of_the_rounding(trained, policy, tmp_path):
    """A merge into float32 loses nothing; one into bfloat16 loses part of the effect."""
    run = trained("float32")
    folder = last_checkpoint(run)
    _, exact = export_merged(folder, tmp_path / "float32", torch.float32)
    size, loss = export_merged(folder, tmp_path / "bfloat16", torch.bfloat16)
    assert exact.lost < 1e-4 * exact.effect
    assert 20 * exact.lost < loss.lost < loss.effect
    assert loss.effect == exact.effect == pytest.approx(rows(run)[-1]["adapter/effect"], rel=0.5)
    assert size < 0.51 * sum(p.nbytes for p in opened(policy).parameters()) + 1e5


def test_another_base_is_refused(trained, base, tmp_path, capsys):
    run = trained("float32")
    whole, model = (base / "model.safetensors").read_bytes(), opened(base)
    model.model.embed_tokens.weight.data[0] += 1
    try:
        model.save_pretrained(base)
        for command in (["export", str(run), "--out", str(tmp_path / "out")], ["eval", str(run)]):
            assert main(command) == 2
            assert "not those that this adapter was trained on" in said(capsys)
    finally:
        (base / "model.safetensors").write_bytes(whole)
    assert not (tmp_path / "out").exists()
