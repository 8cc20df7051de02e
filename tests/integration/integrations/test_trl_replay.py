"""Routes that a rollout_func returns: replayed in scoring, dumped, refused. The trainer is a
stand-in that samples nothing and scores with a real model."""

from collections import defaultdict
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

import onepolicy as op
from onepolicy.config import UsageError
from onepolicy.integrations.trl import attach
from support.replay_models import build, random_trace

PROMPTS, COMPLETIONS = [[5, 6], [5, 6], [7, 8, 9]], [[7, 8, 9], [], [10, 11]]
PAD = 0


class GRPOTrainer:
    use_vllm, use_transformers_continuous_batching, temperature = False, False, 1.0
    num_iterations, loss_type, top_p, top_k, min_p = 2, "grpo", 1.0, 0, None
    rollout_func, router_aux_loss_coef, aux_loss_enabled = True, 0.0, False

    def __init__(self, routes):
        self.args = SimpleNamespace(
            steps_per_generation=1, gradient_accumulation_steps=1, torch_compile=False
        )
        self.model = build("qwen3_moe").train()
        self.state = SimpleNamespace(global_step=3)
        self.accelerator = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True)
        self.reward_weights = torch.ones(1)
        self._metrics = {"train": defaultdict(list)}
        self.routes = routes

    def _generate(self, prompts):
        return PROMPTS, COMPLETIONS, None, None, None, {"routed_experts": self.routes(self.model)}

    def _generate_single_turn(self):
        raise AssertionError("the rollout_func samples")

    def _calculate_rewards(self):
        return torch.tensor([[0.5], [0.25], [0.75]])

    def _get_per_token_logps_and_entropies(self, model, ids, mask, keep, compute_entropy=False):
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits[:, -keep - 1 : -1]
        logp = logits.log_softmax(-1)
        return logp.gather(-1, ids[:, -keep:, None])[..., 0], -(logp.exp() * logp).sum(-1)

    def _generate_and_score_completions(self, inputs):
        self._generate(inputs)
        self._calculate_rewards()
        made = {
            "prompt_ids": torch.tensor([[PAD, 5, 6], [PAD, 5, 6], [7, 8, 9]]),
            "prompt_mask": torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1]]),
            "completion_ids": torch.tensor([[7, 8, 9], [PAD] * 3, [10, 11, PAD]]),
            "completion_mask": torch.tensor([[1, 1, 1], [0, 0, 0], [1, 1, 0]]),
        }
        sides = [
            torch.cat([made[f"{side}_{n}"] for side in ("prompt", "completion")], 1)
            for n in ("ids", "mask")
        ]
        logp, _ = self._get_per_token_logps_and_entropies(self.model, *sides, 3)
        return made | {"sampling_per_token_logps": logp - 0.5}

    def _compute_loss(self, model, inputs):
        return model, inputs


def random_routes(model):
    """Return routes that are not the model's own, of every token that is fed."""
    bound = op.bind_routers(model)
    return [
        random_trace(len(p) + len(c) - 1, bound.layers, bound.num_experts, bound.top_k, seed=i)
        for i, (p, c) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True))
    ]


def not_captured(model):
    return [
        op.RoutingTrace(trace.ids, torch.zeros_like(trace.valid), trace.layers, trace.num_experts)
        for trace in random_routes(model)
    ]


def test_the_dump_has_the_routes_of_each_samples_completion(tmp_path):
    """Of the second sample nothing is trained on, so it has no row."""
    trainer = GRPOTrainer(random_routes)
    attach(trainer, dump=tmp_path, check=False)
    trainer._generate_and_score_completions(["a prompt"] * 3)
    (file,) = tmp_path.iterdir()
    rows = pq.read_table(file).to_pylist()
    assert [row["tokens"] for row in rows] == [[7, 8, 9], [10, 11]]
    traces = random_routes(trainer.model)
    with torch.no_grad(), op.bind_routers(trainer.model).record() as tape:
        trainer.model(input_ids=torch.tensor([[7, 8, 9, 10, 11]]))
    for row, i in zip(rows, (0, 2), strict=True):
        first = len(PROMPTS[i]) - 1
        expected = traces[i].ids[first : first + len(COMPLETIONS[i])]
        layers, top_k = expected.shape[1:]
        assert (row["route_layers"], row["route_top_k"]) == (layers, top_k)
        assert row["routes_rollout"] == expected.flatten().tolist()
        own = torch.tensor(row["routes_trainer"]).view(expected.shape)
        assert (own >= 0).all()
        assert not torch.equal(own, expected.long())
    found = tape.trace().ids[2:4, 0].sort(-1).values  # no replay has changed what the first reads
    assert torch.equal(own[:, 0].sort(-1).values, found.long())
    assert trainer._metrics["train"]["replay/native_rows"]


def test_a_generation_without_routes_is_refused_by_what_it_has(subtests):
    for name, routes, words in (
        (
            "none",
            lambda model: [None] * 3,
            "none of the 3 samples of a generation came with routes",
        ),
        ("zeros", not_captured, "no row of the routes of 3 samples was captured"),
        ("two", lambda model: random_routes(model)[:2], "routed_experts has 2 entries for 3"),
        ("no list", lambda model: 7, "routed_experts has no list for 3"),
    ):
        trainer = GRPOTrainer(routes)
        attach(trainer, check=False)
        with subtests.test(name), pytest.raises(UsageError, match=words):
            trainer._generate_and_score_completions(["a prompt"] * 3)
