"""Environments of verifiers, its own textarena taskset among them, driven by a scripted engine."""

from __future__ import annotations

import asyncio
import functools
import json
import sys

import pytest

from onepolicy.config import UsageError, VerifiersTask
from onepolicy.envs import make_environment
from onepolicy.interfaces import EpisodeError
from support.paths import ROOT
from support.scripted_engine import PRINTABLE, make_tokenizer, play, sampled, tokenizer_of

pytestmark = pytest.mark.envs
PACKAGES = ROOT / "tests" / "support" / "envs"
CHAT = (
    "{% for m in messages %}<{{ 'bot' if m['role'] == 'assistant' else 'user' }}>"
    "{% if m['role'] == 'system' %}# {% endif %}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture(autouse=True)
def _plugins(monkeypatch):
    monkeypatch.syspath_prepend(str(PACKAGES))
    yield
    for name in ("sums_v1", "doubling_v1"):
        sys.modules.pop(name, None)


def environment(taskset, tokenizer=None, settings=None, **env):
    """Make an environment of verifiers. tokenizer: a tokenizer, or a chat template for one."""
    if tokenizer is None or isinstance(tokenizer, str):
        tokenizer = tokenizer_of(tokenizer)
    task = VerifiersTask(env={"taskset": taskset} | env, **settings or {})
    return make_environment(task, tokenizer, max_len=4000)


def problem_of(env, prompt):
    return next(p for p in map(env.train_problem, range(100)) if p.prompt == prompt)


@pytest.mark.parametrize("template", [None, CHAT])
def test_one_turn_and_weighted_rewards(template):
    env = environment({"id": "sums-v1"}, template)
    env.check(max_tokens=8, max_len=4000)
    problem = env.train_problem(0)
    answer = problem.entry["task"].data.answer
    thought, unsure = f"<think>hm</think>{answer}", "I cannot tell"
    for turn, reward in ((answer, 1.5), (thought, 1.0), ("no", 0.5), (unsure, 0.0)):
        (sample,), script = play(env, [turn], problem)
        assert (sample.reward, sample.finish) == (reward, "stop")
        assert sample.tokens.tolist() == script.prompts[0] + sampled(env, turn)[0]
    chat = f"<user># Add.<eos><user>{problem.prompt}<eos><bot>"
    asked = {None: f"Add.\n{problem.prompt}\n", CHAT: chat}[template]
    assert env.tokenizer.decode(script.prompts[0]) == asked
    (cut,), _ = play(env, [answer], problem, finish="length")
    assert (cut.reward, cut.finish) == (0.0, "length")
    scaled = environment({"id": "sums-v1"}, settings={"returns": (0.5, 1.5)})
    rewards = [play(scaled, [turn], problem)[0][0].reward for turn in (answer, "no", unsure)]
    assert rewards == [1.0, 0.0, 0.0]


def test_a_prompt_of_several_messages():
    env = environment({"id": "sums-v1", "kind": "chat"}, CHAT)
    (_,), script = play(env, ["5"])
    (*_, data) = env.initial_prompt(env.train_problem(0))
    assert env.tokenizer.decode(script.prompts[0]) == (
        f"<user># Add.<eos><user>1 + 1<eos><bot>2<eos><user>{data[1]}<eos><bot>"
    )


@pytest.mark.parametrize("template", [None, CHAT])
def test_turns_that_an_environment_drives(template):
    env = environment({"id": "doubling-v1"}, template)
    problem = problem_of(env, "7")
    turns = ["14", "<think>2 * 8</think>16", "18"]
    (sample,), script = play(env, turns, problem)
    # the environment's, the task's, at the end
    assert sample.reward == pytest.approx(1 + 0.1 * 3 + 0.25)
    ids = sampled(env, *turns)
    assert sample.tokens[1:][sample.trainable].tolist() == [token for turn in ids for token in turn]
    assert sample.tokens.tolist() == script.prompts[2] + ids[2]
    between = script.prompts[1][len(script.prompts[0]) + len(ids[0]) :]
    shown = {None: "\nnow 8\n", CHAT: "<user>now 8<eos><bot>"}
    assert env.tokenizer.decode(between) == shown[template]
    (sample,), _ = play(env, ["14", "17"], problem)
    assert sample.reward == pytest.approx(1 / 3 + 0.1 * 2 + 0.25)


def test_only_the_environments_own_ends_are_rewarded():
    env = environment({"id": "doubling-v1"}, player={"max_turns": 2})
    problem = problem_of(env, "7")
    (sample,), _ = play(env, ["14", "16"], problem)  # its limit: no bonus, but scored
    assert (sample.reward, sample.finish) == (pytest.approx(2 / 3 + 0.2), "stop")
    (sample,), _ = play(env, ["4"], problem_of(env, "2"))  # its task's stop hook
    assert (sample.reward, sample.finish) == (pytest.approx(1 / 3 + 0.1), "stop")
    ours = environment({"id": "doubling-v1"}, settings={"max_turns": 2})
    (sample,), _ = play(ours, ["14", "16"], problem)
    assert (sample.reward, sample.finish) == (0.0, "turns")


def test_errors_of_the_environment_and_of_the_engine():
    env = environment({"id": "sums-v1", "kind": "failing"})
    with pytest.raises(EpisodeError, match=r"sums-v1 failed: .*no such score"):
        play(env, ["1"])
    with pytest.raises(EpisodeError, match="doubling-v1 asked its agent for no turn"):
        play(environment({"id": "doubling-v1"}, twist="idle"), [])

    async def broken(tokens, **how):
        raise RuntimeError("the engine's")

    env = environment({"id": "doubling-v1"})
    with pytest.raises(RuntimeError, match="the engine's"):
        asyncio.run(env.episode(env.train_problem(0), broken, 1.0))


def test_unplayable_environments_are_refused():
    judged = {"task": {"judges": [{"id": "reference"}]}}
    for taskset, env, message in (
        ({"kind": "runtime"}, {}, r"RuntimeTask needs a runtime \(in ran\)"),
        ({"kind": "container"}, {}, r"ContainerTask needs a container"),
        ({"kind": "unprompted"}, {}, r"task \d+ has no prompt"),
        (judged, {}, r"SumsTask needs judge models"),
        ({"id": "no-such-taskset"}, {}, r"verifiers cannot load .*no-such-taskset"),
        ({"counts": 3}, {}, r"verifiers cannot load .*counts"),
        ({}, {"id": "user-sim"}, r"has 2 agents, assistant, user; one can be trained"),
        ({}, {"agent": {"model": "m"}}, r"task.env.agent.model: has no effect"),
        ({}, {"timeout": {"episode": 3.0}}, r"task.env.timeout: has no effect here"),
    ):
        with pytest.raises(UsageError, match=message):
            environment({"id": "sums-v1"} | taskset, **env).check(max_tokens=8, max_len=4000)
    for twist, message in (
        ("twice", "plays its agent player more than once"),
        ("masked", "gives its agent player another prompt than the task has"),
        ("picture", "a message of user that is no user's text"),
    ):
        env = environment({"id": "doubling-v1"}, twist=twist)
        with pytest.raises(UsageError, match=message):
            play(env, ["14", "16", "18"], problem_of(env, "7"))


def test_one_task_in_four_is_held_out():
    env = environment({"id": "sums-v1", "count": 40})
    held = {p.prompt for p in env.held_out(4)}
    with pytest.raises(UsageError, match=r"eval.problems: 40 are asked for, but \d+ of the"):
        env.held_out(40)
    size = len(env.problems._splits["train"])
    epochs = [[env.train_problem(e * size + i).prompt for i in range(size)] for e in range(2)]
    assert set(epochs[0]) == set(epochs[1])
    assert len(set(epochs[0])) == size
    assert epochs[0] != epochs[1]
    assert not held & set(epochs[0])
    endless = environment({"id": "doubling-v1"})
    later = endless.train_problem(30).prompt  # asked for out of order, as a resumed run does
    assert environment({"id": "doubling-v1"}).train_problem(30).prompt == later
    trained = {endless.train_problem(i).prompt for i in range(60)}
    assert not trained & {p.prompt for p in endless.held_out(10)}


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Provide a corpus in nltk's layout, so that nothing is downloaded: six nouns, and a tagger
    that knows them."""
    nouns = ["apple", "bread", "chair", "house", "river", "stone", "table", "test"]
    for name in ("en", "en-basic"):
        path = tmp_path / "corpora" / "words" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(nouns) + "\n")
    tagger = tmp_path / "taggers" / "averaged_perceptron_tagger_eng"
    tagger.mkdir(parents=True)
    parts = {"weights": {}, "tagdict": dict.fromkeys(nouns, "NN"), "classes": ["NN"]}
    for part, value in parts.items():
        (tagger / f"averaged_perceptron_tagger_eng.{part}.json").write_text(json.dumps(value))
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *args, **kwargs: True)
    from textarena.envs.Wordle import env as wordle

    dictionary = functools.cache(wordle.EnglishDictionary)  # seconds a game
    monkeypatch.setattr(wordle, "EnglishDictionary", dictionary)
    return nouns


def test_verifiers_own_textarena_taskset(words):
    """Wordle: the environment seeds the game, our engine's turns are its moves, its result is the
    reward."""
    taskset = {"id": "textarena", "game": "Wordle-v0"}
    with pytest.raises(UsageError, match="does not know all of"):  # a dash of the system prompt
        environment(taskset, CHAT).check(max_tokens=16, max_len=4000)
    env = environment(taskset, make_tokenizer(f"{PRINTABLE}\N{EM DASH}", CHAT))
    env.check(max_tokens=16, max_len=4000)
    won = []
    for problem in map(env.train_problem, range(3)):
        for word in words[:-1]:  # the first guess of which one is right
            turns = [f"<think>[stone]?</think>[{word}]", "[x]", "[x]"]
            (sample,), script = play(env, turns, problem)
            if len(script.prompts) == 1:
                won.append((word, sample.reward))
    assert [reward for _, reward in won] == [1.0, 1.0, 1.0]
    assert len({word for word, _ in won}) > 1  # another problem, another word
    wrong = next(w for w in words if w != won[2][0])
    (lost,), script = play(env, [f"[{wrong}]", "[x]", "[x]"], problem)
    assert lost.reward < 1.0
    opened, reply = (env.tokenizer.decode(script.prompts[i]) for i in (0, 1))
    assert "<user># You are a competitive game player." in opened
    assert "You are Playing Wordle" in opened
    assert "guesses left.<eos><bot>" in reply
