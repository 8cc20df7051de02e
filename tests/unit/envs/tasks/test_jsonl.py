import json
import tomllib
from itertools import islice
from pathlib import Path

import pytest

from onepolicy.config import JsonlTask, UsageError, resolve
from onepolicy.config.problems import read_rows
from onepolicy.envs.tasks.jsonl import Jsonl
from onepolicy.envs.warmup.examples import task_alphabet, warmup_examples
from support.paths import ROOT

GOOD = '{"prompt": "1+1", "answer": "2"}'


def write(path, count, start=0):
    rows = [{"prompt": f"q{i}", "answer": f"a{i}", "level": 3} for i in range(start, start + count)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


def problems(tmp_path, count, **settings):
    return Jsonl(JsonlTask(path=write(tmp_path / "data.jsonl", count), **settings))


def field(name, value):
    return json.dumps({"prompt": "x", "answer": "2"} | {name: value})


BAD_LINES = [
    ('{"prompt": "x"', r"not JSON \(.* at column 15\).*every line is one JSON object"),
    ("", "not JSON"),
    ("[1, 2]", r"'\[1, 2\]' is not an object; write"),
    ('{"answer": "2"}', r"field 'prompt' is missing \(the line has 'answer'\); add it"),
    ('{"prompt": "x", "Answer": "2"}', r"field 'answer' is missing \(.* 'prompt', 'Ans"),
    ("{}", r"field 'prompt' is missing \(the line has nothing\)"),
    (field("prompt", 42), "field 'prompt' is int 42, not a string; put it in quotes"),
    (field("prompt", 4.5), r"field 'prompt' is float 4\.5, not a string; put it"),
    (field("answer", True), "field 'answer' is bool True, not a string or a number"),
    (field("answer", None), "field 'answer' is NoneType None, not a string or a num"),
    (field("answer", [7]), r"field 'answer' is list \[7\], not a string or a number"),
    (field("answer", {"a": 7}), "field 'answer' is dict .*, not a string or a number"),
    (field("answer", float("nan")), "field 'answer' is float nan, not a string or a number"),
    (field("prompt", ["x"]), r"field 'prompt' is list \['x'\], not a string"),
    (field("prompt", None), "field 'prompt' is NoneType"),
    (field("prompt", ""), r"field 'prompt' is empty \(''\); fill it in"),
    (field("prompt", " \n"), "field 'prompt' is empty"),
    (field("answer", ""), "field 'answer' is empty"),
    (field("n", 1).replace('"n": 1', '"n": ' + 5000 * "1"), "cannot be read .*digits"),
    ('{"prompt": "x", "answer": ' + 100_000 * "[", "cannot be read .*recursion"),
    (field("prompt", "a\ud800"), "field 'prompt' has '.ud800' at character 1"),
    (field("answer", "\udc00"), "field 'answer' has '.udc00' at character 0"),
    (b'{"prompt": "\xff", "answer": "2"}', "not UTF-8 .*save the file as UTF-8"),
]


def test_bad_line_is_named(tmp_path, subtests):
    path = tmp_path / "data.jsonl"
    for line, message in BAD_LINES:
        with subtests.test(line=line[:40]):
            text = line if isinstance(line, bytes) else line.encode()
            path.write_bytes(b"\n".join([GOOD.encode(), text, GOOD.encode()]))
            with pytest.raises(UsageError, match=rf"data\.jsonl:2: {message}"):
                read_rows(str(path), "task.path")


@pytest.mark.process
def test_a_number_is_an_answer_as_it_is_written(tmp_path, subtests):
    whole = ("7", "-7", "0", "12345678901234567890")
    written = (*whole, "7.0", "0.10", "-2.50", "1e3", "0.1000000000000000000001")
    lines = [f'{{"prompt": "x{n}", "answer": {n}, "level": 1.5}}' for n in written]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([GOOD, *lines]))
    for grader in ("exact", "math"):
        how = {"held_out": len(written), "grader": grader, "answer_prefix": "#"}
        task = Jsonl(JsonlTask(path=str(path), **how))
        for answer, problem in zip(written, task.held_out(len(written)), strict=True):
            with subtests.test(answer=answer, grader=grader):
                assert problem.answer == answer
                assert task.grade(problem, f"so #{answer}") == 1
                assert task.grade(problem, "so #8") == 0


def test_no_file_and_no_lines(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n  \n")
    for name, words in (
        ("nowhere.jsonl", r"nowhere\.jsonl is not a file"),
        (".", "is not a file"),
        ("empty.jsonl", r"empty\.jsonl is empty"),
    ):
        with pytest.raises(UsageError, match=rf"task\.path: .*{words}"):
            Jsonl(JsonlTask(path=str(tmp_path / name)))
    with pytest.raises(UsageError, match=r"task\.held_out_path: .*nowhere"):
        problems(tmp_path, 3, held_out_path="nowhere")


def test_bom_crlf_and_line_separators_inside_strings(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + '{"prompt": "a\u2028b", "answer": "2"}\r\n'.encode() + GOOD.encode()
    )
    assert [p.prompt for p in read_rows(str(path), "task.path")] == ["a\u2028b", "1+1"]


def test_held_out_must_leave_something(tmp_path):
    for lines in (4, 5):
        words = rf"task\.held_out: 5 lines are held out, but .* has {lines}"
        with pytest.raises(UsageError, match=words):
            problems(tmp_path, lines, held_out=5)
    assert problems(tmp_path, 6, held_out=5).train_problem(0).prompt == "q0"


def test_held_out_is_the_end_of_the_file(tmp_path):
    task = problems(tmp_path, 10, held_out=3)
    assert [(p.id, p.prompt) for p in task.held_out(2)] == [(-1, "q7"), (-2, "q8")]
    assert {task.train_problem(i).prompt for i in range(50)} == {f"q{i}" for i in range(7)}
    few = r"eval\.problems: 4 .* 3 lines of .*data\.jsonl are held out \(task\.held_out\); set "
    with pytest.raises(UsageError, match=few + r"eval\.problems=3, or set task\.held_out=4$"):
        task.held_out(4)
    with pytest.raises(UsageError, match=r"eval\.problems=3, or hold out more: .* has 10 lines"):
        task.held_out(10)


def test_held_out_path(tmp_path):
    paths = {"path": write(tmp_path / "a", 4), "held_out_path": write(tmp_path / "b", 3, start=4)}
    task = Jsonl(JsonlTask(**paths))
    assert [p.prompt for p in task.held_out(3)] == ["q4", "q5", "q6"]
    assert {task.train_problem(i).prompt for i in range(4)} == {"q0", "q1", "q2", "q3"}
    few = r"but .*b \(task\.held_out_path\) has 3; set eval\.problems=3, or add lines"
    with pytest.raises(UsageError, match=few):
        task.held_out(4)


def test_prompt_on_both_sides_is_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    other = GOOD.replace("1+1", "2+2")
    path.write_text(f"{other}\n{GOOD}\n{GOOD}\n")
    message = r"'1\+1' \(.*data\.jsonl:3\) is trained on as well \(.*data\.jsonl:2\)"
    with pytest.raises(UsageError, match=message):
        Jsonl(JsonlTask(path=str(path), held_out=1))


def test_epochs_are_permutations_and_any_index_comes_first(tmp_path):
    config = JsonlTask(path=write(tmp_path / "data.jsonl", 12), held_out=2, seed=5)
    task = Jsonl(config)
    epochs = [[task.train_problem(10 * e + i).prompt for i in range(10)] for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(f"q{i}" for i in range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    backwards = Jsonl(config)
    for i in reversed(range(30)):
        assert backwards.train_problem(i) == task.train_problem(i)
    other = Jsonl(config.model_copy(update={"seed": 6}))
    assert [other.train_problem(i).prompt for i in range(10)] != epochs[0]


def test_problem_names_its_line(tmp_path):
    asked = problems(tmp_path, 4, held_out=1).train_problem(9)
    assert asked.id == 9
    assert asked.entry["source"].endswith(f"data.jsonl:{int(asked.prompt[1:]) + 1}")


def test_grade_exact_with_prefix(tmp_path):
    task = problems(tmp_path, 4, held_out=1, answer_prefix="####")
    asked = task.train_problem(0)
    assert task.grade(asked, f"because #### {asked.answer}\n") == 1.0
    assert task.grade(asked, asked.answer) == 0.0
    assert task.reference_response(asked) == f"####{asked.answer}"


def test_an_answer_with_the_prefix_in_it_is_found_before_the_run(tmp_path):
    """What stands after the last prefix is graded, so no response would be right."""
    path = tmp_path / "data.jsonl"
    rows = [("when?", "10"), ("and then?", "10:30"), ("last?", "3")]
    path.write_text("\n".join(json.dumps({"prompt": p, "answer": a}) for p, a in rows))
    task = Jsonl(JsonlTask(path=str(path), held_out=1, answer_prefix=":"))
    with pytest.raises(UsageError, match=r"data\.jsonl:2: answer '10:30' has .*answer_prefix in"):
        list(task.start_up_problems())
    other = Jsonl(JsonlTask(path=str(path), held_out=1, answer_prefix="####"))
    assert len(list(other.start_up_problems())) == 3


@pytest.mark.process
def test_an_unreadable_math_answer_is_found_before_the_run(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [("a", "2"), ("b", "\\$5 and more"), ("c", "3")]
    path.write_text("\n".join(json.dumps({"prompt": p, "answer": a}) for p, a in rows))
    task = Jsonl(JsonlTask(path=str(path), held_out=1, grader="math"))
    with pytest.raises(UsageError, match=r"data\.jsonl:2: math-verify finds no expression"):
        list(task.start_up_problems())


def test_warmup_examples_and_alphabet(tmp_path):
    config = JsonlTask(path=write(tmp_path / "data.jsonl", 8), held_out=2, answer_prefix="=")
    pairs = list(islice(warmup_examples(config, mistakes=0.0, seed=0), 12))
    for once in (pairs[:6], pairs[6:]):  # every problem is asked before one is asked again
        assert {prompt for prompt, _ in once} == {f"q{i}" for i in range(6)}
    assert all(response == f"=a{prompt[1:]}" for prompt, response in pairs)
    wrong = list(islice(warmup_examples(config, mistakes=1.0, seed=0), 30))
    assert any(response != f"=a{prompt[1:]}" for prompt, response in wrong)
    (tmp_path / "data.jsonl").write_text('{"prompt": "é", "answer": "ß"}\n' + GOOD)
    assert set("éßaZ \n") <= set(task_alphabet(config.model_copy(update={"held_out": 1})))


def test_the_page_on_training_has_a_working_example(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    lines, recipe = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("json", "toml"))
    monkeypatch.chdir(tmp_path)
    Path("problems.jsonl").write_text(lines)
    config = resolve(tomllib.loads(recipe))
    task = Jsonl(config.task)
    (held_out,) = task.held_out(config.eval.problems)
    assert [p.answer for p in read_rows("problems.jsonl", "task.path")] == ["7", "8", "6"]
    assert held_out.prompt == "1+5="
    assert (task.grade(held_out, "1+5=6 #6"), task.grade(held_out, "6")) == (1, 0)
