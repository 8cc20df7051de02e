"""Int8 activation scales of a run's first policy, kept for every later step."""

from __future__ import annotations

import functools
import json
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

from onepolicy.config import RunConfig, TrainingError, UsageError
from onepolicy.files import write_text_atomically
from onepolicy.interfaces import Environment, EpisodeError, RolloutEngine
from onepolicy.models.quant.quantise import QuantisedModel
from onepolicy.rollout.collect import gather_or_cancel, play_episode, request_seed
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.train.reprefill import Reprefill
from onepolicy.types import Sampling

CALIBRATION_FILE = "calibration.json"
CALIBRATION_EPISODES = 32


async def calibrate(
    config: RunConfig,
    engine: RolloutEngine,
    environment: Environment,
    stop: tuple[int, ...],
    run: Path | None,
    *,
    reprefill: Reprefill | None = None,
    policy: AbstractAsyncContextManager[None] | None = None,
) -> None:
    """Set the scales of the engine's static activations, if it has any.

    The scales are those stored in the run folder. If there are none yet, they are the largest
    values while the first CALIBRATION_EPISODES training problems are sampled with a scale per
    token; the run folder keeps them. reprefill: gets the same. policy: a context in which the
    engine has the policy's weights, if it does not have them anyway.
    """
    if not isinstance(engine, HFEngine) or engine.static_scales is None:
        return
    scales = engine.static_scales
    path = run and run / CALIBRATION_FILE
    if path and path.is_file():
        _load_scales(scales, path)
    else:
        async with policy or nullcontext():
            await play_episodes(config, engine, environment, stop)
            scales.calibrate()
        await engine.reset_cache()
        if path:
            write_text_atomically(path, json.dumps(scales.scales(), indent=1))
    if reprefill is not None:
        reprefill.use_scales(scales.scales())


def scales_of(engine: RolloutEngine) -> dict[str, float]:
    """Return the calibrated scales of the engine's static activations, none if it has no such."""
    if not isinstance(engine, HFEngine) or engine.static_scales is None:
        return {}
    return engine.static_scales.scales()


def _load_scales(scales: QuantisedModel, path: Path) -> None:
    try:
        scales.use_scales(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: damaged ({error}); start the run anew") from error


async def play_episodes(
    config: RunConfig, engine: RolloutEngine, environment: Environment, stop: tuple[int, ...]
) -> None:
    """Play the first CALIBRATION_EPISODES training problems while the engine records its maxima.

    An episode that fails counts as far as it was played. Raises TrainingError if all of them fail.
    """
    sampling = Sampling(
        config.rollout.sampling.temperature, config.rollout.sampling.max_tokens, stop=stop
    )
    failures: list[EpisodeError] = []

    async def episode(index: int) -> None:
        problem = environment.train_problem(index)
        seeds = functools.partial(request_seed, config.seed, problem.id, -2, 0)
        try:
            await play_episode(engine, environment, problem, sampling, seeds)
        except EpisodeError as error:
            failures.append(error)

    await gather_or_cancel(map(episode, range(CALIBRATION_EPISODES)))
    if len(failures) == CALIBRATION_EPISODES:
        raise TrainingError(
            f"rollout.quant: all {CALIBRATION_EPISODES} episodes of the calibration failed, the "
            f"last one: {failures[-1]}"
        )
