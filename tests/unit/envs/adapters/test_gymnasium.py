"""gymnasium environments played in words by a scripted engine: returns, illegal actions, seeds,
refusals."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from onepolicy.config import GymnasiumTask, UsageError
from onepolicy.envs import make_environment
from onepolicy.envs.adapters.gymnasium import (
    TextEnvironment,
    TextFormError,
    check_observation_space,
    describe_actions,
    describe_ansi,
    describe_value,
    parse_action,
)
from onepolicy.envs.adapters.seeded import scale_return
from onepolicy.envs.warmup.examples import warmup_examples
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
    assert sample.tokens[1:][sample.trainable].tolist() == [
        token for turn in turns for token in turn
    ]
    assert sample.tokens.tolist() == script.prompts[-1] + turns[-1]  # as sampled and as read


def test_a_hole_and_an_unfinished_walk_earn_nothing():
    (sample,), _ = play(environment(), act("right", "down"))
    assert (sample.reward, sample.finish) == (0.0, "stop")
    (sample,), _ = play(environment(max_turns=2, returns=(-5, 0)), act("left", "left"))
    assert (sample.reward, sample.finish) == (
        0.0,
        "turns",
    )  # its return of 0 would be worth 1, had it ended
    (sample,), _ = play(environment(), act(*WAY)[:1], finish="length")
    assert (sample.reward, sample.finish) == (0.0, "length")
    (sample,), _ = play(environment(max_turns=6), act(*WAY))
    assert sample.reward == 1.0  # the last turn's step is taken


@pytest.mark.parametrize(
    ("turn", "event", "reply"),
    [
        ("Action: act[fly]", "act_error", "error: no action 'fly'; there is left, down, right, up"),
        ("Action: act[4]", "act_error", "error: no action '4'; there is left, down, right, up"),
        ("Action: act[1.5]", "act_error", "error: no action '1.5'; there is left, down, right, up"),
        ("Action: go[left]", "malformed", "error: no tool go; there is act"),
        ("Answer: left", "malformed", "error: there is nothing to answer; call act"),
        ("left", "malformed", "error: end with a line `Action: tool[input]` or `Answer: ...`"),
    ],
)
def test_an_invalid_action_is_answered_and_takes_no_step(turn, event, reply):
    env = environment()
    (sample,), script = play(env, [turn, *act(*WAY)])
    assert env.tokenizer.decode(script.prompts[1]).endswith(f"<eos>\nObservation: {reply}\n")
    assert (sample.reward, sample.events) == (1.0, (event, *("act",) * 6))


def test_actions_by_name_number_and_alias():
    (sample,), _ = play(environment(), act("Down", " DOWN ", "2", "2", "down", "right"))
    assert sample.reward == 1.0
    env = environment(actions=["West", "South", "East", "North"])
    (sample,), _ = play(env, act("south", "south", "east", "East", "1", "east"))
    assert sample.reward == 1.0
    with pytest.raises(UsageError, match=r"task.actions: 3 names, but FrozenLake-v1 has 4 actions"):
        environment(actions=["a", "b", "c"])


def test_a_template_with_tools_and_two_steps_in_a_turn():
    def call(action):
        return f'<call>{{"name": "act", "arguments": {{"action": "{action}"}}}}</call>'

    env = environment(HERMES, observation="ansi")
    turns = [
        call("down") + call("down"),
        "over there",
        call("right") + call("right"),
        call("down") + call("right") * 2,
    ]
    (sample,), script = play(env, turns)
    assert (sample.reward, sample.events) == (1.0, ("act", "act", "malformed", *("act",) * 4))
    first, second = script.prompts[0], script.prompts[1]
    assert env.tokenizer.decode(first).endswith(
        "Call act in every turn.\n\n[red:S]FFF\nFHFH\nFFFH\nHFFG<eos><bot>"
    )
    between = env.tokenizer.decode(second[len(first) :]).split("<eos>")
    assert between[1:3] == [
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
    assert not {p.entry["seed"] for p in env.held_out(50)} & {
        env.train_problem(i).entry["seed"] for i in range(200)
    }


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
    space = spaces.Tuple(
        [spaces.Discrete(5), spaces.Dict({"at": spaces.Box(-1, 1, (2,)), "name": spaces.Text(9)})]
    )
    assert (
        describe_value(space, (3, {"at": np.array([0.25, -1]), "name": "fox"}))
        == "3, at: 0.25, -1; name: fox"
    )
    assert parse_action(spaces.Discrete(3, start=5), "6", ()) == 6
    assert parse_action(spaces.MultiDiscrete([2, 3]), "1, 2", ()).tolist() == [1, 2]
    assert parse_action(spaces.Box(-1, 1, (2,)), "0.5,-0.5", ()).tolist() == [0.5, -0.5]
    assert parse_action(spaces.Text(4), " go ", ()) == "go"
    for wrong_space, text in (
        (spaces.Discrete(3), "3"),
        (spaces.Discrete(3), "nan"),
        (spaces.Discrete(3), "1e400"),
        (spaces.MultiDiscrete([2, 3]), "1"),
        (spaces.MultiDiscrete([2, 3]), "1, 3"),
        (spaces.Box(-1, 1, (2,)), "2, 0"),
        (spaces.Text(4), "too long"),
    ):
        with pytest.raises(TextFormError, match="no action"):
            parse_action(wrong_space, text, ())
    assert describe_actions(spaces.Discrete(3, start=5), ()) == "a number from 5 to 7"
    for picture in (
        spaces.Box(0, 255, (84, 84)),
        spaces.Tuple([spaces.Sequence(spaces.Discrete(2))]),
    ):
        with pytest.raises(TextFormError):
            check_observation_space(picture)
    assert (
        describe_ansi("\x1b[34;1mR\x1b[0m:\x1b[43m \x1b[0m|\x1b[35mY\x1b[0m\n")
        == "[blue:R]:[yellow: ]|[magenta:Y]"
    )


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


@pytest.fixture
def registered():
    names = {"Unseeded-v0": Unseeded, "Picture-v0": Picture, "Breaking-v0": Breaking}
    for name, cls in names.items():
        gymnasium.register(name, entry_point=cls, disable_env_checker=True)
    yield
    for name in names:
        gymnasium.registry.pop(name)


def test_an_unplayable_environment_is_refused_at_the_start(registered, monkeypatch):
    for settings, message in (
        ({"id": "FrozenLake-v9", "params": {}}, r"task.id: gymnasium cannot make 'FrozenLake-v9'"),
        (
            {"params": {"slippery": False}},
            r"task.id: gymnasium cannot make 'FrozenLake-v1' with .*slippery",
        ),
        (
            {"id": "Unseeded-v0", "params": {}},
            r"task.id: two episodes of Unseeded-v0 from one seed.* differ",
        ),
        (
            {"id": "Breaking-v0", "params": {}},
            r"task.id: Breaking-v0 fails in its first steps: KeyError\('lost'\)",
        ),
        (
            {"id": "Picture-v0", "params": {}},
            r"task.id: Picture-v0 observes Box.*a Box of shape \(84, 84, 3\) has no",
        ),
        (
            {"id": "Blackjack-v1", "params": {}, "observation": "ansi"},
            r"task.observation: Blackjack-v1 has no ansi form",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            environment(**settings)
    with monkeypatch.context() as without:
        without.setattr("onepolicy.envs.adapters.gymnasium.find_spec", lambda name: None)
        with pytest.raises(
            UsageError, match=r"gymnasium is not installed; pip install 'onepolicy\[envs\]'"
        ):
            environment()
    with pytest.raises(ValueError, match=r"task.returns: 1 is not below 0"):
        environment(returns=(1, 0))
    with pytest.raises(ValueError, match=r"task.actions: .* are not different names"):
        environment(actions=["a", "A", "b", "c"])
    with pytest.raises(ValueError, match=r"task.params.render_mode: 'human' cannot be set here"):
        environment(params={"render_mode": "human"})


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
    for texts in [
        walk for walk, _ in zip(warmup_examples(task, mistakes=0.0, seed=0), range(3), strict=False)
    ]:
        (sample,), script = play(env, texts[1::2])
        assert sample.reward == 1.0
        assert len(script.prompts) == 6  # the shortest way
        assert env.tokenizer.decode(script.prompts[-1]).replace("<eos>", "") == "".join(texts[:-1])
    random = next(warmup_examples(task, mistakes=0.999, seed=1))
    assert random != next(warmup_examples(task, mistakes=0.999, seed=2))
    assert random == next(warmup_examples(task, mistakes=0.999, seed=1))
    with pytest.raises(UsageError, match="no table of its transitions"):
        next(
            warmup_examples(GymnasiumTask(id="Blackjack-v1", returns=(-1, 1)), mistakes=0.0, seed=0)
        )


def test_plans_account_for_slips():
    """On slipping ice the best first step from the start is into the wall: left is worth most."""
    from onepolicy.envs.warmup.gridworlds import optimal_actions

    best = optimal_actions(TextEnvironment(GymnasiumTask(id="FrozenLake-v1", returns=(0, 1))))
    assert best[0].tolist() == [True, False, False, False]
