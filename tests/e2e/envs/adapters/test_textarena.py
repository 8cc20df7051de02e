"""Games of textarena for one player, played by a scripted engine."""

from __future__ import annotations

import random

import numpy as np
import pytest

from onepolicy.config import TextArenaTask, UsageError
from onepolicy.envs import make_environment
from onepolicy.envs.adapters.textarena import GlobalRandomState
from onepolicy.envs.warmup.examples import warmup_examples
from support.scripted_engine import play, sampled, tokenizer_of

pytestmark = pytest.mark.envs
USER = (
    "{% for m in messages %}{{ '<bot>' if m['role'] == 'assistant' else '<user>' }}"
    "{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def environment(game="GuessTheNumber-v0", template=None, **settings):
    task = TextArenaTask(game=game, **settings)
    return make_environment(task, tokenizer_of(template), max_len=6000)


def number_of(env, problem):
    """Return the secret of a game of GuessTheNumber."""
    from onepolicy.envs.adapters.textarena import TextArenaGame

    match = TextArenaGame(env.config)
    match.reset(problem.entry["seed"])
    return match.env.game_number


@pytest.mark.parametrize("template", [None, USER])
def test_a_game_is_won_and_every_token_is_as_sampled(template):
    env = environment(template=template)
    problem = env.train_problem(0)
    secret = number_of(env, problem)
    wrong = 1 if secret > 1 else 2
    turns = [f"<think>[{secret}]</think>Is it [{wrong}]?", "I pass", f"[{secret}]"]
    (sample,), script = play(env, turns, problem)
    assert (sample.reward, sample.finish, sample.events) == (1.0, "stop", ("move",) * 3)
    ids = sampled(env, *turns)
    assert sample.tokens[1:][sample.trainable].tolist() == [token for turn in ids for token in turn]
    assert sample.tokens.tolist() == script.prompts[2] + ids[2]
    first, second = script.prompts[:2]
    between = env.tokenizer.decode(second[len(first) + len(ids[0]) :])
    hint = f"The target number is {'higher' if secret > wrong else 'lower'}."
    shown = {None: f"\n{hint}\n", USER: f"<user>{hint}<eos><bot>"}
    assert between == shown[template]  # not the moves once more
    assert "You are playing Guess The Number" in env.tokenizer.decode(first)
    assert "invalid move" in env.tokenizer.decode(script.prompts[2])


def test_results_are_scaled_and_an_unfinished_game_earns_nothing():
    env = environment(returns=(0.5, 1.0))
    problem = env.train_problem(0)
    secret = number_of(env, problem)
    near = secret - 1 if secret > 1 else secret + 1
    (lost,), _ = play(env, [f"[{near}]", "pass", "pass"], problem)  # two invalid moves end it
    share = 1 - 1 / 19
    assert (lost.reward, lost.finish) == (pytest.approx((share - 0.5) / 0.5), "stop")
    (cut,), _ = play(environment(max_turns=2), [f"[{near}]", "pass"], problem)
    assert (cut.reward, cut.finish) == (0.0, "turns")
    (cut,), _ = play(env, [f"[{secret}]"], problem, finish="length")
    assert (cut.reward, cut.finish) == (0.0, "length")


@pytest.mark.parametrize(
    ("game", "moves"),
    [
        ("Mastermind-v0", ["[1 2 3 4]", "[2 3 4 5]", "x", "x"]),
        ("Blackjack-v0", ["[stand]"] * 5),
        ("Minesweeper-v0-small", ["[2 2]", "[0 0]", "x", "x"]),
    ],
)
def test_the_same_problem_is_the_same_game(game, moves):
    """Blackjack draws its cards and Minesweeper its mines in the middle of the game, from the
    process's random numbers. Other draws in between change neither."""
    env = environment(game)
    games, outer = [], []
    for index in (0, 1, 0, 2, 3, 4):
        random.seed(5)
        before = random.random()
        (sample,), _ = play(env, moves, env.train_problem(index))
        outer.append((before, random.random()))
        games.append(sample.tokens.tolist())
    assert games[0] == games[2]
    assert len({tuple(game) for game in games}) > 1
    assert len(set(outer)) == 1  # the game took none of ours


def test_global_random_numbers_continue_after_a_game():
    one, other = GlobalRandomState(3), GlobalRandomState(3)
    with one.installed():
        first = [random.random(), np.random.random()]
    with one.installed():
        second = [random.random(), np.random.random()]
    with other.installed():
        drawn = [random.random(), np.random.random(), random.random(), np.random.random()]
    assert drawn == first + second


def test_unplayable_environments_are_refused():
    for game, message in (
        ("GuessTheNumbers-v0", r"no game 'GuessTheNumbers-v0'; did you mean GuessTheNumber-v0"),
        ("Chopsticks-v0", r"task.game: Chopsticks-v0 .*cannot be played by one player here"),
        ("SpiteAndMalice-v0", r"task.game: SpiteAndMalice-v0 is for several players"),
        ("Countdown-v0", r"could not convert string"),  # its score of a wrong move is a text
        ("TwentyQuestions-v0", r"OpenRouter API key not found"),
    ):
        with pytest.raises(UsageError, match=message):
            environment(game)
    with pytest.raises(UsageError, match=r"cannot be played .* keyword argument 'largest'"):
        environment(params={"largest": 9})
    with pytest.raises(UsageError, match="no worked episodes"):
        next(warmup_examples(TextArenaTask(game="GuessTheNumber-v0"), mistakes=0, seed=0))
    short = "{% if loop.index > 2 %}{{ raise_exception('no third message') }}{% endif %}"
    with pytest.raises(UsageError, match=r"roles user, assistant, user: TemplateError: no third"):
        environment(template=USER.replace("{% endfor %}", short + "{% endfor %}"))
