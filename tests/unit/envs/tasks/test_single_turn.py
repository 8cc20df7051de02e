import asyncio
import json

import pytest

from onepolicy.config import ChainTask, GymTask, JsonlTask, UsageError
from onepolicy.envs import make_environment
from onepolicy.envs.multiturn.tokenization import check_prompt_length, decode_tokens, encode_prompt
from onepolicy.envs.tasks.chain import solution
from onepolicy.envs.tasks.single_turn import SingleTurn
from onepolicy.envs.warmup.examples import task_alphabet
from onepolicy.interfaces import Environment, Problem
from support.scripted_engine import TEMPLATE, make_tokenizer, scripted


def play(environment, problem, sample, temperature=1.0):
    (only,) = asyncio.run(environment.episode(problem, sample, temperature))
    return only


def test_render_without_a_template_is_the_plain_ids():
    tokenizer = make_tokenizer()
    ids = encode_prompt(tokenizer, "1+2=")
    assert ids == [tokenizer.convert_tokens_to_ids(c) for c in "1+2="]
    assert decode_tokens(tokenizer, ids) == "1+2="


def test_render_uses_the_chat_template():
    tokenizer = make_tokenizer(template=TEMPLATE)
    ids = encode_prompt(tokenizer, "hi")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<user>", "h", "i", "<eos>", "<bot>"]
    assert all(type(i) is int for i in ids)
    assert decode_tokens(tokenizer, ids) == "hi"


def test_decode_keeps_spaces_and_drops_special_tokens():
    tokenizer = make_tokenizer()
    text = "a , b . c 's\n 1"
    assert decode_tokens(tokenizer, [*tokenizer.encode(text), tokenizer.eos_token_id]) == text


def test_check_length():
    check_prompt_length([1] * 6, 4, 10, Problem(3, "x", "y"))
    with pytest.raises(
        UsageError,
        match=r"problem 3: its prompt has 7 tokens, which with 4 .* than the 10 that fit",
    ):
        check_prompt_length([1] * 7, 4, 10, Problem(3, "x", "y"))
    with pytest.raises(UsageError, match=r"problem 3 \(d\.jsonl:9\): its prompt"):
        check_prompt_length([1] * 7, 4, 10, Problem(3, "x", "y", {"source": "d.jsonl:9"}))


def test_episode_grades_the_response():
    tokenizer = make_tokenizer()
    environment = make_environment(ChainTask(ops=3), tokenizer, max_len=512)
    problem = environment.train_problem(0)
    seen = []
    right = play(
        environment, problem, scripted(tokenizer, solution(problem.prompt), seen=seen), 0.5
    )
    assert right.reward == 1.0
    assert right.temperature == 0.5
    assert right.tokens.tolist() == [
        *seen[0],
        *tokenizer.encode(solution(problem.prompt)),
        tokenizer.eos_token_id,
    ]
    assert seen == [encode_prompt(tokenizer, problem.prompt)]
    assert right.trainable.sum() == 3 * 6 + 2 + 1
    wrong = f"#{(int(problem.answer) + 1) % 10}"
    assert play(environment, problem, scripted(tokenizer, wrong)).reward == 0.0


@pytest.mark.parametrize("finish", ["length", "aborted"])
def test_a_response_that_did_not_stop_earns_nothing(finish, tmp_path):
    tokenizer = make_tokenizer()
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"q{i}", "answer": "yes"}) for i in range(3)))
    for task in (ChainTask(ops=2), GymTask(name="gcd"), JsonlTask(path=str(path), held_out=1)):
        environment = make_environment(task, tokenizer, max_len=512)
        problem = environment.train_problem(0)
        response = solution(problem.prompt) if isinstance(task, ChainTask) else problem.answer
        assert play(environment, problem, scripted(tokenizer, response)).reward == 1.0
        assert play(environment, problem, scripted(tokenizer, response, finish)).reward == 0.0


def test_environment_is_one():
    environment: Environment = make_environment(ChainTask(), make_tokenizer(), max_len=512)
    assert isinstance(environment, SingleTurn)
    assert environment.held_out(2)[1].id == -2


def test_check_passes_where_everything_fits():
    tokenizer = make_tokenizer(task_alphabet(ChainTask()))
    make_environment(ChainTask(ops=12), tokenizer, max_len=512).check(
        max_tokens=75, max_len=26 + 75
    )
    make_environment(GymTask(name="chain_sum"), make_tokenizer(), max_len=512).check(
        max_tokens=10, max_len=200
    )


def test_check_finds_a_max_tokens_too_small_for_any_right_response():
    environment = make_environment(ChainTask(ops=12), make_tokenizer(), max_len=512)
    with pytest.raises(
        UsageError, match=r"has 75 tokens, but 74 are sampled .*raise rollout\.sampling\.max_tokens"
    ):
        environment.check(max_tokens=74, max_len=512)


def test_check_finds_a_prompt_that_does_not_fit(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"prompt": f"{i}" * (30 if i == 2 else 5), "answer": "y"}) for i in range(5)
        )
    )
    environment = make_environment(
        JsonlTask(path=str(path), held_out=1), make_tokenizer(), max_len=512
    )
    environment.check(max_tokens=10, max_len=40)
    with pytest.raises(
        UsageError,
        match=r"problem 3 \(.*d\.jsonl:3\): its prompt has 30 tokens.* than the 39 that fit",
    ):
        environment.check(max_tokens=10, max_len=39)


def test_check_finds_a_prompt_without_tokens():
    tokenizer = make_tokenizer(template="{{ '' }}")
    with pytest.raises(
        UsageError, match=r"problem 0: the tokenizer makes no tokens of '.*fix the prompt"
    ):
        make_environment(ChainTask(), tokenizer, max_len=512).check(max_tokens=100, max_len=512)


def test_check_finds_a_tokenizer_of_another_task():
    tokenizer = make_tokenizer(task_alphabet(ChainTask()))
    with pytest.raises(
        UsageError, match=r"problem 0: the tokenizer does not know all of 'Find .*would feed <unk>"
    ):
        make_environment(GymTask(name="gcd"), tokenizer, max_len=512).check(
            max_tokens=10, max_len=512
        )
