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
from support.metrics import rows

LORA = ("train.lora.rank=4", "optim.lr=5e-3", "steps=2", "eval.every=0")
IDS = torch.arange(40).reshape(2, 20) % 11


@torch.no_grad()
def logp(model):
    return model.float().eval()(input_ids=IDS).logits.log_softmax(-1)


def opened(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def exported(run, out, *options):
    assert main(["export", str(run), "--out", str(out), *options]) == 0
    return out


def test_the_adapter_is_loaded_by_peft(train, policy, tmp_path):
    """peft's own model computes what the checkpoint does, experts included."""
    run = train("lora", *LORA)
    out = exported(run, tmp_path / "adapter", "--adapter")
    own = load_model(
        ModelConfig(path=str(checkpoint.checkpoint_folder(run, 2))),
        torch.float32,
        torch.device("cpu"),
    )
    base = logp(opened(policy))
    found, expected = logp(PeftModel.from_pretrained(opened(policy), out)), logp(own)
    assert (expected - base).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    names = {path.name for path in out.iterdir()}
    assert "tokenizer.json" in names
    assert not names & {"config.json", "state.json", "optimizer.safetensors"}


@pytest.mark.parametrize("trained_in", ["float32", "bfloat16"])
def test_base_and_adapter_are_merged(train, policy, tmp_path, capsys, trained_in):
    """In float32 it is the policy that was trained, whose base a run in bfloat16 had rounded."""
    run = train("lora", *LORA, f"model.dtype={trained_in}")
    adapter = exported(run, tmp_path / "adapter", "--adapter")
    whole = exported(run, tmp_path / "float32", "--dtype", "float32")
    base = opened(policy, getattr(torch, trained_in)).float()
    expected = logp(PeftModel.from_pretrained(base, adapter))
    torch.testing.assert_close(logp(opened(whole)), expected, atol=1e-4, rtol=0)
    capsys.readouterr()
    rounded = exported(run, tmp_path / "bfloat16")
    assert "nats; merged into bfloat16 it moves them" in " ".join(capsys.readouterr().err.split())
    tensors, other = opened(rounded).state_dict(), opened(whole).state_dict()
    assert tensors.keys() == other.keys()
    for name, tensor in other.items():
        if tensor.dim() > 1:
            assert torch.equal(tensors[name], tensor.bfloat16().float()), name


def test_the_loss_that_is_said_is_that_of_the_rounding(train, policy, tmp_path):
    """A merge into float32 loses nothing; one into bfloat16 loses part of the effect."""
    from onepolicy.train.adapter_export import export_merged

    run = train("lora", *LORA, "steps=4")
    folder = checkpoint.checkpoint_folder(run, 4)
    _, exact = export_merged(folder, tmp_path / "float32", torch.float32)
    size, loss = export_merged(folder, tmp_path / "bfloat16", torch.bfloat16)
    assert exact.lost < 1e-4 * exact.effect
    assert 20 * exact.lost < loss.lost < loss.effect
    assert loss.effect == exact.effect == pytest.approx(rows(run)[-1]["adapter/effect"], rel=0.5)
    assert size < 0.51 * sum(p.nbytes for p in opened(policy).parameters()) + 1e5


def test_another_base_is_refused(train, policy, tmp_path, capsys):
    base = tmp_path / "base"
    shutil.copytree(policy, base)
    run = train("lora", *LORA, f"model.path={base}")
    model = opened(base)
    model.model.embed_tokens.weight.data[0] += 1
    model.save_pretrained(base)
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 2
    assert "not those that this adapter was trained on" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_whole_model_has_no_adapter_to_export(train, tmp_path, capsys):
    run = train("whole", "steps=1", "eval.every=0")
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--adapter"]) == 2
    assert "leave --adapter out" in " ".join(capsys.readouterr().err.split())
