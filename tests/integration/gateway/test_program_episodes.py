"""Episodes of programs and the gateway that they share, around a stand-in for the sandbox."""

import asyncio
from types import SimpleNamespace

import httpx2
import pytest

from onepolicy.config import ProgramTask
from onepolicy.gateway import program_task
from onepolicy.gateway.program_sandbox import Ended
from onepolicy.interfaces import EpisodeError, Problem
from onepolicy.rollout.collect import play_episode
from onepolicy.types import Sampling
from support.recording_engine import RecordingEngine
from support.scripted_engine import HERMES, tokenizer_of

TOKENIZER = tokenizer_of(HERMES)
PRODUCTS = {"kind": "gym", "name": "products", "params": {"min_digits": 1, "max_digits": 1}}
SAMPLING = Sampling(1.0, 200, top_p=0.9, support=True)


async def ask(key, gateway, messages, **more):
    transport = httpx2.AsyncHTTPTransport(uds=str(gateway))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        headers = {"authorization": f"Bearer {key}"}
        body = {"messages": messages} | more
        return await client.post("/v1/chat/completions", json=body, headers=headers)


class Sandbox:
    """Plays a program: it asks once and prints the answer. One that reads `wait` asks when another
    has ended."""

    def __init__(self, config):
        self.gateways, self.ended = [], asyncio.Event()

    async def run(self, command, stdin, key, gateway):
        self.gateways.append(gateway)
        if stdin == "wait":
            await self.ended.wait()
        if stdin == "ask nothing":
            return Ended(0, "", "", None)
        more = {}
        if stdin == "ask wrongly":
            more = {"tools": [{"type": "custom"}]}
        answer = await ask(key, gateway, [{"role": "user", "content": stdin}], **more)
        if answer.is_error:
            return Ended(1, "", "refused", None)
        return Ended(0, answer.json()["choices"][0]["message"]["content"], "", None)


@pytest.fixture
def programs(monkeypatch):
    monkeypatch.setattr(program_task, "ProgramSandbox", Sandbox)
    config = ProgramTask(problems=PRODUCTS, command=("x",), seconds=60)
    task = SimpleNamespace(grade=lambda problem, text: float(text == problem.answer))
    return program_task.Programs(config, task, TOKENIZER, max_len=4000)


def test_a_gateway_runs_as_long_as_an_episode_uses_it(programs):
    engine = RecordingEngine(TOKENIZER, ["6", "6", "6"])

    async def play(text):
        problem = Problem(0, text, "6")
        (sample,) = await play_episode(engine, programs, problem, SAMPLING, lambda turn: turn)
        programs.sandbox.ended.set()
        return sample.reward

    async def play_all():
        rewards = await asyncio.gather(play("wait"), play("go"))
        assert programs.sandbox.ended.is_set()
        return [*rewards, await play("later")]

    assert asyncio.run(asyncio.wait_for(play_all(), 60)) == [1.0, 1.0, 1.0]
    first, second, third = programs.sandbox.gateways
    assert first == second != third
    assert not any(gateway.parent.exists() for gateway in (first, third))
    assert programs.take_metrics()["program/out_of_time"] == 0


@pytest.mark.parametrize("system", ["You help.", "You help well."])
def test_a_sub_agent_without_its_thoughts_is_not_broken_and_keeps_its_place(programs, system):
    """With another system message its second turn begins anew."""
    engine = RecordingEngine(TOKENIZER, ["<think>\nhm\n</think>\n\n6"])

    async def delegate(command, stdin, key, gateway):
        await ask(key, gateway, [{"role": "user", "content": stdin}])
        helper = [{"role": "system", "content": "You help."}, {"role": "user", "content": "part"}]
        answer = await ask(key, gateway, helper)
        turn = {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}
        helper[0] = {"role": "system", "content": system}
        await ask(key, gateway, [*helper, turn, {"role": "user", "content": "go on"}])
        return Ended(0, "6", "", None)

    programs.sandbox.run = delegate
    problem, seeds = Problem(0, "2*3", "6"), range(3).index
    samples = asyncio.run(play_episode(engine, programs, problem, SAMPLING, seeds))
    broken = system != "You help."
    assert len(samples) == 2 + broken
    assert programs.take_metrics()["program/broken"] == broken
    asked = [(len(prompt), how.initial_prompt_len) for prompt, how, _ in engine.requests]
    begun = [asked[0][0], asked[1][0], asked[1 + broken][0]]
    assert [first for _, first in asked] == begun


def test_a_program_that_asks_for_no_turn_is_no_episode(programs):
    engine, problem = RecordingEngine(TOKENIZER, ["6"]), Problem(0, "ask nothing", "6")
    with pytest.raises(EpisodeError, match="asked for no turn; it ended with status 0"):
        asyncio.run(play_episode(engine, programs, problem, SAMPLING, lambda turn: turn))
    (gateway,) = programs.sandbox.gateways
    assert not gateway.parent.exists()


def test_a_program_without_a_turn_is_told_why(programs):
    engine, problem = RecordingEngine(TOKENIZER, ["6"]), Problem(0, "ask wrongly", "6")
    said = r"could be served: tools\[0\].type: 'custom', .*; it ended with status 1: refused"
    with pytest.raises(EpisodeError, match=said):
        asyncio.run(play_episode(engine, programs, problem, SAMPLING, lambda turn: turn))
    asked = SimpleNamespace(requests=1, refused=None)
    for status in (0, 1, None):  # it has lacked time only if that ended it
        said = program_task._lack_of_turns(asked, Ended(status, "", "", None))
        assert ("task.seconds" in said) == (status is None)
