"""The classes of verifiers 0.4 that our environment touches, without verifiers.

The real ones run in tests/e2e/envs/adapters/test_verifiers.py.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

from onepolicy.envs.adapters import verifiers as adapter

LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens")


class Record(SimpleNamespace):
    """A class whose instances keep what they are given."""


class Segment(SimpleNamespace):
    def __init__(self, messages, terminated=False):
        super().__init__(messages=messages, terminated=terminated)


class Episode(SimpleNamespace):
    def __init__(self, **given):
        super().__init__(traces=[], **given)


class Trace(SimpleNamespace):
    def __init__(self, **given):
        super().__init__(nodes=[], calls=[], ok=False, ended=None, reward=0.0, **given)

    @property
    def is_completed(self):
        return self.ended is not None

    @property
    def num_turns(self):
        return sum(node.sampled for node in self.nodes)

    def stop(self, condition):
        self.ended = self.ended or condition


class RolloutLimits(SimpleNamespace):
    def reached(self, trace):
        if self.max_turns is not None and trace.num_turns >= self.max_turns:
            return "max_turns"
        return None


class Agents:
    def __init__(self, config, make):
        self.player = make("player", config.player)


class Task:
    """Say each next number; the reward is the turns that did."""

    key = hash = "0"
    data = SimpleNamespace(
        idx=0, prompt="1", prompt_text="1", system_prompt=None, model_dump=lambda **_: {"number": 1}
    )

    def hooks(self, kind):
        return []

    async def setup(self):
        pass

    async def finalize(self):
        pass

    async def score(self, trace):
        said = [node.message.content for node in trace.nodes if node.sampled]
        trace.reward = float(sum(int(text) % 2 == 0 for text in said))


class Env:
    """Asks its player until it has no turn left, and answers as the user with `reply`."""

    def __init__(self, reply=lambda text: text, **limits):
        player = SimpleNamespace(**dict.fromkeys(LIMITS) | limits)
        self.config = SimpleNamespace(env_id="count", player=player)
        self.taskset = type("Taskset", (list,), {"bounded": True})([Task()])
        self.reply, self.record = reply, None

    async def setup(self, agents):
        pass

    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while segment.messages:
                next_number = str(int(segment.messages[0].content) + 1)
                segment = await interaction.turn(self.reply(next_number))

    async def finalize(self, task, record):
        self.record = record


def install(monkeypatch, env):
    """Make the adapter play this environment."""
    names = ("AgentInfo", "TraceTask", "EnvInfo", "MessageNode", "ModelCall", "Usage")
    names += ("SystemMessage", "UserMessage", "AssistantMessage")
    own = dict.fromkeys(names, Record) | {"RolloutError": type("RolloutError", (Exception,), {})}
    own |= {each.__name__: each for each in (Agents, Episode, Segment, Trace)}

    async def invoke(hook, given):
        await hook()

    for name, values in {
        "verifiers": {},
        "verifiers.v1": own,
        "verifiers.v1.session": {"RolloutLimits": RolloutLimits, "call_hook": None},
        "verifiers.v1.state": {"state_cls": lambda kind: dict},
        "verifiers.v1.utils": {},
        "verifiers.v1.utils.decorators": {"invoke": invoke},
    }.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    monkeypatch.setattr(adapter, "load_single_agent_env", lambda config: (env, "player"))
