"""Seconds of one update beside a padded reference step, and the share of the GPU's peak.

Qwen3-0.6B, 64 samples of 256 prompt tokens and 384 to 768 response tokens, in float32, autocast
and bfloat16. The reference is how trainers on transformers' own models do it: rows padded to one
length, SDPA, logits of the response, log-probabilities of the sampled tokens, the same clipped
loss with a token mean, fused AdamW. Both make one optimiser step of 4 micro-batches. Target: at
least 1.3 times the reference in bfloat16, and 35% of the card's bfloat16 peak.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from gpu.harness import Bench
from gpu.models import dense, make, parameters_multiplied, prepared, ragged, samples
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from onepolicy.config import resolve
from onepolicy.models.chunk_size import slots_per_chunk
from onepolicy.train.learner import LocalLearner
from onepolicy.train.pack import pack
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import TokenBatch

PEAK_FLOPS = 989e12  # bfloat16 of an H100 or H200 without sparsity, NVIDIA's data sheet
PRECISIONS = {
    "bfloat16": ("bfloat16", "off"),
    "autocast": ("float32", "bfloat16"),
    "float32": ("float32", "off"),
}
"""Name -> model.dtype, train.autocast."""
CLIP = (0.2, 0.28)
SHARE = 8.0  # seconds of one side of a case


def main(bench: Bench) -> None:
    count, prompt, shortest = bench.size((64, 256, 384), (4, 5, 8))
    lengths = [prompt + n for n in ragged(count, shortest)]
    for precision, (dtype, autocast) in PRECISIONS.items():
        if not bench.has_time(precision, 2 * SHARE + 6):
            continue
        seconds: dict[str, float] = {}
        for side, build in (("onepolicy", Ours), ("padded", Padded)):
            with bench.case(f"{side}, {precision}"):
                step = build(bench, lengths, prompt, dtype, autocast)
                seconds[side] = record(step, f"{side}, {precision}", sum(lengths), bench)
                if precision == "bfloat16" and bench.has_time(f"profile, {side}", 25):
                    profiled = bench.profile(step.update)
                    bench.record(
                        f"profile, {side}",
                        launches=profiled.launches,
                        gpu_busy=profiled.busy / profiled.wall,
                        longest=profiled.longest,
                    )
                del step
        if len(seconds) == 2:
            ratio = seconds["padded"] / seconds["onepolicy"]
            bench.record(f"padded / onepolicy, {precision}", ratio=ratio, target=1.3)


def record(step: Ours | Padded, case: str, tokens: int, bench: Bench) -> float:
    """Time the updates of one side and record them. Return the median of their seconds."""
    measured = bench.measure(step.update, share=SHARE)
    bench.record(
        case,
        seconds=measured.seconds,
        slots_per_second=tokens / measured.median,
        share_of_peak=step.flops() / measured.median / PEAK_FLOPS,
        peak_gb=measured.peak / 1e9,
        **step.extra(),
    )
    return measured.median


def model_flops(model: PreTrainedModel, lengths: list[int], prompt: int) -> float:
    """Return the operations of forward and backward on these samples, without padding."""
    body, head = parameters_multiplied(model)
    config = model.config
    slots = sum(n - 1 for n in lengths)
    trainable = slots - len(lengths) * (prompt - 1)
    width = config.num_attention_heads * config.head_dim
    attention = sum(2 * width * n * n for n in lengths) * config.num_hidden_layers  # causal half
    return 3 * (2 * body * slots + 2 * head * trainable + attention)


class Ours:
    """The update of the learner, after a scoring."""

    def __init__(
        self, bench: Bench, lengths: list[int], prompt: int, dtype: str, autocast: str
    ) -> None:
        self.bench, self.lengths, self.prompt = bench, lengths, prompt
        tree: dict[str, Any] = {
            "out": "unused",
            "steps": 10_000,
            "model": {"path": "unused", "dtype": dtype},
            "task": {"kind": "chain"},
            "replay": {"mode": "off"},
            "train": {"autocast": autocast, "tokens_per_micro_batch": bench.size(16_384, 64)},
            "optim": {"lr": 1e-6},
        }
        model = make(dense(bench), bench, getattr(torch, dtype))
        chunk = slots_per_chunk(None, model.config.vocab_size)
        scorer = PolicyScorer(prepared(model, chunk), resolve(tree), routers=None)
        self.learner = LocalLearner(scorer)
        batch = pack(samples(model.config.vocab_size, lengths, prompt))
        self.unscored = batch
        ones = torch.ones(batch.num_slots)
        advantage = batch.outcome[batch.segment] * ones
        self.batch: TokenBatch = self.learner.score(batch).replace(
            advantage=advantage, weight=ones, keep=batch.trainable
        )

    def update(self) -> None:
        self.learner.step(self.batch)

    def flops(self) -> float:
        return model_flops(self.learner.model, self.lengths, self.prompt)

    def extra(self) -> dict[str, Any]:
        """Return the seconds of a scoring, the waits of the host and the micro-batches."""
        scoring = self.bench.measure(lambda: self.learner.score(self.unscored), share=3.0)
        return {
            "score_seconds": scoring.median,
            "waits": self.bench.waits(self.update),
            "micro_batches": len(self.learner.scorer.micro_batches(self.batch)),
        }


class Padded:
    """The reference: rows padded on the right to the longest, transformers' own forward."""

    def __init__(
        self, bench: Bench, lengths: list[int], prompt: int, dtype: str, autocast: str
    ) -> None:
        self.bench, self.lengths, self.prompt = bench, lengths, prompt
        self.autocast = autocast != "off"
        self.model = make(dense(bench), bench, getattr(torch, dtype)).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        groups = samples(self.model.config.vocab_size, lengths, prompt)
        made = [sample for group in groups for sample in group.samples]
        longest = max(lengths)
        rows = [pad(s.tokens.long(), (0, longest - len(s.tokens))) for s in made]
        self.ids = torch.stack(rows).to(bench.device)
        column = torch.arange(longest)
        self.mask = (column < torch.tensor(lengths)[:, None]).long().to(bench.device)
        signs = torch.tensor([s.outcome for s in made])
        self.advantage = signs.to(bench.device)
        self.rows_at_once = max(1, len(lengths) // 4)
        with torch.no_grad():
            self.logp_old = torch.cat([self._logp(rows) for rows in self._micro_batches()])

    def _micro_batches(self) -> list[slice]:
        count, size = len(self.ids), self.rows_at_once
        return [slice(start, start + size) for start in range(0, count, size)]

    def _logp(self, rows: slice) -> Tensor:
        """Return the log-probabilities of the response tokens, [rows, response] float32."""
        kept = self.ids.shape[1] - self.prompt + 1
        precision: Any = nullcontext()
        if self.autocast:
            precision = torch.autocast(self.bench.device.type, torch.bfloat16)
        with precision:
            logits = self.model(
                input_ids=self.ids[rows],
                attention_mask=self.mask[rows],
                use_cache=False,
                logits_to_keep=kept,
            ).logits[:, :-1]
        targets = self.ids[rows, self.prompt :]
        if logits.dtype == torch.float32:
            chosen = logits.gather(-1, targets[..., None])[..., 0]
            return chosen - torch.stack([row.logsumexp(-1) for row in logits])
        return torch.stack(
            [
                row.log_softmax(-1).gather(-1, own[:, None])[:, 0].float()
                for row, own in zip(logits, targets, strict=True)
            ]
        )

    def update(self) -> None:
        total = self.mask[:, self.prompt :].sum()
        for rows in self._micro_batches():
            ratio = (self._logp(rows) - self.logp_old[rows]).exp()
            advantage = self.advantage[rows, None]
            clipped = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
            loss = -torch.minimum(ratio * advantage, clipped * advantage)
            (loss * self.mask[rows, self.prompt :]).sum().div(total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def flops(self) -> float:
        return model_flops(self.model, self.lengths, self.prompt)

    def extra(self) -> dict[str, Any]:
        filled = float(self.mask.float().mean())
        return {"slots_that_are_no_padding": filled, "micro_batches": len(self._micro_batches())}
