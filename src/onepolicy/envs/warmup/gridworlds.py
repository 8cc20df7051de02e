"""Worked episodes of gymnasium environments for the warm-up of a small policy, where the transitions are a table.

toy_text's grid environments keep theirs in `P`: state -> action -> [(probability, next state, reward, over)]. A planted
mistake is a turn with a random action.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from onepolicy.config import GymnasiumTask, UsageError
from onepolicy.envs.adapters.gymnasium import World, act_tool, checked_world, instructions
from onepolicy.envs.adapters.seeded import Seeded
from onepolicy.envs.multiturn.tool_dialogue import observation
from onepolicy.envs.tasks.seeding import digest, rng_of

DISCOUNT = 0.99
SWEEPS = 1000


def warmup_examples(
    task: GymnasiumTask, *, mistakes: float, seed: int
) -> Iterator[tuple[str, ...]]:
    """Endless episodes as texts: prompt, turn, observation, turn, ... A turn's end token is left out."""
    world = checked_world(task)
    best = plan(world)
    before = instructions(world, act_tool(world), plain=True)
    problems, start = (
        Seeded(("gymnasium warm-up", task.id, task.seed), world.reset),
        digest("warm-up", seed) % 2**31,
    )
    names = world.names or tuple(map(str, range(best.shape[1])))
    index = 0
    while True:
        rng = rng_of("gymnasium warm-up", task.seed, seed, index)
        texts, over = [f"{before}{problems.train_problem(start + index).prompt}\n"], False
        for _ in range(task.max_turns):
            good = np.flatnonzero(best[int(world.env.unwrapped.s)])
            action = int(rng.integers(len(names)) if rng.random() < mistakes else rng.choice(good))
            seen, _, over = world.step(world.space.start + action)
            texts += [f"Action: act[{names[action]}]", observation([seen])]
            if over:
                break
        yield tuple(texts[:-1])  # nobody reads what follows the last turn
        index += 1


def plan(world: World) -> np.ndarray:
    """[states, actions] bool: the actions of highest value, by value iteration with DISCOUNT."""
    table: Any = getattr(world.env.unwrapped, "P", None)
    if table is None:
        raise UsageError(
            f"task.id: {world.config.id} has no table of its transitions to plan in, so there are no worked "
            "episodes to warm up on; take FrozenLake, CliffWalking or Taxi, or a model that knows how to act"
        )
    shape = len(table), len(table[0])
    value, worth = np.zeros(shape[0]), np.zeros(shape)
    for _ in range(SWEEPS):
        for state, actions in table.items():
            for action, ends in actions.items():
                worth[state, action] = sum(
                    p * (r + DISCOUNT * value[to] * (not over)) for p, to, r, over in ends
                )
        moved = float(np.abs(worth.max(axis=1) - value).max())
        value = worth.max(axis=1)
        if moved < 1e-9:
            break
    best: np.ndarray = worth >= value[:, None] - 1e-6
    return best
