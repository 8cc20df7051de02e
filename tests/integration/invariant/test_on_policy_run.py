"""Training runs with numerics = on-policy: every step exactly on-policy, faults found and
located."""

import asyncio
import dataclasses
import json
from dataclasses import asdict, replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from onepolicy.audit.read_run import describe_bit_equality
from onepolicy.build.components import SamplingComponents, build_components
from onepolicy.build.measure_components import MeasureComponents
from onepolicy.build.measure_settings import measure_config
from onepolicy.cli import main
from onepolicy.config import TrainingError, UsageError, load
from onepolicy.invariant.fingerprint import short_digest
from onepolicy.invariant.numerics_contract import require_same_contract
from onepolicy.measure.bitwise import measure_bitwise
from onepolicy.models import experts as fast_experts
from onepolicy.report.bitwise import HELD, first_difference, summary
from onepolicy.run import resume
from onepolicy.run.step import rl_step
from support.metrics import rows

ON = ("numerics=on-policy", "eval.every=0", "steps=2")


def exact(run):
    """Check that every row of a run is exactly on-policy."""
    found = [row for row in rows(run) if "mismatch/k3" in row]
    for row in found:
        assert (row["mismatch/k3"], row["mismatch/differing"], row["mismatch/max_dlogp"]) == (
            0.0,
            0.0,
            0.0,
        )
        assert row.get("routing/routers", 0.0) == 0.0
        for name in (
            "counterfactual/mismatch/differing",
            "repeat/k3",
            "counterfactual/repeat/routers",
        ):
            assert row.get(name, 0.0) == 0.0
    return found


def weights(run, step=2):
    return load_file(run / "checkpoints" / f"step_{step:05d}" / "model.safetensors")


def parts_of(recipe, *overrides):
    config = load(str(recipe), ["numerics=on-policy", *overrides])
    return build_components(config)[0]


def measured(parts):
    """Build the engine and scorer of `onepolicy measure`."""
    shared = {
        field.name: getattr(parts, field.name) for field in dataclasses.fields(SamplingComponents)
    }
    return MeasureComponents(**shared, scorer=parts.learner.scorer)


def plant(parts, layer=1):
    """Put the engine's experts of one layer into the fast path."""
    module = parts.engine.model.model.layers[layer].mlp.experts
    module.forward = lambda *args: fast_experts.grouped_experts(module, *args)
    return module


def test_every_step_is_exactly_on_policy(train):
    run = train(None, *ON, "objective.num_minibatches=2", "log.counterfactual_every=1")
    found = exact(run)
    assert len(found) == 2
    assert "counterfactual/mismatch/k3" in found[0]
    about = json.loads((run / "run.json").read_text())
    assert about["fingerprint"]["numerics"] == "on-policy"
    with safe_open(run / "probes" / "step_00001.safetensors", "pt") as probe:
        both = probe.metadata()
        assert json.loads(both["rollout"]) == [both["fingerprint"]]
        assert json.loads(both["fingerprint"]) == about["fingerprint"]
    assert resume.build_difference(run, json.dumps(about["fingerprint"])) is None
    assert (
        resume.build_difference(run, json.dumps(about["fingerprint"] | {"cuda": "x"}))
        == "cuda: x, unset"
    )
    assert "To the bit: 0 of" in describe_bit_equality(run)
    assert describe_bit_equality(run).endswith("computed alike")
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert sample["fingerprint"] == short_digest(json.dumps(about["fingerprint"], sort_keys=True))
    assert sample["mean_logp_rollout"] == sample["mean_logp_trainer"]


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        (
            {"numerics": "on-policy", "capability": "AVX2"},
            {"numerics": "on-policy"},
            "capability: AVX2, unset",
        ),
        ({"numerics": "fast"}, {"numerics": "fast"}, "numerics were not on-policy"),
        ({"numerics": "on-policy"}, None, "no fingerprint"),
    ],
)
def test_an_audit_reports_missing_evidence(tmp_path, ours, theirs, why):
    logp = torch.tensor([-1.0, -2.0])
    rollout = json.dumps([] if theirs is None else [json.dumps(theirs)])
    (tmp_path / "probes").mkdir()
    save_file(
        {"logp_rollout": logp, "logp_trainer": logp.clone()},
        tmp_path / "probes" / "step_00001.safetensors",
        metadata={"fingerprint": json.dumps(ours), "rollout": rollout},
    )
    assert describe_bit_equality(tmp_path).startswith(
        "To the bit: 0 of 2 log-probabilities of the probes differ; cannot claim"
    )
    assert why in describe_bit_equality(tmp_path)


def test_bfloat16_with_the_rollout_as_anchor(train):
    """The batch is not scored before the update, and the update sees the same bits."""
    run = train(None, *ON, "model.dtype=bfloat16", "replay.mode=off", "correction.preset=ppo-is")
    assert len(exact(run)) == 2


def test_the_engines_batches_do_not_move_the_weights(train):
    base, other = (
        train(
            None,
            *ON,
            "log.counterfactual_every=0",
            f"rollout.engine.max_num_seqs={slots}",
            f"rollout.engine.enable_prefix_caching={on}",
        )
        for slots, on in ((8, "true"), (3, "false"))
    )
    exact(base)
    before, after = weights(base), weights(other)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_without_the_mode_it_differs(train):
    row = rows(train(None, "eval.every=0", "steps=1", "rollout.engine.dtype=float32"))[0]
    assert row["mismatch/differing"] > 0


def test_a_fault_of_one_layer_stops_the_run_and_is_located(recipe):
    parts = parts_of(recipe)
    config = measure_config(
        {"model": {"path": parts.config.model.path}, "numerics": "on-policy"}, [], None
    )
    assert config.rollout.engine.dtype == "float32"
    plant(parts)
    with pytest.raises(
        TrainingError, match=r"step 1: \d+ of \d+ log-probabilities differ, first problem 0, sample"
    ):
        asyncio.run(rl_step(parts, 0))
    found = asyncio.run(measure_bitwise(measured(parts), "small"))
    assert not found.holds
    assert found.differing > 0
    assert found.first.layer == 1
    assert found.first.operator == "model.layers.1.mlp.experts (Qwen3MoeExperts)"
    assert 0 < found.first.largest < 1e-4
    assert "model.layers.1.mlp.experts (Qwen3MoeExperts), off by up to" in first_difference(
        asdict(found) | {"holds": found.holds}
    )


def test_a_fault_of_attention_is_located(recipe):
    parts = parts_of(recipe)
    attention = parts.engine.model.model.layers[2].self_attn
    attention.scaling = torch.tensor(attention.scaling).nextafter(torch.tensor(1.0)).item()
    found = asyncio.run(measure_bitwise(measured(parts), "small"))
    assert found.first.layer == 2
    assert (
        found.first.operator == "rotary embedding or attention function of model.layers.2.self_attn"
    )


def test_a_fault_of_a_router_is_located(recipe):
    """The router's logits are right, the weights made of them are wrong."""
    parts = parts_of(recipe)
    router = parts.engine.model.model.layers[1].mlp.gate
    forward = router.forward
    router.forward = lambda hidden: (
        lambda logits, scores, ids: (logits, scores * (1 + 2**-20), ids)
    )(*forward(hidden))
    found = asyncio.run(measure_bitwise(measured(parts), "small"))
    assert (found.first.layer, found.first.operator) == (
        1,
        "model.layers.1.mlp.gate (Qwen3MoeTopKRouter)",
    )


def test_measure_finds_nothing_where_nothing_is_wrong(recipe, tmp_path, capsys):
    out = tmp_path / "measured"
    assert (
        main(["measure", "--numerics", "on-policy", "--recipe", str(recipe), "--out", str(out)])
        == 0
    )
    tree = json.loads((out / "bitwise.json").read_text())
    assert tree["holds"]
    assert (tree["differing"], tree["trainer_again"], tree["engine_alone"], tree["k3"]) == (
        0,
        0,
        0,
        0.0,
    )
    assert tree["tokens"] == tree["alone"] > 50
    printed = " ".join(capsys.readouterr().out.split())
    assert HELD in printed
    assert printed.endswith("bitwise.json (bits have no charts, so there is no report.html)")
    assert len(summary(tree)) == 2


@pytest.mark.parametrize(
    "option", [("--top", "5"), ("--dense", "x"), ("--engine-model", "x"), ("--png", "--out", "y")]
)
def test_options_that_bits_have_no_use_for(recipe, option, capsys):
    assert main(["measure", "--numerics", "on-policy", "--recipe", str(recipe), *option]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"onepolicy: {option[0]}: ")
    assert (
        "numerics = on-policy compares bits" in message
        or "has no effect with numerics = on-policy" in message
    )


def test_engine_and_learner_with_different_arithmetic_are_refused(recipe):
    parts = parts_of(recipe)
    engine, learner = parts.engine.caps.contract, parts.learner.scorer.contract
    require_same_contract(engine, learner)
    fast = parts_of(recipe, "numerics=fast", "rollout.engine.dtype=float32").engine.caps.contract
    with pytest.raises(
        UsageError,
        match="same numerics on both sides, but the engine has fast and the trainer on-pol",
    ):
        require_same_contract(fast, learner)
    for field in ("dtype", "attention", "experts", "lm_head", "logp"):
        with pytest.raises(
            UsageError,
            match=f"same {field} on both sides, but the engine has other and the trainer",
        ):
            require_same_contract(replace(engine, **{field: "other"}), learner)
    for name in ("model.layers.0.mlp.gate", "model.rotary_emb"):
        changed = tuple((n, "float64" if n == name else how) for n, how in engine.modules)
        assert changed != engine.modules
        with pytest.raises(
            UsageError,
            match=f"same module {name} on both sides, but the engine has float64 and the t",
        ):
            require_same_contract(replace(engine, modules=changed), learner)
