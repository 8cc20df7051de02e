"""The extension points of the loop: engines, scorers, learners and environments.

Every implementation of one of these protocols can be replaced. Nothing else is pluggable.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from onepolicy.types import Completion, Sample, Sampling, TokenBatch

NamedWeights = Iterable[tuple[str, Tensor]]
"""Model weights under their transformers names."""


class SampleFn(Protocol):
    """A function that samples one model turn after `tokens`.

    max_tokens: most tokens of this turn; None: the run's limit. root: tokens of its conversation's
    first prompt; 0: of the episode's.
    """

    async def __call__(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        routes_from: int = 0,
        root: int = 0,
    ) -> Completion: ...


class EpisodeError(Exception):
    """A tool or an environment failed before the episode's end. It is retried, then dropped."""


class WeightSizes(Protocol):
    """The bytes that an engine's quantised weights take (models/quant/size_report.py)."""

    def describe(self) -> str: ...
    def as_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class NumericsContract:
    """The computation of log-probabilities on one side.

    Equal bits need equal contracts (invariant/numerics_contract.py).
    """

    numerics: str  # on-policy, or fast
    dtype: str  # of the parameters; if they differ, the number of parameters of each dtype
    attention: str  # attention function, the same for decoding, prefilling and packed samples
    experts: str  # experts function, which fixes the order in which a token's experts are added
    lm_head: str  # code that computes the logits, and the tensor of its weights
    modules: tuple[tuple[str, str], ...]
    """Name of each module with parameters or buffers (such as routers and rotary frequencies), with
    its forward and their dtypes."""
    logp: str  # code from logits and temperature to the log-probability of a token


@dataclass(frozen=True, slots=True)
class EngineCaps:
    """The capabilities of an engine, from which impossible settings are refused at start-up."""

    returns_routes: bool  # returns the experts each token was routed to
    max_len: int  # prompt + completion tokens
    returns_combine_weights: bool = False  # and the combine weights of those experts
    top_logprobs: int = 0  # largest Sampling.top_logprobs it can return; 0 = none
    seeded: bool = True  # a request's random numbers depend on its seed only
    contract: NumericsContract | None = None  # of an engine that computes in this process
    sizes: WeightSizes | None = None  # of its weights under rollout.quant
    weights_dtype: str | None = None  # in which it takes weights; None: unrounded
    takes_adapter: bool = False  # is sent A and B of a LoRA adapter, not whole weights
    inexact_dtype: str | None = None  # whose last places two forwards may differ in; None: never


class WeightSource(Protocol):
    """The owner of weights that are pushed to engines."""

    @property
    def version(self) -> int:
        """RL steps taken."""
        ...

    def named_weights(self, dtype: str | None = None) -> Generator[tuple[str, Tensor]]:
        """Yield all tensors, for an engine that takes them in `dtype` (`EngineCaps`)."""
        ...


class AdapterSource(Protocol):
    """A LoRA adapter: its name, and its tensors, in memory or as files."""

    name: str  # in requests and replies

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A [r, I] and B [O, r], float32, by the name of the weight that they adapt."""
        ...

    def write(self, folder: Path) -> None:
        """Write adapter_model.safetensors and adapter_config.json, for engines that load files."""
        ...


class TrainedAdapter(AdapterSource, Protocol):
    """The adapter inside a learner's model."""

    def off(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes with its frozen weights alone."""
        ...


@runtime_checkable
class AdapterLearner(Protocol):
    """An owner of weights that may train an adapter of them (train.lora)."""

    @property
    def adapter(self) -> TrainedAdapter | None: ...


class WeightTarget(Protocol):
    """A copy of the policy whose weights follow the learner's."""

    caps: EngineCaps
    version: int

    async def load_weights(self, weights: NamedWeights, version: int) -> None: ...


class RolloutEngine(Protocol):
    """An engine that samples completions: token ids in, token ids out."""

    caps: EngineCaps
    version: int  # of the weights it holds

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion: ...

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load these tensors and drop all cached keys, values and routes.

        Running requests continue from their tokens with the new weights; the version of each token
        names the weights that sampled it. Raises RuntimeError if the engine cannot do that.
        """
        ...

    async def reset_cache(self) -> None:
        """Drop all cached keys, values and routes."""
        ...


def engine_name(engine: object) -> str:
    """Return the name of an engine for errors: a server's, with its address, or its class's."""
    return str(getattr(engine, "name", type(engine).__name__))


@runtime_checkable
class NamedEngine(Protocol):
    """An engine that names on every completion the LoRA adapter that sampled it."""

    adapter: str | None  # in its weights, or beside them


@runtime_checkable
class AdapterEngine(NamedEngine, Protocol):
    """An engine that computes with A and B of an adapter, if its `caps.takes_adapter` says so."""

    async def lacks_base(self) -> bool:
        """Return whether it needs the frozen weights before an adapter, as a new server does."""
        ...

    async def load_adapter(self, adapter: AdapterSource, version: int) -> None:
        """Load A and B as `version` in place of the last ones, and drop all caches."""
        ...


@runtime_checkable
class MetricsSource(Protocol):
    """An object that adds metrics to the run's log."""

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call (run/metrics.toml)."""
        ...


@runtime_checkable
class SleepingSampler(Protocol):
    """An engine that can free a GPU's memory between uses. It wakes by itself."""

    def sleep(self) -> None: ...


@runtime_checkable
class PressedEngine(Protocol):
    """An engine whose routers may be under artificial pressure (rollout.pressure)."""

    def without_pressure(self) -> AbstractContextManager[None]:
        """Return a context in which there is none. The caller resets the cache in it."""
        ...


@runtime_checkable
class ReadableEngine(Protocol):
    """An engine whose weights this process can read, to compare them with the learner's."""

    def held_weights(self) -> dict[str, Tensor]:
        """Return the weights it computes with, under transformers' names. Leaves out others."""
        ...

    def held_factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A and B of the adapter that it computes with, if `caps.takes_adapter` is True."""
        ...


@runtime_checkable
class RecoverableEngine(RolloutEngine, MetricsSource, Protocol):
    """An engine in other processes, which may be lost and come back with other weights."""

    async def come_back(self) -> None:
        """Connect to the lost engine, and check that it fits this run. The caller gives it weights.

        Raises UsageError if it does not answer or does not fit.
        """
        ...

    async def confirm_weights(self) -> None:
        """Raise TrainingError if the engine holds other weights than this run loaded last.

        Then it was restarted, or another run uses it.
        """
        ...


class Scorer(Protocol):
    """The policy as it scores packed batches."""

    @property
    def version(self) -> int:
        """RL steps taken by its weights."""
        ...

    fingerprint: str  # of the code that computes its log-probabilities (invariant/fingerprint.py)
    device: torch.device

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model knows."""
        ...

    def score(self, batch: TokenBatch, *, replay: bool = True) -> TokenBatch:
        """Fill `logp_old`, `entropy` and (MoE) `routing_native`, without an update.

        Scores with replay if the run replays. replay=False scores with the trainer's own routing,
        as a run without replay would. Raises RoutingError if the replayed routes are not those of
        these tokens and weights.
        """
        ...

    def micro_batches(self, batch: TokenBatch) -> list[list[int]]:
        """Return the sample indices of each forward."""
        ...

    def logits(self, micro: TokenBatch, slots: Tensor) -> Tensor:
        """Return logits over temperature, [n, vocabulary] float32, at slots [n] int64.

        micro: a micro-batch on the model's device.
        """
        ...


class Update(NamedTuple):
    """The result of `Learner.step`."""

    metrics: dict[str, float]
    scored: TokenBatch | None
    """The samples of the first minibatch, or of the whole step, as the update scored them before
    its optimiser, if `Learner.score` skipped the policy. Else None."""


class Learner(Protocol):
    """The owner of the trained weights and the optimiser."""

    @property
    def version(self) -> int:
        """RL steps taken."""
        ...

    @property
    def updates(self) -> int:
        """Optimiser steps taken by this run and the runs it was forked from."""
        ...

    @property
    def skipped(self) -> int:
        """Consecutive optimiser steps that were skipped because gradients were not finite."""
        ...

    @property
    def fingerprint(self) -> str: ...
    @property
    def scorer(self) -> Scorer: ...

    def score(self, batch: TokenBatch) -> TokenBatch:
        """Score a batch before its update.

        Fills `logp_old`, `entropy` and (MoE) `routing_native`, unless the rollout is the behaviour
        policy of the objective. Where numerics make it the old policy to the bit, `logp_old` is
        `logp_rollout`, and `step` fills the rest. Fills `logp_ref` and `value` if there is a
        reference or a critic.

        Raises TrainingError for a batch that no policy can have sampled.
        """
        ...

    def step(self, batch: TokenBatch) -> Update:
        """Update on a finished batch (advantage, weight and keep are set). version += 1."""
        ...

    def named_weights(self, dtype: str | None = None) -> Generator[tuple[str, Tensor]]:
        """Yield all tensors, for an engine that takes them in `dtype` (`EngineCaps`)."""
        ...

    def save(self, folder: Path, finish: Callable[[], None]) -> None:
        """Write everything that a resume needs into `folder`, then call `finish`.

        An implementation may write in the background and call `finish` after this has returned.
        """
        ...

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        ...

    def restore(self, folder: Path) -> None:
        """Load everything from a checkpoint except the policy's weights."""
        ...


@dataclass(frozen=True, slots=True)
class Problem:
    """One question of a task. The same `id` is the same problem in every run."""

    id: int
    prompt: str
    answer: str
    entry: dict[str, Any] | None = None  # further input of the task's own grader


class Environment(Protocol):
    """A task that turns problems into graded token paths."""

    def train_problem(self, index: int) -> Problem:
        """Return the index-th training problem.

        The index grows without bound; finite data sets are shuffled again every epoch.
        """
        ...

    def held_out(self, count: int) -> list[Problem]:
        """Return the first `count` evaluation problems, which training never uses."""
        ...

    def check(self, *, max_tokens: int, max_len: int) -> None:
        """Raise UsageError if a prompt or a correct response cannot fit. Called before a run."""
        ...

    async def episode(
        self, problem: Problem, sample: SampleFn, temperature: float
    ) -> tuple[Sample, ...]:
        """Play one episode: render the prompt, call `sample` for each model turn, grade the result.

        Returns one sample, or several with one reward if the history was rewritten during the
        episode. Raises EpisodeError if the episode cannot end.
        """
        ...


class Progress:
    """The progress of a run, shown to nobody. Subclasses show it."""

    def phase(self, name: str, total: int) -> Callable[[], None]:
        return lambda: None

    def step(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...
