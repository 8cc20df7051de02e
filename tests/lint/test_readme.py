"""The README: its code runs, its links lead somewhere; its first example."""

import inspect
import math
import re

import pytest
import torch

import onepolicy as op
from onepolicy.integrations.trl import attach
from support.paths import ROOT
from support.replay_models import build

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_it_is_short():
    assert len(README.split()) <= 1000


def test_the_line_for_trl():
    attached, _ = blocks(README, "python")
    call = re.search(r"op_trl\.attach\((.*?)\)", attached).group(1)
    names = re.findall(r"(\w+)=", call)
    assert names == ["replay", "dump"]
    assert set(names) <= set(inspect.signature(attach).parameters)


@pytest.mark.parametrize(("preset", "weight"), [("off", 1), ("tis", math.exp(0.01))])
def test_the_lines_for_a_trainer_of_your_own(preset, weight):
    """They run as they are printed, given a model, an engine's ids, and the usual tensors."""
    torch.manual_seed(0)
    model, tokens = build("qwen3_moe"), torch.randint(40, (1, 13))
    with torch.no_grad(), op.bind_routers(model).record() as tape:
        model(input_ids=tokens[:, :-1], use_cache=False)

    def score(model, tokens):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.log_softmax(-1)
        return logits.gather(-1, tokens[:, 1:, None])[0, :, 0]

    names = {
        **{"model": model, "tokens": tokens, "score": score, "ids": tape.trace().ids},
        "logp_rollout": score(model, tokens).detach() - 0.01,
        "mask": torch.ones(12, dtype=torch.bool),
        "advantages": torch.randn(12),
    }
    lines = blocks(README, "python")[1]
    assert 'op.preset("off"))  # or "tis"' in lines
    exec(compile(lines.replace('"off"', f'"{preset}"'), "README.md", "exec"), names)
    names["loss"].backward()
    assert names["applied"].weight.allclose(torch.tensor(weight, dtype=torch.float32))
    gates = [p.grad for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")]
    assert gates
    assert all(gate.abs().sum() > 0 for gate in gates)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_every_link_of_the_readme_leads_to_a_file(target):
    assert (ROOT / target).exists()


@pytest.mark.full
def test_the_first_example(capsys):
    path = ROOT / "examples" / "record_and_replay.py"
    names = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    k3_without, k3_with = map(float, re.findall(r"k3 [\w ]+: ([\d.e-]+)", capsys.readouterr().out))
    assert 0 < k3_with < k3_without
    gates = [
        p.grad for n, p in names["trainer"].named_parameters() if n.endswith("mlp.gate.weight")
    ]
    assert len(gates) == 4
    assert all(gate.abs().sum() > 0 for gate in gates)
