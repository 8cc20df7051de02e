"""verifiers environments (its 0.4 interface, `verifiers.v1`): the environment drives the episode, our engine the turns.

An environment there is a program over agents: `Env.run(task, agents)` asks an agent for turns and answers as its user.
It gets ours instead of one that talks to a server (verifiers_agent.py), so what is sampled is trained on as it was
sampled. No harness, sandbox, tool server or model endpoint of verifiers is started; what needs one is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase

from onepolicy.config import RowPolicy, UsageError, VerifiersTask
from onepolicy.envs.adapters.seeded import START_UP, scaled
from onepolicy.envs.adapters.verifiers_agent import Player, opening_of
from onepolicy.envs.multiturn.chat_dialogue import build_talk
from onepolicy.envs.multiturn.chat_template import Opening
from onepolicy.envs.multiturn.episode import Episode, InTurns
from onepolicy.envs.tasks.reasoning_gym import LIBRARY_ERRORS, TRIES
from onepolicy.envs.tasks.seeding import Split, rng_of, split_of
from onepolicy.interfaces import EpisodeError, Problem


class Verifiers(InTurns):
    def __init__(
        self,
        config: VerifiersTask,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_len: int,
        rows: RowPolicy = "as-sampled",
    ) -> None:
        self.config = config
        self.env, self.seat = load(config)
        tasks = Tasks(self.env.taskset, config.seed)
        super().__init__(config, tasks, tokenizer, max_len=max_len, rows=rows)
        self.dialogue = build_talk(tokenizer, fork=config.history == "fork")

    def check(self, *, max_tokens: int, max_len: int) -> None:
        for problem in self.problems.start_up_problems():
            check_task((problem.entry or {})["task"])
        super().check(max_tokens=max_tokens, max_len=max_len)

    def opening(self, problem: Problem) -> Opening:
        assert problem.entry is not None
        return opening_of(problem.entry["task"])

    async def play(self, problem: Problem, episode: Episode) -> float:
        """What the environment's rewards add up to; 0 for an episode that one of our limits cut."""
        import verifiers.v1 as vf

        assert problem.entry is not None
        task = problem.entry["task"]
        spec = getattr(self.env.config, self.seat)
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        record: Any = vf.Episode(env=vf.EnvInfo(id=self.env.config.env_id), task=about)
        player = Player(spec, self.seat, task, episode, record.traces.append)
        agents: Any = vf.Agents(self.env.config, lambda name, config: player)
        try:
            await self.env.setup(agents)
            await self.env.run(task, agents)
            if not episode.began:
                raise EpisodeError(f"{self.env.config.env_id} asked its agent for no turn")
            if not player.cut:
                await self.env.finalize(task, record)
        except UsageError:
            raise
        except (vf.RolloutError, *LIBRARY_ERRORS, OSError) as error:
            if player.failure is not None:
                raise player.failure from None
            raise EpisodeError(f"{self.env.config.env_id} failed: {error!r}") from error
        if player.cut:
            return 0.0
        total = float(record.traces[0].reward)
        return total if self.config.returns is None else scaled(total, self.config.returns)


class Tasks:
    """The tasks of a taskset: one in four is held out, by the hash of its content, so no content is on both sides.

    Training ids count up from 0 (over reshuffled epochs where the taskset ends), held-out ids down from -1.
    """

    def __init__(self, taskset: Any, seed: int) -> None:
        self._seed, self._ends = seed, bool(taskset.bounded)
        self._sides: dict[Split, list[Any]] = {"train": [], "held_out": []}
        self._rest: Iterator[Any] = iter(taskset)
        self._order: tuple[int, list[int]] = (-1, [])  # of the last epoch asked for
        if self._ends:
            while self._draw():
                pass
        if not self._have("train", 1):
            raise UsageError("task.env: none of the taskset's tasks is for training (one in four is held out)")

    def train_problem(self, index: int) -> Problem:
        place, side = index, self._sides["train"]
        if self._ends:
            epoch, place = divmod(index, len(side))
            if self._order[0] != epoch:
                self._order = epoch, rng_of("verifiers epoch", self._seed, epoch).permutation(len(side)).tolist()
            place = self._order[1][place]
        elif not self._have("train", index + 1):
            raise UsageError(f"task.env: the taskset ended after {len(side)} tasks though it says it has no end")
        return _problem(index, side[place])

    def held_out(self, count: int) -> list[Problem]:
        if not self._have("held_out", count):
            raise UsageError(
                f"eval.problems: {count} are asked for, but {len(self._sides['held_out'])} of the taskset's tasks are "
                "held out; lower eval.problems"
            )
        return [_problem(-1 - i, task) for i, task in enumerate(self._sides["held_out"][:count])]

    def start_up_problems(self) -> Iterable[Problem]:
        """All of those to train on where the taskset ends."""
        return map(self.train_problem, range(len(self._sides["train"]) if self._ends else START_UP))

    def _have(self, side: Split, count: int) -> bool:
        """Draw until that many are on the side."""
        for _ in range(TRIES + 20 * count):
            if len(self._sides[side]) >= count or not self._draw():
                break
        return len(self._sides[side]) >= count

    def _draw(self) -> bool:
        task = next(self._rest, None)
        if task is not None:
            content = task.data.model_dump(mode="json", exclude={"idx", "name", "id"})
            self._sides[split_of(repr(sorted(content.items())))].append(task)
        return task is not None


def _problem(problem_id: int, task: Any) -> Problem:
    return Problem(problem_id, task.data.prompt_text, "", {"task": task})


def load(config: VerifiersTask) -> tuple[Any, str]:
    """The environment and the name of its one agent. UsageError if it cannot be played here."""
    if find_spec("verifiers") is None:
        raise UsageError("task.kind: verifiers is not installed; pip install 'verifiers>=0.4,<0.5'")
    if find_spec("verifiers.v1") is None:
        raise UsageError("task.kind: this release of verifiers has no verifiers.v1; pip install 'verifiers>=0.4,<0.5'")
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    try:
        env = load_environment(resolve_env_config(dict(config.env)))
    except (ImportError, *LIBRARY_ERRORS) as error:
        raise UsageError(f"task.env: verifiers cannot load {config.env!r}: {error}") from error
    _check_environment(env)
    return env, _one_seat(env)


def _one_seat(env: Any) -> str:
    from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id

    seats = agent_config_fields(env.config)
    if len(seats) != 1:
        raise UsageError(
            f"task.env: {env.config.env_id} has {len(seats)} agents, {', '.join(seats)}; one can be trained"
        )
    ((seat, spec),) = seats.items()
    if default_harness_id(env.config.taskset.id) != "bash":  # what verifiers takes for a taskset that brings none
        raise UsageError(f"task.env: {env.config.taskset.id} brings a harness of its own; only plain chat is played")
    for name in ("harness", "runtime", "model", "client", "sampling", "timeout", "retries"):
        if getattr(spec, name) != AgentConfig.model_fields[name].default:
            raise UsageError(f"task.env.{seat}.{name}: has no effect, our engine plays the turns; leave it out")
    return seat


def _check_environment(env: Any) -> None:
    import verifiers.v1 as vf

    for name in ("timeout", "retries", "max_concurrent_agents", "interception"):
        if getattr(env.config, name) != vf.EnvConfig.model_fields[name].default:
            raise UsageError(f"task.env.{name}: has no effect here; leave it out (task.seconds limits an episode)")
    if type(env).start is not vf.Env.start or env.taskset.toolsets(env.taskset.config):
        raise UsageError(f"task.env: {env.config.env_id} starts servers of its own, which are not run here")


def check_task(task: Any) -> None:
    """UsageError if a task needs more than text and its trace."""
    import verifiers.v1 as vf
    from verifiers.v1.session import hook_boundary
    from verifiers.v1.utils.decorators import discover_decorated

    name = type(task).__name__
    needs = [
        (task.NEEDS_CONTAINER or task.data.image is not None, "a container"),
        (bool(task.toolsets(task.config)), "tool servers"),
        (bool(task.data.skills or task.data.artifacts), "skills or artifacts in a runtime"),
        (bool(task.plugged_judges()), "judge models"),
        (bool(discover_decorated(task, "intercept")), "to intercept requests"),
        (any(hook_boundary(stop, allow_trace=True) is not vf.Trace for stop in task.hooks("stop")), "to see requests"),
    ]
    hooks = [*task.hooks("reward"), *task.hooks("metric")]
    hooks += [
        getattr(task, hook) for hook in ("setup", "finalize") if getattr(type(task), hook) is not getattr(vf.Task, hook)
    ]
    needs += [(_needs_runtime(hook), f"a runtime (in {hook.__name__})") for hook in hooks]
    if found := [what for needed, what in needs if needed]:
        raise UsageError(f"task.env: {name} needs {' and '.join(found)}, which is not run here; take a taskset of text")


def _needs_runtime(hook: Any) -> bool:
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty
