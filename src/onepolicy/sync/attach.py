"""The check of an engine that outlasts a run: a reload leaves it with the weights it started with.

A run that finds other weights in the engine cannot tell a reload that is always wrong from a
correct one. So the first run stores a canary of the start-up weights in the engine.
"""

from __future__ import annotations

from pathlib import Path

import torch

from onepolicy.config import UsageError
from onepolicy.interfaces import PersistentEngine
from onepolicy.sync.canary import Canary, canary_logp


async def attach_engine(engine: PersistentEngine, path: str, *, vocab: int) -> None:
    """Load the checkpoint at `path` (folder or hub id) into an engine that outlasts a run.

    First the engine reloads the weights it was started with. Its log-probabilities are compared
    with a canary from before any reload. Raises UsageError if the reload is wrong.
    """
    initial = await _initial_canary(engine, vocab)
    if engine.has_initial_checkpoint(path):
        return
    await _check_reload(engine, initial, vocab)
    if Path(path).exists():
        path = str(Path(path).resolve())
    await engine.load_checkpoint(path, 0)


async def reattach_engine(engine: PersistentEngine, *, vocab: int) -> None:
    """Check the reload of an engine that was restarted during a run. Raises UsageError.

    The caller pushes the learner's weights to it afterwards.
    """
    await _check_reload(engine, await _initial_canary(engine, vocab), vocab)


async def _initial_canary(engine: PersistentEngine, vocab: int) -> list[float]:
    initial = engine.initial_canary()
    if initial is None:
        initial = (await canary_logp(engine, vocab)).tolist()
        await engine.store_initial_canary(initial)
    return initial


async def _check_reload(engine: PersistentEngine, initial: list[float], vocab: int) -> None:
    await engine.load_checkpoint(None, 0)
    now = await Canary.ask(engine, vocab)
    if len(initial) != len(now.logp):
        raise UsageError(
            f"rollout.engine: the server has a canary of {len(initial)} numbers of its start-up "
            f"weights, expected {len(now.logp)}; another version of onepolicy stored it: restart "
            "the server"
        )
    at_start = Canary(engine, vocab, torch.tensor(initial), now.noise)
    name = type(engine).__name__
    done = f"rollout.engine: reloading {name} with the weights it was started with"
    await at_start.require_same(done, "reload", UsageError, now.logp)
