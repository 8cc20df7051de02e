"""An environment of verifiers in turns: it names numbers, the agent doubles them until it errs,
answers 4 or has three right. Scored by the environment, by its task and at the end of the episode.
"""

from typing import Literal

import verifiers.v1 as vf

__all__ = ["DoublingEnv", "DoublingTaskset"]


class DoublingTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.1)
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns

    @vf.stop
    async def four(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "4"


class DoublingTaskset(vf.Taskset[DoublingTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield DoublingTask(vf.TaskData(prompt=str(number)), self.config.task)
            number += 1


class DoublingConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=5)
    twist: Literal["none", "twice", "masked", "idle", "picture"] = "none"


class DoublingEnv(vf.Env[DoublingConfig]):
    async def run(self, task, agents):
        if self.config.twist == "idle":
            return
        if self.config.twist == "masked":
            task = task.with_data(prompt="another")
        number, right = int(task.data.prompt or 0) if self.config.twist != "masked" else 0, 0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply == str(2 * number):
                number, right = number + 1, right + 1
                if right == 3:
                    break
                message = f"now {number}"
                if self.config.twist == "picture":
                    message = [vf.UserMessage(content=[vf.TextContentPart(text=message)])]
                segment = await interaction.turn(message)
        if self.config.twist == "twice":
            await agents.player.run(task)
        interaction.trace.record_reward("right", right / 3)

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_reward("bonus", float(trace.stop_condition == "user_closed"), 0.25)
