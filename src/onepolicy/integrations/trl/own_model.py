"""Routes, log-probabilities and supports of rollouts that the trainer's own model samples.

TRL's default without vLLM is `model.generate`, which returns tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from onepolicy.config import UsageError
from onepolicy.replay.padding import routes_of_generate
from onepolicy.replay.routers import Routers
from onepolicy.replay.topk_hook import override_attribute
from onepolicy.support.trace import KeptSet, SupportTrace, kept_sets
from onepolicy.types import RoutingTrace


@dataclass(slots=True)
class OwnRollouts:
    """The samples of one `generate()`, in its order."""

    traces: list[RoutingTrace] | None = None  # of prompt and completion; None: not recorded
    logp: list[list[float]] | None = None  # of the completion, with the fill after its end
    supports: list[SupportTrace] | None = None  # of the same tokens; None: not recorded


class SampledLogprobs(LogitsProcessor):
    """The log-probabilities of sampled tokens, kept one step of logits at a time.

    It stands before temperature, top-k and top-p in transformers' list of processors, so it divides
    by the temperature itself and leaves out the other two, as TRL's scoring does.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._calls = self._seen = 0
        self._last: Tensor | None = None  # [B, V] float32, log-probabilities of the next token
        self._logp: list[Tensor] = []  # [B, 1] of each token so far

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Keep the distribution of the next token. Return `scores` [B, V] unchanged."""
        self._calls, self._seen = self._calls + 1, len(input_ids)
        self._take(input_ids)
        self._last = self._distribution(scores)
        return scores

    def _distribution(self, scores: Tensor) -> Tensor:
        return (scores.float() / self._temperature).log_softmax(-1)

    def of(self, sequences: Tensor, prompt: int) -> list[list[float]]:
        """Return the log-probabilities of the tokens after the prompt's in `sequences` [B, S].

        Raises UsageError if generate() did not call this processor once a token and sequence.
        """
        if self._last is not None and len(self._last) == len(sequences):
            self._take(sequences)
        rows, found = len(sequences), [len(logp) for logp in self._logp]
        if found != [rows] * (sequences.shape[1] - prompt):
            raise UsageError(
                f"TRL: model.generate() returned {rows} sequences of "
                f"{sequences.shape[1] - prompt} new tokens, and called its logits_processor "
                f"{self._calls} times, for {self._seen} sequences at last: their log-probabilities "
                "are not known. It ignores logits processors, searches beams or drafts tokens; "
                "sample one token at a time, use vLLM, or return log-probabilities from a "
                "rollout_func"
            )
        listed: list[list[float]] = torch.cat(self._logp, 1).tolist()
        return listed

    def _take(self, sequences: Tensor) -> None:
        if self._last is not None:
            self._logp.append(self._last.gather(1, sequences[:, -1:]))


class SampledSupports(SampledLogprobs):
    """The same over the tokens that are left, and which these are: it stands last in the list."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self._kept: list[list[KeptSet]] = []  # of each call, of each of B rows

    def _distribution(self, scores: Tensor) -> Tensor:
        self._kept.append(kept_sets(scores.isfinite()))
        return scores.float().log_softmax(-1)

    def supports(self, rows: int, tokens: int) -> list[SupportTrace]:
        """Return the supports of `tokens` tokens of each row."""
        kept = self._kept[:tokens]
        return [SupportTrace.join([each[row] for each in kept]) for row in range(rows)]


@contextmanager
def _standing(processor: SampledLogprobs, model: nn.Module) -> Iterator[LogitsProcessorList]:
    """Yield the list to hand to generate(), in which the processor has its place.

    transformers puts a caller's processors before its temperature, top-k, top-p and min-p.
    """
    if not isinstance(processor, SampledSupports):
        yield LogitsProcessorList([processor])
        return
    base: Any = model
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    original = base._get_logits_processor

    def with_ours_last(*args: Any, **kwargs: Any) -> Any:
        return LogitsProcessorList([*original(*args, **kwargs), processor])

    with override_attribute("_get_logits_processor", [(base, with_ours_last)]):
        yield LogitsProcessorList()


@contextmanager
def own_rollouts(
    model: nn.Module, routers: Routers | None, temperature: float, *, supports: bool = False
) -> Iterator[OwnRollouts]:
    """Record the one `generate()` that `model` runs in this context.

    Args:
        model: the object whose `generate` TRL calls.
        routers: of the model; None: record no routes.
        temperature: of the sampler.
        supports: record the tokens that top-k, top-p and min-p left; log-probabilities are those
            over them.
    """
    found = OwnRollouts()
    original: Any = model.generate

    def generate(*args: Any, **kwargs: Any) -> Tensor:
        logprobs, recording = SampledLogprobs(temperature), nullcontext()
        if supports:
            logprobs = SampledSupports()
        if routers is not None:
            recording = routers.record()  # type: ignore[assignment]
        with recording as tape, _standing(logprobs, model) as processors:
            sequences: Tensor = original(*args, **kwargs, logits_processor=processors)
        found.logp = logprobs.of(sequences, kwargs["input_ids"].shape[1])
        if isinstance(logprobs, SampledSupports):
            found.supports = logprobs.supports(len(sequences), len(found.logp[0]))
        if tape is not None:
            # Drafted tokens were refused by `of`, so what is left over waited for other ranks.
            asked = kwargs["attention_mask"]
            traces = routes_of_generate(tape, sequences, asked, other_ranks=True)
            found.traces = [trace.to("cpu") for trace in traces]
        return sequences

    with override_attribute("generate", [(model, generate)]):
        yield found
