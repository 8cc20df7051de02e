from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.config import ChainTask
from onepolicy.envs.tasks.chain import ALPHABET, Chain, make_problem, solution
from onepolicy.envs.tasks.seeding import seeded_rng, split_of_text
from onepolicy.envs.warmup.examples import corrupted_solution, task_alphabet, warmup_examples


def warmup(task, count, mistakes=0.0, seed=0):
    return list(islice(warmup_examples(task, mistakes=mistakes, seed=seed), count))


def test_left_to_right_mod_ten():
    for prompt, worked in (
        ("7*3+5-9=", "7*3=1;1+5=6;6-9=7;#7"),  # 21 -> 1, 6, -3 -> 7
        ("1+2*3=", "1+2=3;3*3=9;#9"),  # left to right: 9, not 7
        ("0-1=", "0-1=9;#9"),
        ("9+9=", "9+9=8;#8"),
    ):
        assert solution(prompt) == worked


@given(st.integers(0, 10**9), st.integers(1, 20), st.integers(0, 2**63 - 1))
def test_a_problem_is_well_formed_and_its_solution_right(index, ops, seed):
    asked = make_problem(ChainTask(ops=ops, seed=seed), index, "train")
    assert len(asked.prompt) == 2 * ops + 2
    worked = solution(asked.prompt)
    assert len(worked) == 6 * ops + 2
    assert set(asked.prompt + worked) <= set(ALPHABET)
    nested = asked.prompt[0]
    for i in range(1, 2 * ops, 2):
        nested = f"({nested}{asked.prompt[i : i + 2]})"
    assert int(asked.answer) == eval(nested) % 10
    assert worked.endswith(f"#{asked.answer}")


def test_a_problem_depends_only_on_seed_split_and_index():
    forward = [Chain(ChainTask()).train_problem(i) for i in range(20)]
    task = Chain(ChainTask())
    task.held_out(7)
    assert [task.train_problem(i) for i in reversed(range(20))] == forward[::-1]
    assert forward[0].prompt != Chain(ChainTask(seed=1)).train_problem(0).prompt
    assert len({p.prompt for p in forward}) == 20
    assert [p.id for p in task.held_out(3)] == [-1, -2, -3]
    assert task.train_problem(0).id == 0


def test_these_are_the_problems_of_seed_0():
    """The problems are pinned, because a change here silently changes every run."""
    assert make_problem(ChainTask(), 0, "train").prompt == "1-9*6*5*0+8-3*8-6+9-9+4-4="


def test_train_and_held_out_never_meet():
    for task in (ChainTask(ops=1), ChainTask(ops=2), ChainTask(seed=3)):
        train = {make_problem(task, i, "train").prompt for i in range(600)}
        held_out = {p.prompt for p in Chain(task).held_out(150)}
        warm = {prompt for prompt, _ in warmup(task, 600, mistakes=0.1)}
        assert train
        assert held_out
        assert not held_out & (train | warm)
        assert {split_of_text(p) for p in held_out} == {"held_out"}
        assert {split_of_text(p) for p in train | warm} == {"train"}


def test_held_out_is_about_a_quarter():
    every = [f"{a}{o}{b}=" for a in range(10) for o in "+-*" for b in range(10)]
    assert 50 < sum(split_of_text(p) == "held_out" for p in every) < 100


def test_mistakes_are_carried_on():
    class Planted:
        """A generator that replaces the second of three steps by 5."""

        def random(self, count):
            return np.array([0.9, 0.0, 0.9])

        def integers(self, high, size):
            return np.array([1, 5, 1])

    assert corrupted_solution("7*3+5-9=", Planted(), 0.5) == "7*3=1;1+5=5;5-9=6;#6"


def test_mistake_rate(subtests):
    for rate in (0.0, 0.07, 1.0):
        with subtests.test(rate=rate):
            wrong = steps = 0
            for i in range(400):
                prompt = make_problem(ChainTask(ops=12), i, "train").prompt
                worked = corrupted_solution(prompt, seeded_rng("test", i), rate)
                for step in worked.split(";")[:-1]:
                    question, result = step.split("=")
                    wrong += eval(question) % 10 != int(result)
                    steps += 1
            assert steps == 4800
            assert wrong / steps == pytest.approx(0.9 * rate, abs=0.02)


def test_warmup_examples_cover_all_lengths_and_repeat_exactly():
    task = ChainTask(ops=5)
    first = warmup(task, 200, seed=1)
    assert first == warmup(task, 200, seed=1)
    assert first != warmup(task, 200, seed=2)
    assert {(len(prompt) - 2) // 2 for prompt, _ in first} == {2, 3, 4, 5}
    assert all(response == solution(prompt) for prompt, response in first)
    assert {len(prompt) for prompt, _ in warmup(ChainTask(ops=1), 5)} == {4}


def test_grade():
    task = Chain(ChainTask())
    asked = make_problem(ChainTask(ops=2), 4, "train")
    right = solution(asked.prompt)
    wrong = str((int(asked.answer) + 1) % 10)
    assert task.grade(asked, right) == 1.0
    assert task.grade(asked, f"#{asked.answer}") == 1.0
    assert task.grade(asked, f"#{wrong}#{asked.answer}") == 1.0  # the last one counts
    twice, unmarked = f"#{asked.answer}{asked.answer}", right.replace("#", ";")
    for bad in (f"#{wrong}", twice, asked.answer, "", "#", unmarked):
        assert task.grade(asked, bad) == 0.0


def test_alphabet():
    assert task_alphabet(ChainTask()) == "".join(sorted(ALPHABET))
    assert len(ALPHABET) == 16
