"""gymnasium environments played in words by a scripted engine: returns, illegal actions, seeds,
refusals."""

import json
from itertools import islice

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from onepolicy.config import GymnasiumTask, UsageError
from onepolicy.envs import make_environment
from onepolicy.envs.adapters.gymnasium import TextEnvironment
from onepolicy.envs.adapters.gymnasium_text import (
    TextFormError,
    describe_actions,
    describe_ansi,
    describe_value,
    parse_action,
)
from onepolicy.envs.adapters.seeded import scale_return
from onepolicy.envs.warmup.examples import task_alphabet, warmup_examples
from onepolicy.envs.warmup.gridworlds import optimal_actions
from onepolicy.interfaces import EpisodeError
from support.scripted_engine import HERMES, play, tokenizer_of

LAKE = {"id": "FrozenLake-v1", "params": {"is_slippery": False}, "returns": (0, 1)}
WAY = ["down", "down", "right", "right", "down", "right"]


def environment(template=None, max_len=3000, **settings):
    return make_environment(
        GymnasiumTask(**LAKE | settings), tokenizer_of(template), max_len=max_len
    )


def act(*actions):
    return [f"Action: act[{action}]" for action in actions]


def test_a_walk_to_the_goal():
    env = environment(instructions="")
    (sample,), script = play(env, act(*WAY))
    assert (sample.reward, sample.finish, sample.events) == (1.0, "stop", ("act",) * 6)
    assert [env.tokenizer.decode(prompt) for prompt in script.prompts][:3] == [
        "row 0, column 0\n",
        "row 0, column 0\nAction: act[down]<eos>\nObservation: row 1, column 0\n",
        "row 0, column 0\nAction: act[down]<eos>\nObservation: row 1, column 0\n"
        "Action: act[down]<eos>\nObservation: row 2, column 0\n",
    ]
    turns = [[*env.tokenizer.encode(text), env.tokenizer.eos_token_id] for text in act(*WAY)]
    assert sample.tokens[1:][sample.trainable].tolist() == [t for turn in turns for t in turn]
    assert sample.tokens.tolist() == script.prompts[-1] + turns[-1]  # as sampled and as read


def test_a_hole_and_an_unfinished_walk_earn_nothing():
    for settings, actions, how, ended in (
        ({}, ("right", "down"), {}, (0.0, "stop")),
        # its return of 0 would be worth 1, had it ended
        ({"max_turns": 2, "returns": (-5, 0)}, ("left", "left"), {}, (0.0, "turns")),
        ({}, WAY[:1], {"finish": "length"}, (0.0, "length")),
        ({"max_turns": 6}, WAY, {}, (1.0, "stop")),  # the last turn's step is taken
    ):
        (sample,), _ = play(environment(**settings), act(*actions), **how)
        assert (sample.reward, sample.finish) == ended


INVALID = [
    ("Action: act[fly]", "act_error", "error: no action 'fly'; there is left, down, right, up"),
    ("Action: act[4]", "act_error", "error: no action '4'; there is left, down, right, up"),
    ("Action: act[1.5]", "act_error", "error: no action '1.5'; there is left, down, right, up"),
    ("Action: go[left]", "malformed", "error: no tool go; there is act"),
    ("Answer: left", "malformed", "error: there is nothing to answer; call act"),
]


def test_an_invalid_action_is_answered_and_takes_no_step(subtests):
    env = environment()
    for turn, event, reply in INVALID:
        with subtests.test(turn=turn):
            (sample,), script = play(env, [turn, *act(*WAY)])
            seen = env.tokenizer.decode(script.prompts[1])
            assert seen.endswith(f"<eos>\nObservation: {reply}\n")
            assert (sample.reward, sample.events) == (1.0, (event, *("act",) * 6))


def test_actions_by_name_number_and_alias():
    (sample,), _ = play(environment(), act("Down", " DOWN ", "2", "2", "down", "right"))
    assert sample.reward == 1.0
    env = environment(actions=["West", "South", "East", "North"])
    (sample,), _ = play(env, act("south", "south", "east", "East", "1", "east"))
    assert sample.reward == 1.0


def test_a_template_with_tools_and_two_steps_in_a_turn():
    def call(*actions):
        calls = ({"name": "act", "arguments": {"action": action}} for action in actions)
        return "".join(f"<call>{json.dumps(each)}</call>" for each in calls)

    env = environment(HERMES, observation="ansi")
    turns = [call("down", "down"), "over there", call("right", "right")]
    (sample,), script = play(env, [*turns, call("down", "right", "right")])
    assert (sample.reward, sample.events) == (1.0, ("act", "act", "malformed", *("act",) * 4))
    first, second = (env.tokenizer.decode(prompt) for prompt in script.prompts[:2])
    assert first.endswith("Call act in every turn.\n\n[red:S]FFF\nFHFH\nFFFH\nHFFG<eos><bot>")
    assert second[len(first) :].split("<eos>")[1:3] == [
        "<tool>  (Down)\nSFFF\n[red:F]HFH\nFFFH\nHFFG",
        "<tool>  (Down)\nSFFF\nFHFH\n[red:F]FFH\nHFFG",
    ]


def test_the_same_problem_is_the_same_episode():
    """On slipping ice every step has chance. All of it comes from the problem's seed, in any order
    of the episodes."""
    env = environment(params={}, max_turns=30)
    walks = []
    for index in (0, 1, 0, 2, 0):
        (sample,), _ = play(env, act(*["right"] * 30), env.train_problem(index))
        walks.append(sample.tokens.tolist())
    assert walks[0] == walks[2] == walks[4]
    assert len({tuple(walk) for walk in walks}) > 1
    env, again = (environment(id="Blackjack-v1", params={}, returns=(-1, 1)) for _ in range(2))
    openings = [env.train_problem(i).prompt for i in range(8)]
    assert len(set(openings)) > 1
    assert openings[::-1] == [again.train_problem(i).prompt for i in reversed(range(8))]
    held_out = {problem.entry["seed"] for problem in env.held_out(50)}
    assert not held_out & {env.train_problem(i).entry["seed"] for i in range(200)}


def test_returns_of_other_toy_text():
    """Taxi: -1 a step, -10 for a wrong dropoff. A hand of blackjack: -1 or 1."""
    env = environment(id="Taxi-v4", params={"max_episode_steps": 3}, returns=(-20, 0), max_turns=5)
    (sample,), _ = play(env, act("dropoff", "north", "south"))
    assert sample.reward == pytest.approx((-12 + 20) / 20)  # cut by the environment's own limit
    assert "taxi at row" in env.train_problem(0).prompt
    env = environment(id="CliffWalking-v1", params={}, returns=(-113, -13), max_turns=20)
    (sample,), _ = play(env, act("up", *["right"] * 11, "down"))
    assert sample.reward == 1.0
    assert [scale_return(v, (-1, 1)) for v in (-3, -1, 0, 0.5, 1, 2)] == [0, 0, 0.5, 0.75, 1, 1]


def test_spaces_in_words_and_back():
    value = (3, {"at": np.array([0.25, -1]), "name": "fox"})
    assert describe_value(value) == "3, at: 0.25, -1; name: fox"
    assert describe_value({"gold": 100001, "at": np.array([1.5, 12345.6])}) == (
        "gold: 100001; at: 1.5, 1.235e+04"
    )
    box, several = spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 3])
    assert parse_action(spaces.Discrete(3, start=5), "6", ()) == 6
    assert parse_action(several, "1, 2", ()).tolist() == [1, 2]
    assert parse_action(box, "0.5,-0.5", ()).tolist() == [0.5, -0.5]
    assert parse_action(spaces.Box(0, 255, (1,), np.uint8), "44", ()).tolist() == [44]
    assert parse_action(spaces.Text(4), " go ", ()) == "go"
    for wrong_space, texts in (
        (spaces.Discrete(3), ("3", "nan", "1e400")),
        (several, ("1", "1, 3")),
        (box, ("2, 0",)),
        (spaces.Box(0, 255, (1,), np.uint8), ("300", "-1", "1e30", "nan", "1.5")),
        (spaces.Text(4), ("too long",)),
    ):
        for text in texts:
            with pytest.raises(TextFormError, match="no action"):
                parse_action(wrong_space, text, ())
    assert describe_actions(spaces.Discrete(3, start=5), ()) == "a number from 5 to 7"
    with pytest.raises(TextFormError, match="a Tuple"):
        describe_actions(spaces.Tuple([box, several]), ())
    graph = spaces.Graph(spaces.Discrete(2), None).sample()
    for picture in (np.zeros((84, 84)), (3, graph)):
        with pytest.raises(TextFormError, match="an observation of shape"):
            describe_value(picture)
    ansi = "\x1b[34;1mR\x1b[0m:\x1b[43m \x1b[0m|\x1b[35mY\x1b[0m\n"
    assert describe_ansi(ansi) == "[blue:R]:[yellow: ]|[magenta:Y]"


class Unseeded(gymnasium.Env):
    """An environment whose first observation ignores the seed."""

    observation_space, action_space = spaces.Discrete(2**30), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return int(np.random.default_rng().integers(2**30)), {}

    def step(self, action):
        return 0, 0.0, False, False, {}


class Breaking(Unseeded):
    """An environment whose third step fails and whose fourth earns no number."""

    failure: Exception = KeyError("lost")

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return 0, {}

    def step(self, action):
        self.steps += 1
        if self.steps == 3 and action:
            raise self.failure
        return 0, float("nan") if self.steps == 4 else 0.0, self.steps == 4, False, {}


class Picture(Unseeded):
    observation_space = spaces.Box(0, 255, (84, 84, 3))

    def reset(self, *, seed=None, options=None):
        return np.zeros((84, 84, 3), np.float32), {}


class TwoHands(Picture):
    """An environment whose actions are pairs."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])

    def reset(self, *, seed=None, options=None):
        return 0, {}


@pytest.fixture
def registered():
    names = {"Unseeded-v0": Unseeded, "Picture-v0": Picture, "Breaking-v0": Breaking}
    names["TwoHands-v0"] = TwoHands
    for name, cls in names.items():
        gymnasium.register(name, entry_point=cls, disable_env_checker=True)
    yield
    for name in names:
        gymnasium.registry.pop(name)


REFUSED = [
    ({"id": "FrozenLake-v9"}, r"task.id: gymnasium cannot make 'FrozenLake-v9'"),
    ({"params": {"slippery": False}}, r"task.id: .* make 'FrozenLake-v1' with .*slippery"),
    ({"id": "Unseeded-v0"}, r"task.id: two episodes of Unseeded-v0 from one seed.* differ"),
    ({"id": "Breaking-v0"}, r"Breaking-v0 fails in its first steps: KeyError\('lost'\)"),
    ({"id": "Picture-v0"}, r"task.id: Picture-v0 observes Box.* shape \(84, 84, 3\) has no"),
    ({"id": "TwoHands-v0"}, r"task.id: TwoHands-v0 observes Discrete\(2\) .* a Tuple has no form"),
    ({"id": "Blackjack-v1", "observation": "ansi"}, r"task.observation: Blackjack-v1 has no ansi"),
    ({"returns": (1, 0)}, r"task.returns: 1 is not below 0"),
    ({"actions": ["a", "A", "b", "c"]}, r"task.actions: .* are not different names"),
    ({"actions": ["a", "b", "c"]}, r"task.actions: 3 names, but FrozenLake-v1 takes Discrete\(4\)"),
    ({"id": "Pendulum-v1", "actions": ["a", "b"]}, r"task.actions: 2 names, .* takes Box"),
    ({"params": {"render_mode": "human"}}, r"params.render_mode: 'human' cannot be set here"),
]


def test_an_unplayable_environment_is_refused_at_the_start(registered, monkeypatch, subtests):
    for settings, message in REFUSED:
        with subtests.test(**settings), pytest.raises(ValueError, match=message):
            environment(**{"params": {}} | settings)
    monkeypatch.setattr("onepolicy.envs.adapters.gymnasium.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"not installed; pip install 'onepolicy\[envs\]'"):
        environment()


def test_an_environment_that_breaks_fails_the_episode(registered, monkeypatch):
    monkeypatch.setattr("onepolicy.envs.adapters.gymnasium.TRIAL_STEPS", 2)
    env = environment(id="Breaking-v0", params={})
    with pytest.raises(EpisodeError, match=r"Breaking-v0 failed: KeyError\('lost'\)"):
        play(env, act(0, 0, 1))
    with monkeypatch.context() as other:
        other.setattr(Breaking, "failure", gymnasium.error.ResetNeeded("reset first"))
        with pytest.raises(EpisodeError, match=r"Breaking-v0 failed: ResetNeeded\('reset first'\)"):
            play(env, act(0, 0, 1))
    with pytest.raises(EpisodeError, match="its reward is nan"):
        play(env, act(0, 0, 0, 0))
    with pytest.raises(EpisodeError, match="not one turn was sampled after its prompt"):
        play(environment(max_len=30), [])


def test_worked_walks_agree_with_the_environment():
    task = GymnasiumTask(**LAKE, instructions="", max_turns=8)
    env = make_environment(task, tokenizer_of(), max_len=3000)
    for texts in islice(warmup_examples(task, mistakes=0.0, seed=0), 3):
        (sample,), script = play(env, texts[1::2])
        assert sample.reward == 1.0
        assert len(script.prompts) == 6  # the shortest way
        assert env.tokenizer.decode(script.prompts[-1]).replace("<eos>", "") == "".join(texts[:-1])
    random = next(warmup_examples(task, mistakes=0.999, seed=1))
    assert random != next(warmup_examples(task, mistakes=0.999, seed=2))
    assert random == next(warmup_examples(task, mistakes=0.999, seed=1))
    other = GymnasiumTask(id="Blackjack-v1", returns=(-1, 1))
    with pytest.raises(UsageError, match="no table of its transitions"):
        next(warmup_examples(other, mistakes=0.0, seed=0))


def test_the_alphabet_has_the_characters_of_instructions_and_actions():
    known = task_alphabet(GymnasiumTask(**LAKE))
    assert not set("éß") & set(known)
    names = ["west", "süd", "east", "north"]
    task = GymnasiumTask(**LAKE, instructions="à gauche", actions=names)
    assert set(task_alphabet(task)) == {*known, "à", "ü"}


def test_plans_account_for_slips():
    """On slipping ice the best first step from the start is into the wall: left is worth most."""
    best = optimal_actions(TextEnvironment(GymnasiumTask(id="FrozenLake-v1", returns=(0, 1))))
    assert best[0].tolist() == [True, False, False, False]
