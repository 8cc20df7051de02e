"""A taskset of verifiers: sums, scored by two weighted rewards. `kind` asks for features that an
adapter without a runtime must refuse."""

from typing import Literal

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsConfig(vf.TasksetConfig):
    count: int = 16
    kind: Literal["plain", "runtime", "container", "chat", "unprompted", "failing"] = "plain"


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        assert trace.messages[0].role == "system"
        return float(trace.calls[-1].usage.completion_tokens <= 4)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class FailingTask(SumsTask):
    @vf.reward
    async def broken(self, trace: vf.Trace) -> float:
        raise KeyError("no such score")


class RuntimeTask(SumsTask):
    @vf.reward
    async def ran(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 1.0


class ContainerTask(SumsTask):
    NEEDS_CONTAINER = True


TASKS = {"runtime": RuntimeTask, "container": ContainerTask, "failing": FailingTask}


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        for i in range(self.config.count):
            prompt = f"{i} + {i + 1}"
            if self.config.kind == "chat":
                prompt = [
                    vf.UserMessage(content="1 + 1"),
                    vf.AssistantMessage(content="2"),
                    vf.UserMessage(content=prompt),
                ]
            if self.config.kind == "unprompted":
                prompt = None
            data = SumsData(prompt=prompt, system_prompt="Add.", answer=str(2 * i + 1))
            yield TASKS.get(self.config.kind, SumsTask)(data, self.config.task)
