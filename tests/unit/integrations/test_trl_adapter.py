"""What `attach` puts in the place of a TRL trainer's methods, around a stand-in for the trainer."""

import sys
from collections import defaultdict
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.integrations.trl import adapter, attach, routed_vllm
from onepolicy.integrations.trl import ranks as ranks_of_trl
from onepolicy.integrations.trl.correction import average_of, correct_generation
from onepolicy.integrations.trl.own_model import SampledLogprobs
from onepolicy.record.export.trl import StepDump

PROMPT, COMPLETIONS = [5, 6], [[7, 8], [9]]
MASK = torch.tensor([[1, 1], [1, 0]])


class GRPOTrainer:
    """Samples with a stand-in for vLLM and scores every generation, as TRL does in this setting."""

    use_vllm, use_transformers_continuous_batching, temperature = True, False, 1.0
    num_iterations, loss_type, top_p, top_k, min_p = 2, "grpo", 1.0, 0, None

    def __init__(self):
        self.args = SimpleNamespace(steps_per_generation=1, gradient_accumulation_steps=1)
        self.model = SimpleNamespace(training=True)
        self.state = SimpleNamespace(global_step=3)
        self.accelerator = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True)
        self.reward_weights = torch.ones(1)
        self.vllm_generation = SimpleNamespace(mode="colocate", generate=self.sample)
        self._metrics = {"train": defaultdict(list)}

    def sample(self, prompts):
        return [PROMPT] * 2, COMPLETIONS, [[[-1.0], [-2.0]], [[-3.0]]]

    def _generate(self, prompts):
        return self.vllm_generation.generate(prompts)[:2]

    def _generate_single_turn(self):
        raise AssertionError("vLLM samples")

    def _calculate_rewards(self):
        return torch.tensor([[0.5], [0.25]])

    def _get_per_token_logps_and_entropies(self, model, compute_entropy=False):
        assert model is self.model
        assert compute_entropy
        return torch.tensor([[-1.25, -2.25], [-3.25, 0.0]]), torch.full((2, 2), 0.75)

    def _generate_and_score_completions(self, inputs):
        self._generate(inputs)
        self._calculate_rewards()
        self._get_per_token_logps_and_entropies(self.model)
        ids = torch.tensor([[7, 8], [9, 0]])
        return {"completion_ids": ids, "completion_mask": MASK}

    def _compute_loss(self, model, inputs):
        return model, inputs


def test_vllms_log_probabilities_are_measured_and_dumped_where_asked(tmp_path):
    for dump in (None, tmp_path / "dump"):
        trainer = GRPOTrainer()
        attach(trainer, replay="off", dump=dump)
        made = trainer._generate_and_score_completions(["a prompt"])
        assert adapter.sampled(made)[MASK.bool()].tolist() == [-1, -2, -3]
        assert "sampling_per_token_logps" not in made  # TRL's off-policy mask would drop by it
        assert trainer._metrics["train"]["mismatch/k1"] == pytest.approx([0.25])
        assert (tmp_path / "dump").exists() == (dump is not None)
    (file,) = dump.iterdir()
    first, second = pq.read_table(file).to_pylist()
    assert [first["tokens"], second["tokens"]] == COMPLETIONS
    assert (first["logp_rollout"], first["logp_trainer"]) == ([-1, -2], [-1.25, -2.25])
    assert (first["reward"], second["reward"], second["entropy"]) == (0.5, 0.25, [0.75])
    assert first["step"] == second["step"] == 3


def test_log_probabilities_of_a_generate_of_another_shape(subtests):
    """Two prompts of three tokens. Beams feed more rows, drafts several tokens at a time."""
    logits = torch.zeros(4, 5)
    for name, calls, sequences in (
        ("beams", [4, 4], torch.zeros(2, 5)),
        ("drafts", [2], torch.zeros(2, 5)),
        ("ignored", [], torch.zeros(2, 5)),
    ):
        with subtests.test(name):
            kept = SampledLogprobs(1.0)
            for length, rows in enumerate(calls):
                kept(torch.zeros(rows, 3 + length).long(), logits[:rows])
            with pytest.raises(UsageError, match=f"its logits_processor {len(calls)} times"):
                kept.of(sequences.long(), 3)
    kept = SampledLogprobs(1.0)
    kept(torch.zeros(2, 3).long(), logits[:2])
    kept(torch.zeros(2, 4).long(), logits[:2])
    found = torch.tensor(kept.of(torch.zeros(2, 5).long(), 3))
    torch.testing.assert_close(found.exp(), torch.full((2, 2), 0.2))


def test_the_log_adds_up_counts_of_ranks(monkeypatch):
    """Shares are means over ranks, counts are sums and extremes the largest."""
    names = ["replay/rows", "correction/slots", "correction/weight_max", "replay/native_rows"]
    ranks = [dict(zip(names, values, strict=True)) for values in ((20, 6, 1.5, 0), (27, 3, 2, 1))]
    monkeypatch.setattr(ranks_of_trl, "gather_json", lambda accelerator, value: ranks)
    trainer = GRPOTrainer()
    ranks_of_trl.TrlLog(trainer).add(ranks[0])
    assert [trainer._metrics["train"][name] for name in names] == [[47], [9], [2], [0.5]]


def test_an_evaluation_has_the_trainers_own_loss():
    trainer, inputs = GRPOTrainer(), {"advantages": torch.ones(2)}
    attach(trainer, replay="off")
    trainer.model.training = False
    assert trainer._compute_loss(trainer.model, inputs) == (trainer.model, inputs)
    trainer.model.training = True
    model, copied = trainer._compute_loss(trainer.model, inputs)
    assert (model, copied) == (trainer.model, inputs)
    assert copied is not inputs


def test_vllm_is_built_with_routes(monkeypatch):
    package, vllm = ModuleType("trl.generation"), ModuleType("trl.generation.vllm_generation")
    package.vllm_generation = vllm
    for module in (ModuleType("trl"), package, vllm):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(UsageError, match="found no vLLM"), routed_vllm():
        pass
    vllm.LLM = dict
    with routed_vllm(enforce_eager=True):
        built = vllm.LLM(model="m")
    wanted = {"enable_return_routed_experts": True, "max_logprobs": -1}
    assert built == wanted | {"model": "m", "enforce_eager": True}
    assert vllm.LLM is dict


class ScoresInTheLoss(GRPOTrainer):
    """TRL without a scoring forward: its loss runs the only one."""

    num_iterations, beta = 1, 0.0
    ratio = "sampling"

    def _get_per_token_logps_and_entropies(self, model):
        return torch.full((2, 10), -1.25), torch.zeros(2, 10)

    def _compute_loss(self, model, inputs):
        self._get_per_token_logps_and_entropies(model)
        return inputs


def micro_batch(**more):
    return {
        "advantages": torch.ones(2),
        "completion_ids": torch.ones(2, 10, dtype=torch.long),
        "completion_mask": torch.ones(2, 10, dtype=torch.long),
        "sampling_per_token_logps": torch.full((2, 10), -1.0),
        **more,
    }


def test_a_micro_batch_may_have_more_values_that_are_not_finite_than_a_step():
    """correction.max_nonfinite (0.1) is a share of the step."""
    trainer, inputs = ScoresInTheLoss(), micro_batch()
    attach(trainer, replay="off", correction="tis", scoring="training-forward")
    inputs["sampling_per_token_logps"][0, :4] = float("nan")
    weighted = trainer._compute_loss(trainer.model, inputs)["advantages"]
    assert (weighted[0, :4] == 0).all()
    assert (weighted != 0).sum() == 16
    assert trainer._metrics["train"]["mismatch/nonfinite"] == [pytest.approx(0.2)]


def test_samples_dropped_in_the_loss_are_counted(monkeypatch):
    trainer, inputs = ScoresInTheLoss(), micro_batch()
    attach(trainer, replay="off", scoring="training-forward", on_mismatch="drop")

    @contextmanager
    def replaying(self, traces, *, native):
        yield []
        traces[1] = None

    monkeypatch.setattr(adapter.TrlAdapter, "_replaying", replaying)
    inputs[adapter.ROUTES] = [object(), object()]
    trainer._compute_loss(trainer.model, inputs)
    assert trainer._metrics["train"]["replay/dropped_samples"] == [0.5]


@pytest.mark.parametrize("correction", ["mis", "m2po"])
def test_a_correction_of_the_whole_step_is_refused_on_several_processes(correction):
    """Each has its own samples alone."""
    trainer = GRPOTrainer()
    attach(trainer, replay="off", correction=correction)
    trainer = GRPOTrainer()
    trainer.accelerator.num_processes = 2
    with pytest.raises(UsageError, match="2 processes"):
        attach(trainer, replay="off", correction=correction)
    attach(trainer, replay="off", correction="tis")


def test_weights_of_a_loss_over_sequences_are_normalised_over_sequences():
    """A: 10 tokens kept; B: one, rejected. Half of the loss is left, so the factor is 2."""
    keep_near = {"statistic": "ratio", "aggregate": "mean", "scope": "sequence", "high": 2.0}
    config = CorrectionConfig.model_validate({"gates": [keep_near], "normalise": "self"})
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, 1:] = False
    logp = torch.zeros(2, 10)
    rollout = torch.tensor([0.0, -2.0])[:, None].expand(2, 10)
    found = {}
    for loss in ("grpo", "dapo"):
        batch = {"advantages": torch.ones(2)}
        average = average_of(SimpleNamespace(loss_type=loss))
        correct_generation(batch, logp, rollout, mask, config, average)
        found[loss] = batch["advantages"][0].unique().tolist()
    assert found == {"grpo": [2.0], "dapo": [pytest.approx(1.1)]}


def test_a_dump_keeps_the_files_of_an_earlier_run(tmp_path, caplog):
    """A run that was resumed trains some of its steps again; generations of one step share one."""
    rows = [{"tokens": [1], "mask": [True], "logp_rollout": [-1.0], "logp_trainer": [-1.0]}]
    for run in range(2):
        dump = StepDump(GRPOTrainer(), tmp_path)
        dump.write(5, [])
        dump.write(5, rows)
        dump.write(5, rows)
        kept = [path for path in tmp_path.iterdir() if path.name != "step_00005_0.parquet"]
        assert len(kept) == run
        assert pq.read_table(tmp_path / "step_00005_0.parquet").num_rows == 2
    assert pq.read_table(kept[0]).num_rows == 2
    of_more_processes = tmp_path / "step_00006_1.parquet"
    (tmp_path / "step_00005_0.parquet").rename(of_more_processes)
    StepDump(GRPOTrainer(), tmp_path).write(6, rows)  # of one
    assert not of_more_processes.exists()
