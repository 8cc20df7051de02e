from itertools import islice

import pytest

from onepolicy.config import GymTask, UsageError
from onepolicy.envs.tasks import reasoning_gym
from onepolicy.envs.tasks.reasoning_gym import ReasoningGym, extract_tagged_answer
from onepolicy.envs.tasks.seeding import hash_key, seeded_rng, split_of_text
from onepolicy.envs.warmup.examples import task_alphabet, warmup_examples
from onepolicy.errors import LIBRARY_ERRORS

SMALL = GymTask(
    name="chain_sum", params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
)


def warmup(task, count, mistakes=0.0, seed=0):
    return list(islice(warmup_examples(task, mistakes=mistakes, seed=seed), count))


REFUSED = [  # data set, params, words
    ("chain_sums", {}, r"name: .*no single data set 'chain_sums'; did you mean chain_sum"),
    ("zzzzzzzz", {}, r"name: .*'zzzzzzzz'; it has ab, acre"),
    ("composite", {}, r"name: .*no single data set 'composite'"),
    ("game_of_life_halting", {}, r"name: .*grader of game_of_life_halting gives 1 to any"),
    (
        "gcd",
        {"max_valeu": 9},
        r"params\.max_valeu: gcd has no such .* 9\); it has max_numbers, max_value, min_n",
    ),
    ("gcd", {"seed": 3}, r"params\.seed: 3 cannot be set here; use task\.seed"),
    ("gcd", {"size": 9}, r"params\.size: 9 cannot be set here; leave it out"),
    (
        "gcd",
        {"min_value": 9, "max_value": 3},
        r"params: .*refuses .*'max_value': 3.* for gcd: max_value must be > min_value",
    ),
    ("gcd", {"max_value": "many"}, r"params: .*'many'.*not supported between"),
]


def test_bad_settings_are_named(subtests, monkeypatch):
    for name, params, words in REFUSED:
        task, message = GymTask(name=name, params=params), rf"task\.{words}"
        with subtests.test(task=task), pytest.raises(UsageError, match=message):
            ReasoningGym(task)
    monkeypatch.setattr(reasoning_gym, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install onepolicy\[envs\]"):
        ReasoningGym(GymTask(name="gcd"))


def test_set_ordered_data_sets_need_a_fixed_hash_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UsageError, match=r"ransom_note depend on .*PYTHONHASHSEED=0"):
        ReasoningGym(GymTask(name="ransom_note"))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    ReasoningGym(GymTask(name="ransom_note"))


def test_problem_depends_on_seed_and_index_alone():
    forward = [ReasoningGym(GymTask(name="gcd")).train_problem(i) for i in range(5)]
    task = ReasoningGym(GymTask(name="gcd"))
    far = task.train_problem(10**6)  # another generator
    task.held_out(10)
    assert [task.train_problem(i) for i in reversed(range(5))] == forward[::-1]
    assert task.train_problem(10**6) == far
    assert [p.id for p in forward] == [0, 1, 2, 3, 4]
    other = [ReasoningGym(GymTask(name="gcd", seed=1)).train_problem(i).prompt for i in range(5)]
    assert other != [p.prompt for p in forward]


def test_seeds_are_the_same_in_every_process():
    """The seeds are pinned: Python's own hash() would give others each time, and a change here
    silently changes every run."""
    assert hash_key("gym", 0, "train", 0) == 73678899209691289107030436499602240076
    assert seeded_rng("gym", 0).integers(1000, size=4).tolist() == [889, 669, 607, 6]


def test_train_and_held_out_never_meet():
    """200 questions exist, and both sides are drawn many times over."""
    task = ReasoningGym(SMALL)
    train = {task.train_problem(i).prompt for i in range(2000)}
    held_out = [p.prompt for p in task.held_out(30)]
    warm = {prompt for prompt, _ in warmup(SMALL, 500, seed=3)}
    assert len(set(held_out)) == 30
    assert not set(held_out) & (train | warm)
    assert len(train) > 100
    assert {split_of_text(p) for p in held_out} == {"held_out"}


def test_held_out_is_a_prefix_of_a_longer_one_and_has_an_end():
    task = ReasoningGym(SMALL)
    assert task.held_out(5) == ReasoningGym(SMALL).held_out(20)[:5]
    assert [p.id for p in task.held_out(3)] == [-1, -2, -3]
    with pytest.raises(UsageError, match=r"eval\.problems: 500 .* chain_sum .* gave only \d+ diff"):
        task.held_out(500)


def test_too_few_questions_to_train_on(monkeypatch):
    monkeypatch.setattr(reasoning_gym, "split_of_text", lambda question: "held_out")
    with pytest.raises(UsageError, match=r"task\.params: chain_sum .* too few different questions"):
        ReasoningGym(SMALL).train_problem(0)


def test_extract():
    for response, answer in (
        (" 12 \n", "12"),
        ("I think <answer>3</answer> no <answer> 12 </answer> done", "12"),
        ("<answer>12", "12"),
        ("", ""),
    ):
        assert extract_tagged_answer(response) == answer


def test_grade_is_the_library_s():
    task = ReasoningGym(SMALL)
    asked = task.train_problem(0)
    right = int(asked.answer)
    assert task.grade(asked, f"{right}") == 1.0
    assert task.grade(asked, f"<answer>{right}.0</answer>") == 1.0
    assert task.grade(asked, "99") == 0.0
    assert task.grade(asked, "") == 0.0
    assert task.grade(asked, f"= {right}") == pytest.approx(len(str(right)) / len(f"= {right}"))


def test_a_response_that_breaks_the_library_earns_nothing(subtests):
    from reasoning_gym import get_score_answer_fn  # seconds, in whichever worker runs this

    for name, response in (
        ("game_of_life", "[{}]"),
        ("boxnet", "0"),
        ("boxnet", '{"action": 3}'),
    ):
        with subtests.test(name=name, response=response):
            task = ReasoningGym(GymTask(name=name))
            asked = task.train_problem(0)
            with pytest.raises(LIBRARY_ERRORS):
                get_score_answer_fn(name)(response, asked.entry)
            assert task.grade(asked, response) == 0.0


def test_a_number_that_equals_every_other_earns_nothing(subtests):
    for name in ("complex_arithmetic", "number_sorting"):
        with subtests.test(name=name):
            task = ReasoningGym(GymTask(name=name))
            asked = task.train_problem(0)
            response = "NaN"
            if asked.answer.startswith("["):
                response = f"[{', '.join(['NaN'] * len(asked.answer.split(',')))}]"
            assert task._dataset("train", 0).score_answer(response, asked.entry) == 1.0
            assert task.grade(asked, response) == 0.0


def test_evaluated_responses_pass_the_gate(tmp_path):
    task = ReasoningGym(GymTask(name="countdown"))
    asked = task.train_problem(0)
    assert task.grade(asked, asked.answer) == 1.0
    assert task.grade(asked, "99999999!") == 0.0
    for name in reasoning_gym.EVALUATING_GRADERS - reasoning_gym.HASH_ORDERED:
        task = ReasoningGym(GymTask(name=name))
        problems = [task.train_problem(i) for i in range(3)]
        assert all(task.grade(p, p.answer) == 1.0 for p in problems)
        assert task.grade(problems[0], f"open({str(tmp_path / 'made')!r}, 'w')") == 0.0
    assert not (tmp_path / "made").exists()


def test_warmup_examples():
    def right(prompt, response):
        return eval(prompt.split(": ")[1].rstrip("= ")) == int(response)

    pairs = warmup(SMALL, 50)
    assert pairs == warmup(SMALL, 50)
    assert pairs != warmup(SMALL, 50, seed=1)
    assert all(right(*pair) for pair in pairs)
    wrong = sum(not right(*pair) for pair in warmup(SMALL, 200, mistakes=0.5))
    assert 60 < wrong < 120  # 100, less the few that are right by chance
    with pytest.raises(UsageError, match="propositional_logic gives no reference answers"):
        warmup(GymTask(name="propositional_logic"), 1)


def test_the_alphabet_has_the_data_sets_characters():
    assert "\u00d7" in task_alphabet(GymTask(name="prime_factorization"))
    assert len(task_alphabet(GymTask(name="gcd"))) == 96
