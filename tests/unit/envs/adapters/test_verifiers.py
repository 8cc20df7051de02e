"""Environments of verifiers, of whose classes there are stand-ins here."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest

from onepolicy.config import UsageError, VerifiersTask
from onepolicy.envs.adapters.verifiers import Verifiers
from onepolicy.interfaces import EpisodeError
from support import fake_verifiers
from support.scripted_engine import Script, play, tokenizer_of

CHAT = (
    "{% for m in messages %}<{{ 'bot' if m['role'] == 'assistant' else 'user' }}>"
    "{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture
def made(monkeypatch):
    """Return a function that makes the environment of a stand-in."""

    def make(env, **settings):
        fake_verifiers.install(monkeypatch, env)
        return Verifiers(VerifiersTask(env={}, **settings), tokenizer_of(CHAT), max_len=400)

    return make


def test_turns_until_the_environments_own_limit(made):
    """A third turn would end with an error: the script has no more."""
    env = fake_verifiers.Env(max_turns=2)
    ours = made(env)
    (sample,), script = play(ours, ["2", "4"])
    assert (sample.reward, sample.finish) == (2.0, "stop")
    shown = "<user>1<eos><bot>2<eos><user>3<eos><bot>"
    assert ours.tokenizer.decode(script.prompts[1]) == shown
    (trace,) = env.record.traces
    assert (trace.ok, trace.ended) == (True, "max_turns")
    (sample,), _ = play(made(env, returns=(0.0, 4.0)), ["2", "4"])
    assert sample.reward == 0.5


def test_the_user_answers_in_texts_messages_or_dicts(made):
    def message(role, text):
        return SimpleNamespace(role=role, content=text)

    forms = (
        lambda text: text,
        lambda text: [{"role": "user", "content": text}],
        lambda text: [message("user", text)],
    )
    for reply in forms:
        ours = made(fake_verifiers.Env(reply, max_turns=2))
        _, script = play(ours, ["2", "4"])
        assert ours.tokenizer.decode(script.prompts[1]).endswith("<user>3<eos><bot>")
    ours = made(fake_verifiers.Env(lambda text: [message("system", text)], max_turns=2))
    with pytest.raises(UsageError, match="a message of system that is no user's text"):
        play(ours, ["2", "4"])


def test_an_error_of_the_engine_that_the_environment_catches_ends_the_episode(made):
    class Catching(fake_verifiers.Env):
        async def run(self, task, agents):
            async with agents.player.interaction(task) as interaction:
                await interaction.turn()
                with suppress(Exception):
                    await interaction.turn("3")

    ours = made(Catching())
    script = Script(ours.tokenizer, ["2"])

    async def sample(tokens, **how):
        if script.prompts:
            raise RuntimeError("lost")
        return await script(tokens, **how)

    with pytest.raises(RuntimeError, match="lost"):
        asyncio.run(ours.episode(ours.train_problem(0), sample, 1.0))


def test_an_environment_that_times_its_agent_loses_the_episode_alone(made):
    class Timing(fake_verifiers.Env):
        async def run(self, task, agents):
            async with agents.player.interaction(task) as interaction:
                await asyncio.wait_for(interaction.turn(), 0.01)

    ours = made(Timing())

    async def sample(tokens, **how):
        await asyncio.Event().wait()

    with pytest.raises(EpisodeError, match="failed: TimeoutError"):
        asyncio.run(ours.episode(ours.train_problem(0), sample, 1.0))


def test_an_environment_that_catches_its_own_error_loses_the_episode_alone(made):
    class Failing(fake_verifiers.Env):
        async def run(self, task, agents):
            with suppress(KeyError):
                async with agents.player.interaction(task) as interaction:
                    await interaction.turn()
                    raise KeyError

    with pytest.raises(EpisodeError, match="an error of its own"):
        play(made(Failing()), ["2"])
