"""ONE RL STEP. Read this first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from onepolicy.build.components import Components
from onepolicy.config import RunConfig
from onepolicy.correct.weights import reweight
from onepolicy.interfaces import MetricsSource
from onepolicy.objective.advantages import compute_advantages, compute_outcomes, has_signal
from onepolicy.rollout.collect import collect_rollouts
from onepolicy.run.hooks import build_hooks
from onepolicy.run.recovery import retry_on_engine_loss
from onepolicy.run.result import Rollouts, StepResult, StepTimer
from onepolicy.run.step_metrics import mismatch_metrics
from onepolicy.sync.push import push_weights
from onepolicy.train.pack import pack
from onepolicy.types import Group, TokenBatch


async def rl_step(
    parts: Components, step: int, *, advance: Callable[[], None] = lambda: None
) -> StepResult:
    """Step `step` (from 0): rollouts, one batch, one update, new weights in the engine. One after the other; what lets
    them overlap is in async_rollouts.py."""
    timer = StepTimer()
    with timer("rollout"):
        rollouts = await retry_on_engine_loss(
            parts, lambda: sample_rollouts(parts, step, advance)
        )  # again, if a server is lost meanwhile
    result = train_on_rollouts(parts, step, rollouts, timer)
    with timer("sync"):
        await retry_on_engine_loss(parts, lambda: push_weights(parts.learner, *parts.samplers))
    return add_timings(parts, result, timer)


async def sample_rollouts(
    parts: Components, step: int, advance: Callable[[], None] = lambda: None
) -> Rollouts:
    """The episodes of step `step`, played by whatever weights the engine has meanwhile."""
    cfg = parts.config
    return Rollouts(
        *await collect_rollouts(
            parts.engine,
            parts.environment,
            cfg.rollout,
            stop=parts.stop,
            step=step,
            seed=cfg.seed,
            route_spec=parts.route_spec,
            advance=advance,
            accept=has_signal if cfg.objective.dynamic_sampling else None,
            rounds=cfg.objective.dynamic_sampling,
            top_logprobs=parts.top_logprobs,
        )
    )


def train_on_rollouts(
    parts: Components, step: int, rollouts: Rollouts, timer: StepTimer
) -> StepResult:
    """One update of the learner's weights by the rollouts of a step. What a run may have besides are its hooks."""
    cfg, learner, hooks = parts.config, parts.learner, build_hooks(parts, timer)
    groups = rollouts.groups
    for hook in hooks:
        groups = hook.after_rollout(groups)
    groups = compute_outcomes(
        groups, cfg.objective, max_tokens=cfg.rollout.sampling.max_tokens
    )  # reward against siblings
    batch = pack(groups)  # Sample[N] -> TokenBatch[T]
    with timer("score"):
        batch = learner.score(
            batch
        )  # logp_old, the rollout's experts replayed; reference and critic
    for hook in hooks:
        hook.after_score(batch, groups, step)
    batch = compute_advantages(batch, cfg.objective)  # outcome -> slots
    batch, report = apply_correction(batch, cfg)
    result = StepResult(groups, batch, metrics=rollouts.metrics | report)
    for hook in hooks:
        hook.before_update(result, step)
    with timer("update"):
        metrics, scored = learner.step(batch)  # forward with replay, loss, backward, optimiser
    if (
        scored is not None
    ):  # nobody scored it before: the first mini-step saw it with the weights of before
        result.batch = scored
    result.metrics |= (
        metrics | mismatch_metrics(result.batch) | rollout_metrics(groups)
    )  # read-only, every step
    for hook in hooks:
        hook.after_update(result, step)
    return result


def apply_correction(batch: TokenBatch, config: RunConfig) -> tuple[TokenBatch, dict[str, float]]:
    """The batch with the weights and rejections of the correction, and its report. What needs the new policy is
    evaluated in the loss."""
    applied = reweight(
        batch.logp_rollout if batch.logp_old is None else batch.logp_old,
        batch.logp_rollout,
        batch.trainable,
        config.correction.fixed_part,
        segment=batch.segment,
        turn=batch.turn,
        advantage=batch.advantage,
        average="sequences"
        if config.objective.reduction == "sequence-mean-token-mean"
        else "slots",
    )
    return batch.replace(weight=applied.weight, keep=applied.keep), applied.report


def add_timings(parts: Components, result: StepResult, timer: StepTimer) -> StepResult:
    """With what is known at the end of the step."""
    times = timer.metrics()
    slots = sum(len(sample.tokens) - 1 for group in result.groups for sample in group.samples)
    result.metrics |= times | {"train/tokens_per_second": slots / times["time/step"]}
    if isinstance(parts.engine, MetricsSource):
        result.metrics |= parts.engine.take_metrics()
    return result


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Means over episodes; an episode's last sample has its reward, its end and what happened in it."""
    samples = [sample for group in groups for sample in group.samples]
    ends = [
        s
        for group in groups
        for s in dict(zip(group.episodes, group.samples, strict=True)).values()
    ]
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
