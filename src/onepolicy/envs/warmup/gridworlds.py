"""Worked episodes of gymnasium environments with a table of transitions, for warm-up.

The grid environments of toy_text have the table in `P`: state -> action -> [(probability, next
state, reward, over)]. A mistake is a turn with a random action.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from onepolicy.config import GymnasiumTask, UsageError
from onepolicy.envs.adapters.gymnasium import TextEnvironment, build_checked_environment
from onepolicy.envs.adapters.seeded import SeededProblems
from onepolicy.envs.multiturn.tool_formats import format_observations
from onepolicy.envs.tasks.seeding import hash_key, seeded_rng

DISCOUNT = 0.99
SWEEPS = 1000


def warmup_examples(
    task: GymnasiumTask, *, mistakes: float, seed: int
) -> Iterator[tuple[str, ...]]:
    """Yield episodes without end, as texts: prompt, turn, observation, turn, ...

    Turns have no end token. mistakes: probability of a random action.
    """
    env = build_checked_environment(task)
    optimal = optimal_actions(env)
    instructions = env.instructions(plain=True)
    problems = SeededProblems(("gymnasium warm-up", task.id, task.seed), env.reset)
    start = hash_key("warm-up", seed) % 2**31
    index = 0
    while True:
        rng = seeded_rng("gymnasium warm-up", task.seed, seed, index)
        prompt = problems.train_problem(start + index).prompt  # resets env
        yield (f"{instructions}{prompt}\n", *_play(env, optimal, rng, mistakes, task.max_turns))
        index += 1


def _play(
    env: TextEnvironment,
    optimal: np.ndarray,
    rng: np.random.Generator,
    mistakes: float,
    max_turns: int,
) -> list[str]:
    """Play the episode and return turn, observation, turn, ... up to the last turn."""
    names = env.names or tuple(map(str, range(optimal.shape[1])))
    texts: list[str] = []
    for _ in range(max_turns):
        choices = np.flatnonzero(optimal[int(env.env.unwrapped.s)])
        if rng.random() < mistakes:
            action = int(rng.integers(len(names)))
        else:
            action = int(rng.choice(choices))
        observation, _, over = env.step(env.space.start + action)
        texts += [f"Action: act[{names[action]}]", format_observations([observation])]
        if over:
            break
    return texts[:-1]


def optimal_actions(env: TextEnvironment) -> np.ndarray:
    """Return the actions of highest value: [states, actions] bool, by value iteration.

    Raises UsageError if the environment has no table of transitions.
    """
    table: Any = getattr(env.env.unwrapped, "P", None)
    if table is None:
        raise UsageError(
            f"task.id: {env.config.id} has no table of its transitions to plan in, so there are "
            "no worked episodes to warm up on; take FrozenLake, CliffWalking or Taxi, or a model "
            "that knows how to act"
        )
    shape = len(table), len(table[0])
    state_values, action_values = np.zeros(shape[0]), np.zeros(shape)
    for _ in range(SWEEPS):
        for state, actions in table.items():
            for action, outcomes in actions.items():
                action_values[state, action] = sum(
                    p * (r + DISCOUNT * state_values[to] * (not over))
                    for p, to, r, over in outcomes
                )
        change = float(np.abs(action_values.max(axis=1) - state_values).max())
        state_values = action_values.max(axis=1)
        if change < 1e-9:
            break
    optimal: np.ndarray = action_values >= state_values[:, None] - 1e-6
    return optimal
