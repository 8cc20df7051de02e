"""The three seams of the loop. Everything behind them can be replaced; nothing else is pluggable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from onepolicy.types import Completion, NumericsContract, Sample, Sampling, TokenBatch

NamedWeights = Iterable[tuple[str, Tensor]]


class SampleFn(Protocol):
    """One model turn: samples after `tokens`, at most max_tokens (None: what the run allows a turn)."""

    async def __call__(
        self, tokens: Sequence[int], *, max_tokens: int | None = None, routes_from: int = 0
    ) -> Completion: ...


class EpisodeError(Exception):
    """An episode could not be played to its end (a tool or an environment failed). It is retried, then dropped."""


class WeightSizes(Protocol):
    """How many bytes an engine's quantised weights take (models/quant/size_report.py)."""

    def describe(self) -> str: ...
    def as_json(self) -> dict[str, Any]: ...


class StaticScales(Protocol):
    """Activation scales that are measured once and kept (rollout.quant.activations = static)."""

    def calibrate(self) -> None:
        """Fix the scales at the largest values seen so far."""
        ...

    def scales(self) -> dict[str, Any]: ...
    def use_scales(self, scales: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineCaps:
    """What an engine can do, so that a setting it cannot honour is refused before work starts."""

    returns_routes: bool  # returns the experts each token was routed to
    max_len: int  # prompt + completion tokens
    returns_combine_weights: bool = False  # and the combine weights of those experts
    top_logprobs: int = 0  # largest Sampling.top_logprobs it can return; 0 = none
    seeded: bool = True  # a request's random numbers depend on its seed; False: the engine draws them as it likes
    contract: NumericsContract | None = (
        None  # how it computes log-probabilities, if it computes in this process
    )
    sizes: WeightSizes | None = None  # of its weights under rollout.quant


class WeightSource(Protocol):
    """Whose weights are given to engines."""

    @property
    def version(self) -> int:
        """RL steps taken."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]: ...


class WeightTarget(Protocol):
    """Has a copy of the policy's weights that follows the learner's."""

    version: int

    async def load_weights(self, weights: NamedWeights, version: int) -> None: ...


class RolloutEngine(Protocol):
    """Samples completions. Token ids in, token ids out."""

    caps: EngineCaps
    version: int  # of the weights it holds

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion: ...

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Take over these tensors (transformers names) and forget all cached keys, values and routes.

        Requests that are running go on from their tokens, with the new weights; each token's version says which sampled
        it. RuntimeError from an engine that cannot do that.
        """
        ...

    async def reset_cache(self) -> None:
        """Forget all cached keys, values and routes."""
        ...


@runtime_checkable
class MetricsSource(Protocol):
    """An engine with numbers of its own for the run's log."""

    def take_metrics(self) -> dict[str, float]:
        """Of what it did since the last call (run/log.py)."""
        ...


@runtime_checkable
class CalibratedEngine(Protocol):
    """An engine whose activations may have static scales."""

    @property
    def static_scales(self) -> StaticScales | None: ...


@runtime_checkable
class PersistentEngine(RolloutEngine, MetricsSource, Protocol):
    """An engine in a process of its own, which serves one run after another and keeps the weights of the last."""

    async def connect(self) -> None:
        """Is it there, and fit for this run? UsageError if not. Its weights are its own until it is given others."""
        ...

    async def confirm_weights(self) -> None:
        """TrainingError if it holds other weights than it was given last: it was restarted, or another run uses it."""
        ...

    def has_initial_checkpoint(self, path: str) -> bool:
        """Whether it still has the weights it was started with, and they are those of `path` (folder or hub id)."""
        ...

    def initial_canary(self) -> list[float] | None:
        """What `remember` was given since it started. UsageError if it is too late to make one."""
        ...

    async def store_initial_canary(self, canary: list[float]) -> None: ...

    async def load_checkpoint(self, path: str | None, version: int) -> None:
        """Take over a checkpoint, None: the one it was started with, and forget what is cached."""
        ...


class Scorer(Protocol):
    """Scores packed batches with the policy."""

    @property
    def version(self) -> int:
        """RL steps taken by its weights."""
        ...

    fingerprint: str  # of what computes its log-probabilities (invariant.fingerprint)
    device: torch.device

    @property
    def vocabulary(self) -> int:
        """Token ids that the model knows."""
        ...

    def score(self, batch: TokenBatch, *, replay: bool = True) -> TokenBatch:
        """Fill `logp_old`, `entropy` and (MoE) `routing_native`, with replay if the run replays; no update.

        replay=False: with the trainer's own routing, what the step would have looked like without replay. RoutingError
        if the replayed routes are not those of these tokens and weights.
        """
        ...

    def micro_batches(self, batch: TokenBatch) -> list[list[int]]:
        """The samples of each forward."""
        ...

    def logits(self, micro: TokenBatch, slots: Tensor) -> Tensor:
        """[n, vocabulary] float32, tempered; micro is on the model's device, slots [n] int64."""
        ...


class Update(NamedTuple):
    """What `Learner.step` returns."""

    metrics: dict[str, float]
    scored: TokenBatch | None
    """If `Learner.score` left the policy out: the samples of the first mini-step, scored in its forward."""


class Learner(Protocol):
    """Owns the trained weights and the optimiser."""

    @property
    def version(self) -> int:
        """RL steps taken."""
        ...

    @property
    def updates(self) -> int:
        """Optimiser steps taken, by this run and those it was forked from."""
        ...

    @property
    def skipped(self) -> int:
        """Optimiser steps in a row that were not taken, because their gradients were not finite."""
        ...

    @property
    def fingerprint(self) -> str: ...
    @property
    def scorer(self) -> Scorer: ...

    def score(self, batch: TokenBatch) -> TokenBatch:
        """Before an update: fill `logp_old`, `entropy` and (MoE) `routing_native`, but not if the rollout is the anchor
        of the objective; `logp_ref` and `value` if there is a reference or a critic.

        TrainingError for a batch that no policy can have sampled.
        """
        ...

    def step(self, batch: TokenBatch) -> Update:
        """Forward, loss, backward, optimiser on a finished batch (advantage, weight, keep set). version += 1."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def save(self, folder: Path, finish: Callable[[], None]) -> None:
        """Everything that training goes on from into `folder`; then `finish`, which may be after this has returned."""
        ...

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is still being written, if there is one."""
        ...

    def restore(self, folder: Path) -> None:
        """All of a checkpoint but the policy's weights."""
        ...


@dataclass(frozen=True, slots=True)
class Problem:
    """One question of a task. `id` is stable: the same id is the same problem in every run."""

    id: int
    prompt: str
    answer: str
    entry: dict[str, Any] | None = None  # what the task's own grader needs besides the answer


class Environment(Protocol):
    """Turns problems into graded token paths."""

    def train_problem(self, index: int) -> Problem:
        """The index-th training problem (index grows without bound; finite data sets reshuffle every epoch)."""
        ...

    def held_out(self, count: int) -> list[Problem]:
        """The first `count` evaluation problems, never seen in training."""
        ...

    def check(self, *, max_tokens: int, max_len: int) -> None:
        """Before a run: raise UsageError if a prompt cannot be fed or a right response could not fit."""
        ...

    async def episode(
        self, problem: Problem, sample: SampleFn, temperature: float
    ) -> tuple[Sample, ...]:
        """Play one episode: render the prompt, call `sample` for every model turn, grade the result.

        One sample, or several of one reward if the history was rewritten on the way. EpisodeError if it cannot end.
        """
        ...


class Progress:
    """What a caller may show; every method does nothing here."""

    def phase(self, name: str, total: int) -> Callable[[], None]:
        return lambda: None

    def step(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...
