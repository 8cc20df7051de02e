"""Routes and log-probabilities of rollouts that the trainer's own model samples.

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
from onepolicy.types import RoutingTrace


@dataclass(slots=True)
class OwnRollouts:
    """The samples of one `generate()`, in its order."""

    traces: list[RoutingTrace] | None = None  # of prompt and completion; None: not recorded
    logp: list[list[float]] | None = None  # of the completion, with the fill after its end


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
        self._last = (scores.float() / self._temperature).log_softmax(-1)
        return scores

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


@contextmanager
def own_rollouts(
    model: nn.Module, routers: Routers | None, temperature: float
) -> Iterator[OwnRollouts]:
    """Record the one `generate()` that `model` runs in this context.

    Args:
        model: the object whose `generate` TRL calls.
        routers: of the model; None: record no routes.
        temperature: of the sampler.
    """
    found = OwnRollouts()
    original: Any = model.generate

    def generate(*args: Any, **kwargs: Any) -> Tensor:
        logprobs, recording = SampledLogprobs(temperature), nullcontext()
        if routers is not None:
            recording = routers.record()  # type: ignore[assignment]
        with recording as tape:
            sequences: Tensor = original(
                *args, **kwargs, logits_processor=LogitsProcessorList([logprobs])
            )
        found.logp = logprobs.of(sequences, kwargs["input_ids"].shape[1])
        if tape is not None:
            traces = routes_of_generate(tape, sequences, kwargs["attention_mask"])
            found.traces = [trace.to("cpu") for trace in traces]
        return sequences

    with override_attribute("generate", [(model, generate)]):
        yield found
