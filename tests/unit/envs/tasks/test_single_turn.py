import asyncio
import json

import pytest

from onepolicy.config import ChainTask, GymTask, JsonlTask, UsageError
from onepolicy.envs import make_environment
from onepolicy.envs.multiturn.prompt_checks import check_prompt_length
from onepolicy.envs.multiturn.tokenization import decode_tokens, encode_prompt
from onepolicy.envs.tasks.chain import ALPHABET, solution
from onepolicy.envs.tasks.single_turn import SingleTurn
from onepolicy.envs.warmup.examples import task_alphabet
from onepolicy.interfaces import Problem
from support.scripted_engine import TEMPLATE, make_tokenizer, scripted


def made(task, tokenizer=None):
    return make_environment(task, tokenizer or make_tokenizer(), max_len=512)


def play(environment, problem, text, finish="stop", temperature=1.0, seen=None):
    sample = scripted(environment.tokenizer, text, finish, seen)
    (only,) = asyncio.run(environment.episode(problem, sample, temperature))
    return only


def write(path, rows):
    path.write_text("\n".join(json.dumps({"prompt": p, "answer": a}) for p, a in rows))
    return JsonlTask(path=str(path), held_out=1)


def test_render_without_a_template_is_the_plain_ids():
    tokenizer = make_tokenizer()
    text = "a , b . c 's\n 1"  # decoded, it keeps its spaces
    ids = encode_prompt(tokenizer, text)
    assert ids == [tokenizer.convert_tokens_to_ids(c) for c in text]
    assert decode_tokens(tokenizer, [*ids, tokenizer.eos_token_id]) == text


def test_render_uses_the_chat_template():
    tokenizer = make_tokenizer(template=TEMPLATE)
    ids = encode_prompt(tokenizer, "hi")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<user>", "h", "i", "<eos>", "<bot>"]
    assert all(type(i) is int for i in ids)
    assert decode_tokens(tokenizer, ids) == "hi"


def test_check_length():
    check_prompt_length([1] * 6, 4, 10, Problem(3, "x", "y"))
    message = r"problem 3: its prompt has 7 tokens, which with 4 .* than the 10 that fit"
    with pytest.raises(UsageError, match=message):
        check_prompt_length([1] * 7, 4, 10, Problem(3, "x", "y"))


def test_episode_grades_the_response():
    environment = made(ChainTask(ops=3))
    tokenizer, problem, seen = environment.tokenizer, environment.train_problem(0), []
    worked = solution(problem.prompt)
    right = play(environment, problem, worked, temperature=0.5, seen=seen)
    assert (right.reward, right.temperature) == (1.0, 0.5)
    assert seen == [encode_prompt(tokenizer, problem.prompt)]
    response = [*tokenizer.encode(worked), tokenizer.eos_token_id]
    assert right.tokens.tolist() == [*seen[0], *response]
    assert right.trainable.sum() == 3 * 6 + 2 + 1
    wrong = f"#{(int(problem.answer) + 1) % 10}"
    assert play(environment, problem, wrong).reward == 0.0


def test_a_response_that_did_not_stop_earns_nothing(tmp_path, subtests):
    lines = write(tmp_path / "d.jsonl", [(f"q{i}", "yes") for i in range(3)])
    for task in (ChainTask(ops=2), GymTask(name="gcd"), lines):
        environment = made(task)
        problem = environment.train_problem(0)
        response = solution(problem.prompt) if isinstance(task, ChainTask) else problem.answer
        for finish, reward in (("stop", 1.0), ("length", 0.0), ("aborted", 0.0)):
            with subtests.test(task=task.kind, finish=finish):
                assert play(environment, problem, response, finish).reward == reward


def test_check_passes_where_everything_fits():
    environment = made(ChainTask(ops=12), make_tokenizer(task_alphabet(ChainTask())))
    assert isinstance(environment, SingleTurn)
    environment.check(max_tokens=75, max_len=26 + 75)
    made(GymTask(name="chain_sum")).check(max_tokens=10, max_len=200)


def test_check_finds_what_cannot_be_sampled(tmp_path):
    no_tokens, of_chain = make_tokenizer(template="{{ '' }}"), make_tokenizer(ALPHABET)
    long = write(tmp_path / "d.jsonl", [(f"{i}" * (30 if i == 2 else 5), "y") for i in range(5)])
    made(long).check(max_tokens=10, max_len=40)
    for environment, limits, message in (
        (made(ChainTask(ops=12)), (74, 512), r"has 75 tokens, but 74 .*rollout\.sampling\.max_tok"),
        (made(long), (10, 39), r"problem 3 \(.*d\.jsonl:3\): its prompt has 30 .* the 39 that fit"),
        (made(ChainTask(), no_tokens), (100, 512), "problem 0: the tokenizer makes no tokens of"),
        (made(GymTask(name="gcd"), of_chain), (10, 512), "0: the tokenizer .*would feed <unk>"),
    ):
        with pytest.raises(UsageError, match=message):
            environment.check(max_tokens=limits[0], max_len=limits[1])
