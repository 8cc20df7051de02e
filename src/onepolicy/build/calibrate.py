"""Calibration transfer: int8 activation scales of the policy that a run starts from, kept for every later step."""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path

from onepolicy.config import RunConfig, UsageError
from onepolicy.files import write_text_atomically
from onepolicy.interfaces import CalibratedEngine, Environment, RolloutEngine
from onepolicy.rollout.collect import play_episode, request_seed
from onepolicy.types import Sampling

CALIBRATION_FILE = "calibration.json"
CALIBRATION_EPISODES = 32


async def calibrate(
    config: RunConfig,
    engine: RolloutEngine,
    environment: Environment,
    stop: tuple[int, ...],
    run: Path | None,
) -> None:
    """Give the engine's static activations their scales, if it has any: those of the run folder, or new ones.

    New ones are the largest values while the first CALIBRATION_EPISODES training problems are sampled with a scale per token.
    """
    scales = engine.static_scales if isinstance(engine, CalibratedEngine) else None
    if scales is None:
        return
    path = None if run is None else run / CALIBRATION_FILE
    if path is not None and path.exists():
        try:
            scales.use_scales(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path}: damaged ({error}); start the run anew") from error
        return
    await play_episodes(config, engine, environment, stop)
    scales.calibrate()
    await engine.reset_cache()
    if path is not None:
        write_text_atomically(path, json.dumps(scales.scales(), indent=1))


async def play_episodes(
    config: RunConfig, engine: RolloutEngine, environment: Environment, stop: tuple[int, ...]
) -> None:
    """The first CALIBRATION_EPISODES training problems, for what the engine notes meanwhile."""
    sampling = Sampling(
        config.rollout.sampling.temperature, config.rollout.sampling.max_tokens, stop=stop
    )

    async def episode(index: int) -> None:
        problem = environment.train_problem(index)
        await play_episode(
            engine,
            environment,
            problem,
            sampling,
            functools.partial(request_seed, config.seed, problem.id, -2, 0),
        )

    await asyncio.gather(*map(episode, range(CALIBRATION_EPISODES)))
