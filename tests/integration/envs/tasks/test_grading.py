import gc
import resource
import subprocess
import sys
import threading
from itertools import product

import pytest

from onepolicy.bounded import Limits, StoppedError
from onepolicy.config import GymTask
from onepolicy.envs.tasks import math_grader, reasoning_gym
from onepolicy.envs.tasks.math_grader import MathGrader
from onepolicy.envs.tasks.math_verify_worker import MEMORY_BYTES
from onepolicy.envs.tasks.reasoning_gym import safe_to_evaluate
from onepolicy.envs.tasks.single_turn import extract_answer, grade_exact
from support.waiting import LIMIT_S, patience


def test_answer_text():
    for response, prefix, answer in [
        (" 42\n", "", "42"),
        ("so #### 42", "####", "42"),
        ("#### 41 no, #### 42 ", "####", "42"),
        ("42", "####", None),
        ("####", "####", ""),
    ]:
        assert extract_answer(response, prefix) == answer, response


def test_exact():
    assert grade_exact("the answer is #7", "7", "#") == 1.0
    assert grade_exact("7", "7") == 1.0
    assert grade_exact("7 ", " 7") == 1.0
    for response in ("#8", "#77", "#7.", "7", ""):
        assert grade_exact(response, "7", "#") == 0.0
    assert grade_exact("the answer is 7", "7") == 0.0


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(timeout=LIMIT_S)
    yield grader
    grader.close()


MATH = [
    ("so it is \\boxed{\\frac{2}{4}}", "0.5", 1.0),
    ("The answer is 1/2.", "\\frac{1}{2}", 1.0),
    ("$2\\sqrt{3}$", "2\\sqrt{3}", 1.0),
    ("2\\sqrt{3}", "2\\sqrt{3}", 1.0),
    ("\\boxed{1+x^2}", "x^2+1", 1.0),
    ("1000", "1,000", 1.0),
    ("0.00001", "1e-05", 1.0),
    ("$10^{-5}$", "1e-05", 1.0),
    ("$e-5$", "1e-05", 0.0),
    ("\\boxed{1e16}", "10000000000000000", 1.0),
    ("No", "no", 0.0),
    ("on", "No", 0.0),
    ("silent", "listen", 0.0),
    ("\\boxed{\\infty}", "infinity", 1.0),
    ("\\boxed{3}", "infinity", 0.0),
    ("\\boxed{Listen}", "listen", 1.0),
    ("2018", "2024-01-05", 0.0),
    ("$ba$", "ab", 1.0),
    ("42, or rather 43", "42", 0.0),
    ("-7", "7", 0.0),
    ("$2$", "2\\sqrt{3}", 0.0),
    ("", "7", 0.0),
    ("I do not know", "7", 0.0),
    ("\\boxed{\\frac{", "7", 0.0),
    ("}{$\\left(", "7", 0.0),
    ("\x00\ud7ff", "7", 0.0),
]
RELATIONS = [  # a relation is not its number
    *((response, "5", 0.0) for response in ("\\ne 5", "≠ 5", "> 5", "\\le 5", "x \\ne 5", "4=5")),
    *((response, "5", 0.0) for response in ("x=4=5", "$4=5$", "\\boxed{\\geq 5}")),
    ("\\neq 5", "x=5", 0.0),
    *((response, "5", 1.0) for response in ("x=5", "2+3=5", "= 5")),
    ("1/3=0.33", "0.33", 1.0),  # rounded, as people write it
    ("$\\approx 3.14$", "3.14", 1.0),
    ("x \\neq 5", "x \\ne 5", 1.0),
    ("x > 5", "5 < x", 1.0),
]


@pytest.mark.process
def test_math(grader, subtests):
    both = product(RELATIONS, ("", "Answer:"))
    for (response, answer, reward), prefix in [*((row, "") for row in MATH), *both]:
        with subtests.test(response=response, answer=answer, prefix=prefix):
            assert grader.grade(prefix + response, answer, prefix) == reward


@pytest.mark.process
def test_math_takes_the_text_after_the_prefix_as_an_expression(grader):
    assert grader.grade("2 and 3: #### \\frac{2}{4}", "\\frac12", "####") == 1.0
    assert grader.grade("#### \\frac{2}{4} and then 9", "9", "####") == 0.0
    assert grader.grade("\\frac{2}{4}", "\\frac12", "####") == 0.0


@pytest.mark.process
def test_math_works_in_a_thread(grader):
    got = []
    thread = threading.Thread(target=lambda: got.append(grader.grade("\\boxed{4}", "2+2")))
    thread.start()
    thread.join()
    assert got == [1.0]


@pytest.mark.process
def test_an_endless_computation_earns_nothing_and_grading_continues(grader, monkeypatch):
    assert grader.grade("\\boxed{3}", "6/2") == 1.0
    first = grader._process
    with monkeypatch.context() as patch:
        patch.setattr(grader, "timeout", 0.3)
        assert grader.grade("$10^{10^{10}}$", "12") == 0.0
    assert first.poll() is not None, "the stuck process was killed"
    assert grader.grade("\\boxed{3}", "6/2") == 1.0


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the worker reads /proc")
def test_the_worker_has_a_memory_limit(grader):
    r"""(1+i)^{10^8} took 1.6 GB in its 5 s."""
    assert grader.grade("\\boxed{3}", "6/2") == 1.0
    soft, hard = resource.prlimit(grader._process.pid, resource.RLIMIT_AS)
    assert MEMORY_BYTES < soft == hard < MEMORY_BYTES + 2**30


@pytest.mark.process
def test_a_worker_that_died_is_replaced(grader):
    grader.grade("\\boxed{3}", "6/2")
    grader._process.kill()
    grader._process.wait()
    assert grader.grade("\\boxed{3}", "6/2") == 1.0


@pytest.mark.process
def test_the_worker_ends_with_its_grader():
    grader = MathGrader()
    grader.grade("\\boxed{3}", "6/2")
    process: subprocess.Popen = grader._process
    del grader
    gc.collect()
    assert process.poll() is not None


@pytest.mark.process
def test_readable(grader):
    assert grader.can_parse_answer("\\frac12")
    assert not grader.can_parse_answer("\\$5 and more")


HARMLESS = ["(8-5)*(4+4)", "x**2/2 + sin(x) + C", "[['Q', '_'], ['_', 'Q']]", "_ Q\nQ _", "1 2 3"]
HARMLESS += ["-3", "(x**2+1)**3", "", "A", "3*E**(2*x+5)+C", "E**(x**2+3*x)", "x*ln(x)-x+C"]
HARMFUL = ["__import__('os').system('true')", "().__class__", "oracle_answer", "entry['answer']"]
HARMFUL += [
    "[x for x in [1]]",
    "lambda: 1",
    "9**9**9",
    "2**99999",
    "((9**64)**64)**64",
    "99999999!",
]
HARMFUL += ["[0]*99999999999", "'a'*99999999999", "1<<99999999999", "01+open('x')", "x.y"]
HARMFUL += ["factorial(10**9)", "99999999!", "[" + "1," * 10**6 + "]"]


def test_what_is_safe_to_evaluate():
    assert [answer for answer in HARMLESS if not safe_to_evaluate(answer)] == []
    assert [answer for answer in HARMFUL if safe_to_evaluate(answer)] == []


@pytest.mark.process
def test_an_expression_that_passes_the_filter_ends_its_child_only(monkeypatch):
    """sympy reduces the angle with e^60 digits."""
    monkeypatch.setattr(reasoning_gym, "GRADING", Limits(2**28, patience(1)))
    task = reasoning_gym.ReasoningGym(GymTask(name="countdown"))
    problem = task.train_problem(0)
    assert safe_to_evaluate("sin(exp(exp(60)))")
    assert task.grade(problem, "sin(exp(exp(60)))") == 0.0
    assert task.take_metrics() == {"rollout/grader_timeouts": 1.0}
    assert task.grade(problem, f"({problem.answer})") == 1.0
    assert task.take_metrics() == {}


@pytest.mark.process
def test_a_response_that_asks_for_endless_work_ends_its_child_only(monkeypatch, subtests):
    monkeypatch.setattr(reasoning_gym, "GRADING", Limits(2**28, patience(3)))
    for name, costly, other in (
        ("coin_flip", "1e9999999999", "{}0"),
        ("propositional_logic", "∧".join("abcdefghijklmnopqrstuvwxyz"), "P"),
        ("rush_hour", " ".join(f"{car}+1111111111111" for car in "ABCDEFGH"), "A+0"),
    ):
        with subtests.test(name=name):
            task = reasoning_gym.ReasoningGym(GymTask(name=name))
            problem = task.train_problem(0)
            assert task.grade(problem, costly) == 0.0
            assert task.take_metrics() == {"rollout/grader_timeouts": 1.0}
            other = other.format(problem.answer)
            score = task._dataset("train", 0).score_answer(other, problem.entry)
            assert task.grade(problem, other) == score


def test_a_step_waits_for_few_endless_expressions(monkeypatch):
    asked = []

    def stop(*question):
        asked.append(question)
        raise StoppedError("took longer")

    monkeypatch.setattr("onepolicy.bounded.ask", stop)
    task = reasoning_gym.ReasoningGym(GymTask(name="countdown"))
    problem = task.train_problem(0)
    assert [task.grade(problem, "1+1") for _ in range(20)] == [0.0] * 20
    assert len(asked) == 8
    assert task.take_metrics() == {"rollout/grader_timeouts": 8, "rollout/grader_skipped": 12}


@pytest.fixture
def hopeless(monkeypatch):
    """Return a grader whose worker reads no response in time, and its questions."""
    asked = []
    monkeypatch.setattr(MathGrader, "_query_worker", lambda self, question: asked.append(question))
    return MathGrader(), asked


def test_a_step_waits_for_a_bounded_number_of_endless_responses(hopeless, caplog):
    grader, asked = hopeless
    for _ in range(2):
        assert [grader.grade(f"9^{{9^{n}}}", "7") for n in range(512)] == [0.0] * 512
        assert len(asked) == math_grader.MAX_TIMEOUTS
        assert grader.grade("7", "7") == 1.0  # the reference itself needs no reading
        assert grader.take_metrics() == {
            "rollout/grader_timeouts": math_grader.MAX_TIMEOUTS,
            "rollout/grader_skipped": 512 - math_grader.MAX_TIMEOUTS,
        }
        assert grader.take_metrics() == {}
        said = [each.message for each in caplog.records if "earn 0 unread" in each.message]
        assert said == [
            f"{math_grader.MAX_TIMEOUTS} responses of this step took the math grader longer than "
            "5 s each; the other responses earn 0 unread unless they are the reference itself "
            "(rollout/grader_skipped counts them)"
        ]
        asked.clear()
        caplog.clear()
