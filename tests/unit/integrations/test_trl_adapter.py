"""What `attach` puts in the place of a TRL trainer's methods, around a stand-in for the trainer."""

import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from onepolicy.config import UsageError
from onepolicy.integrations.trl import adapter, attach, routed_vllm
from onepolicy.integrations.trl.own_model import SampledLogprobs

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
        assert made["sampling_per_token_logps"][MASK.bool()].tolist() == [-1, -2, -3]
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
    monkeypatch.setattr(adapter, "gather_json", lambda accelerator, value: ranks)
    trainer = GRPOTrainer()
    adapter.TrlLog(trainer).add(ranks[0])
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
