"""ONE RL STEP. Read this first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from onepolicy.build.components import Components
from onepolicy.config.numerics import ON_POLICY
from onepolicy.correct.weights import reweight
from onepolicy.interfaces import Metered
from onepolicy.invariant.require_equal import require_equal
from onepolicy.objective.advantages import credit, has_signal, outcomes
from onepolicy.rollout.collect import collect
from onepolicy.run.recovery import outlive
from onepolicy.run.step_metrics import counterfactual, measure, per_layer, repeat
from onepolicy.sync.check import push_weights
from onepolicy.train.pack import pack
from onepolicy.types import Group, TokenBatch


@dataclass(slots=True, repr=False)  # asyncio prints results into errors it throws away, and these are large
class Rollouts:
    groups: list[Group]
    metrics: dict[str, float]  # what became of the episodes


@dataclass(slots=True, repr=False)
class StepResult:
    groups: list[Group]
    batch: TokenBatch
    without_replay: TokenBatch | None  # the same batch scored without replay, on probe steps
    metrics: dict[str, float] = field(default_factory=dict)


async def rl_step(
    parts: Components, step: int, *, probe: bool, advance: Callable[[], None] = lambda: None
) -> StepResult:
    """Step `step` (from 0): rollouts, one batch, one update, new weights in the engine. One after the other; what lets
    them overlap is in asynchronous.py."""
    clock = Clock()
    with clock("rollout"):
        rollouts = await outlive(parts, lambda: sample(parts, step, advance))  # again, if a server is lost meanwhile
    result = learn(parts, step, rollouts, clock, probe=probe)
    with clock("sync"):
        await outlive(parts, lambda: push_weights(parts.learner, *parts.samplers))
    return timed(parts, result, clock)


async def sample(parts: Components, step: int, advance: Callable[[], None] = lambda: None) -> Rollouts:
    """The episodes of step `step`, played by whatever weights the engine has meanwhile."""
    cfg = parts.config
    return Rollouts(
        *await collect(
            parts.engine,
            parts.environment,
            cfg.rollout,
            stop=parts.stop,
            step=step,
            seed=cfg.seed,
            routes=parts.routes,
            advance=advance,
            accept=has_signal if cfg.objective.dynamic_sampling else None,
            rounds=cfg.objective.dynamic_sampling,
            top_logprobs=parts.top_logprobs,
        )
    )


def learn(parts: Components, step: int, rollouts: Rollouts, clock: Clock, *, probe: bool) -> StepResult:
    """One update of the learner's weights by the rollouts of a step."""
    cfg, learner, groups = parts.config, parts.learner, rollouts.groups
    if parts.reprefill is not None:
        with clock("reprefill"):
            groups = parts.reprefill.fill(groups)
    groups = outcomes(groups, cfg.objective, max_tokens=cfg.rollout.sampling.max_tokens)  # reward against siblings
    batch = pack(groups)  # Sample[N] -> TokenBatch[T]
    with clock("score"):
        batch = learner.score(batch)  # logp_old, the rollout's experts replayed; reference and critic
    if cfg.numerics == ON_POLICY:
        require_equal(batch, groups, learner.fingerprint, when=f"step {step + 1}")  # or the run stops
    batch = credit(batch, cfg.objective)  # outcome -> slots
    applied = reweight(
        batch.logp_rollout if batch.logp_old is None else batch.logp_old,
        batch.logp_rollout,
        batch.trainable,
        cfg.correction.fixed_part,  # what needs the new policy is evaluated in the loss
        segment=batch.segment,
        turn=batch.turn,
        advantage=batch.advantage,
        average="sequences" if cfg.objective.reduction == "sequence-mean-token-mean" else "slots",
    )
    batch = batch.replace(weight=applied.weight, keep=applied.keep)
    result = StepResult(groups, batch, None, rollouts.metrics | applied.report)
    if probe:
        with clock("probe"):
            scored = batch if cfg.scores_old else learner.score_again(batch)
            result.without_replay = learner.score_without_replay(batch)
            result.metrics |= counterfactual(result.without_replay) | per_layer(scored)
            result.metrics |= repeat(learner, scored, result.without_replay)
    with clock("update"):
        result.metrics |= learner.step(batch)  # forward with replay, loss, backward, optimiser
    # read-only, every step; what nobody scored, the first mini-step of the update saw with the weights of before
    measured = batch if learner.seen is None else learner.seen
    if cfg.numerics == ON_POLICY:
        require_equal(measured, groups, learner.fingerprint, when=f"step {step + 1}")
    result.metrics |= measure(measured)
    result.batch = scored if probe else measured
    result.metrics |= rollout_metrics(groups)
    return result


def timed(parts: Components, result: StepResult, clock: Clock) -> StepResult:
    """With what is known at the end of the step."""
    times = clock.metrics()
    slots = sum(len(sample.tokens) - 1 for group in result.groups for sample in group.samples)
    result.metrics |= times | {"train/tokens_per_second": slots / times["time/step"]}
    if isinstance(parts.engine, Metered):
        result.metrics |= parts.engine.take_metrics()
    return result


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Means over episodes; an episode's last sample has its reward, its end and what happened in it."""
    samples = [sample for group in groups for sample in group.samples]
    ends = [s for group in groups for s in dict(zip(group.episodes, group.samples, strict=True)).values()]
    count, events = len(ends), Counter(event for sample in ends for event in sample.events)
    turns = sum(len(s.turn.unique()) - bool((s.turn < 0).any()) for s in samples) / count
    several = {"train/turns": turns} if turns > 1 or events else {}
    return {
        "train/reward": sum(s.reward for s in ends) / count,
        "train/response_length": sum(s.response_length for s in samples) / count,
        "train/cut_by_length": sum(s.finish == "length" for s in ends) / count,
        "train/reward_min": min(s.reward for s in ends),
        "train/reward_max": max(s.reward for s in ends),
        "train/groups_without_signal": sum(not has_signal(group) for group in groups) / len(groups),
        **several,
        **{f"tools/{event}": number / count for event, number in events.items()},
    }


class Clock:
    """Seconds per named part of a step."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"time/{part}": s for part, s in self.seconds.items()} | {"time/step": time.perf_counter() - self.start}
