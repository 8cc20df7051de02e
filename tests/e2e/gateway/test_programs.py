"""`task.kind = "program"`: programs in their sandboxes play episodes, and a run trains on them."""

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from onepolicy.cli import main
from onepolicy.config import ProgramTask, RolloutConfig, UsageError
from onepolicy.envs import make_task
from onepolicy.interfaces import EpisodeError, Problem
from onepolicy.rollout.collect import collect_rollouts, gather_or_cancel, play_episode
from onepolicy.types import Sampling
from support import other_user
from support.needs import need
from support.paths import ROOT
from support.recording_engine import RecordingEngine, assert_equal_samples
from support.sandbox_driver import ROOT as AS_ROOT
from support.sandbox_driver import processes_with
from support.scripted_engine import HERMES, tokenizer_of
from support.waiting import wait_until

pytest.importorskip("uvicorn", reason="make test-gateway installs it")
from onepolicy.gateway.program_task import Programs

pytestmark = [pytest.mark.gateway, pytest.mark.process, pytest.mark.needs("bwrap")]
PROGRAMS = ROOT / "tests" / "support" / "gateway" / "programs"
SAMPLING = Sampling(1.0, 200, top_p=0.9, support=True)
TOKENIZER = tokenizer_of(HERMES)
PRODUCTS = {"kind": "gym", "name": "products", "params": {"min_digits": 1, "max_digits": 1}}
CALL = '<call>\n{"name": "look", "arguments": {"q": "x"}}\n</call>'


def environment(*words, **settings):
    settings = {"problems": PRODUCTS, "folder": str(PROGRAMS), "seconds": 60} | settings
    command = settings.pop("command", ("python3", "/program/asker.py", *words))
    config = ProgramTask(command=command, **settings)
    made = Programs(config, make_task(config.problems), TOKENIZER, max_len=4000)
    made.check(max_tokens=200, max_len=4000)
    return made


def play(made, *texts, problem=None, engine=None):
    """Return the samples of an episode, and the engine that was asked."""
    engine = engine or RecordingEngine(TOKENIZER, texts)
    problem = problem or Problem(0, "question", "done")
    return asyncio.run(play_episode(engine, made, problem, SAMPLING, lambda turn: turn)), engine


AS_USER = f"""
import asyncio, json, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from onepolicy.config import ProgramTask
from onepolicy.envs import make_task
from onepolicy.gateway.program_task import Programs
from onepolicy.interfaces import Problem
from support.recording_engine import RecordingEngine
from support.scripted_engine import HERMES, tokenizer_of

words, settings = json.loads(sys.stdin.readline())
config = ProgramTask(
    problems={PRODUCTS!r},
    command=["python3", "/program/asker.py", *words],
    folder={str(PROGRAMS)!r}, env={{"MINE": "1"}}, **settings,
)
task = make_task(config.problems)
printed = []
task.grade = lambda problem, text: printed.append(text) or 1.0
made = Programs(config, task, tokenizer_of(HERMES), max_len=4000)
made.check(max_tokens=100, max_len=4000)
engine = RecordingEngine(made.tokenizer, ["one", "two"])
sample = lambda tokens, **how: engine.generate(
    tokens, type("S", (), {{"max_tokens": 9, "routes_from": 0}}), seed=1
)
(sample,) = asyncio.run(made.episode(Problem(0, "question", ""), sample, 1.0))
died = made.take_metrics()["program/died"]
print(json.dumps({{"reward": sample.reward, "died": died, "printed": printed}}))
"""
USERS = pytest.mark.parametrize("user", ["root", "user"] if AS_ROOT else ["user"])


def play_as(user, spare, words, **settings):
    """Play an episode in another process, as root or an ordinary user. Return what it says."""
    command = [sys.executable, "-c", AS_USER]
    if AS_ROOT and user == "user":
        need("setpriv", "unshare")
        spare.mkdir()
        command = other_user.command_as_user(AS_USER, spare)
    process = other_user.start(command, other_user.environment_as_user(SECRET_OF_THE_RUN="hunter2"))
    printed, _ = process.communicate(json.dumps([words, settings]) + "\n")
    return json.loads(printed)


@USERS
def test_a_program_reaches_the_gateway_and_nothing_else(tmp_path, user):
    """Whoever starts the run."""
    (tmp_path / "file").write_text("hunter2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = ["escape", str(server.getsockname()[1]), f"{tmp_path}/file"]
        told = play_as(user, tmp_path / "spare", words)
    assert json.loads(*told["printed"]) == {
        "network": "OSError",
        "devices": ["lo"],
        "host": "ConnectionRefusedError",
        "vsock": "OSError",
        "packets": "OSError",
        "files": "FileNotFoundError",
        "passwd": "FileNotFoundError",
        "socket": "OSError",
        "program": "OSError",
        "secret": [],
        "others": [],
        "key": 401,
        "episodes": 404,
    }


@USERS
def test_a_program_cannot_report_its_own_end(tmp_path, user):
    """It is of its parent's user, and could write a status of 0 and end the parent."""
    told = play_as(user, tmp_path / "spare", ["forge"], reward="exit")
    assert told == {"reward": 0.0, "died": 1.0, "printed": []}


def borrowed():
    """Return the folders in which this Python finds what it has, those of other venvs included."""
    found = {Path(path).resolve() for path in (sys.prefix, sys.base_prefix, *sys.path[1:])}
    return tuple(
        str(path) for path in sorted(found) if path.exists() and "support" not in path.parts
    )


@pytest.mark.parametrize("program", ["sdk_agent.py", "agents_sdk.py"])
def test_an_unmodified_program_plays_the_path_of_its_conversation(monkeypatch, program):
    """OpenAI's SDK (chat) and openai-agents (responses), with two calls in a turn.

    Their path is what the engine returned, in one sample, and the same a second time.
    """
    made = environment(
        command=(sys.executable, f"/program/{program}", "{prompt}"),
        readable=borrowed(),
        env={"OPENAI_AGENTS_DISABLE_TRACING": "1"},
    )
    monkeypatch.setattr(made.task, "grade", lambda problem, text: float(text == "the end\n"))
    turn = f"so {CALL}{CALL}"
    (sample,), engine = play(made, turn, "the end")
    assert sample.reward == 1.0
    assert TOKENIZER.decode(sample.tokens).endswith(
        f"<user>question<eos><bot>{turn}<eos><tool>X<eos><tool>X<eos><bot>the end<eos>"
    )
    assert sample.response_length == len(turn) + 1 + len("the end") + 1
    assert len(engine.requests) == 2
    assert sample.routing.valid.all()
    (again,), _ = play(made, turn, "the end")
    assert_equal_samples(again, sample)


def test_two_conversations_are_two_samples_of_one_episode():
    """Through the path of every step: a group of two episodes, four samples, each turn once."""
    made = environment("branch", reward="exit")
    engine = RecordingEngine(TOKENIZER, ["one", "two", "three"])
    config = RolloutConfig(prompts_per_step=1, group_size=2)
    collected = collect_rollouts(engine, made, config, SAMPLING, step=0, seed=0)
    (group,), metrics = asyncio.run(collected)
    assert [sample.episode for sample in group.samples] == [0, 0, 1, 1]
    assert {sample.reward for sample in group.samples} == {1.0}
    sampled = sum(sample.response_length for sample in group.samples)
    texts = [engine.texts[i % 3] for i in range(len(engine.requests))]
    assert (len(texts), sampled) == (6, sum(len(text) + 1 for text in texts))
    assert (metrics["program/paths"], metrics["program/broken"]) == (2, 0)


def test_credit_for_the_main_conversation_trains_that_alone():
    (sample,), _ = play(environment("branch", reward="exit", credit="main"), "one", "two", "three")
    assert (sample.reward, sample.response_length) == (1.0, len("one") + len("two") + 2)


@pytest.mark.parametrize(
    ("words", "settings", "reward", "counted"),
    [
        (["well"], {"reward": "exit"}, 1.0, None),
        (["die"], {"reward": "exit"}, 0.0, "died"),
        (["die"], {}, 0.0, "died"),
        (["kill"], {}, 0.0, "died"),
        (["hang"], {"seconds": 3}, 0.0, "out_of_time"),
        (["file", "0.25"], {"reward": "file", "result_file": "result.txt"}, 0.25, None),
        (["file", "nan"], {"reward": "file", "result_file": "result.txt"}, 0.0, "no_result"),
        (["well"], {"reward": "file", "result_file": "result.txt"}, 0.0, "no_result"),
    ],
)
def test_every_end_is_an_episode_that_is_counted(words, settings, reward, counted):
    made = environment(*words, **settings)
    (sample,), _ = play(made, "one", "two")
    assert (sample.reward, sample.response_length) == (reward, 8)
    metrics = made.take_metrics()
    ends = {name: metrics[f"program/{name}"] for name in ("died", "out_of_time", "no_result")}
    assert ends == {name: float(name == counted) for name in ends}
    assert metrics["program/paths"] == 1
    assert made.take_metrics() == {}


def test_the_grader_reads_what_a_program_prints_or_its_file(monkeypatch):
    for words, settings, text in (
        (["well"], {}, "done\n"),
        (["file", "<eos>7"], {"result_file": "result.txt"}, "<eos>7"),
        (["well"], {"result_file": "result.txt"}, ""),
    ):
        made = environment(*words, **settings)
        graded = []
        monkeypatch.setattr(
            made.task, "grade", lambda problem, text, to=graded: to.append(text) or 1
        )
        play(made, "one", "two")
        assert graded == [text]


def test_turns_and_tokens_end_a_programs_requests(monkeypatch):
    for settings, length in (({"max_turns": 1}, 4), ({"max_tokens": 4}, 4), ({"max_tokens": 6}, 6)):
        made = environment("well", **settings)
        graded = []
        monkeypatch.setattr(
            made.task, "grade", lambda problem, text, to=graded: to.append(text) or 1
        )
        (sample,), _ = play(made, "one", "two")
        assert sample.response_length == length
        refused = length < 6
        assert graded == [("refused: 403\n" if refused else "") + "done\n"]


def test_a_program_that_asks_for_nothing_or_does_not_start_is_no_episode():
    with pytest.raises(EpisodeError, match="asked for no turn; it ended with status 1: nothing to"):
        play(environment("silent"))
    with pytest.raises(UsageError, match=r"task\.command: 'no-such' is not found in it; name its"):
        environment(command=("no-such",))


def test_a_prompt_that_no_word_can_hold_starts_no_program():
    made = environment("well", "{prompt}")
    with pytest.raises(EpisodeError, match="did not start: ValueError: embedded null byte"):
        play(made, problem=Problem(0, "a\0b", "done"))


def test_a_turn_that_is_not_there_in_time_is_no_missing_request():
    class Slow(RecordingEngine):
        async def generate(self, *args, **how):
            await asyncio.sleep(3600)

    with pytest.raises(EpisodeError, match=r"sampled in its time; raise task\.seconds"):
        play(environment("well", seconds=2), engine=Slow(TOKENIZER, []))


def test_a_report_is_read_while_it_is_written(monkeypatch):
    """Where a user has many pipes, a new one holds a page."""
    whole = os.pipe

    def small():
        ends = whole()
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
        return ends

    made = environment("file", "x" * 30_000, result_file="result.txt")
    graded = []
    monkeypatch.setattr(made.task, "grade", lambda problem, text: graded.append(text) or 1)
    monkeypatch.setattr("os.pipe", small)
    play(made, "one", "two")
    assert graded == ["x" * 30_000]


def test_a_folder_for_sockets_with_a_long_path_is_named(monkeypatch, tmp_path):
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(UsageError, match="set the variable TMPDIR to a shorter one"):
        environment("well")


def test_an_error_of_the_engine_ends_the_program_and_is_raised():
    made = environment("hang", seconds=3000)

    def fail(number, completion):
        raise RuntimeError("the engine is lost")

    with pytest.raises(RuntimeError, match="the engine is lost"):
        play(made, engine=RecordingEngine(TOKENIZER, ["one"], after=fail))
    assert not processes_with("asker.py")


def test_a_run_that_stops_ends_its_programs():
    made = environment("hang", seconds=3000, concurrency=1)
    engine = RecordingEngine(TOKENIZER, ["one", "two"])

    async def stop_in_the_middle():
        seeds = range(2)
        work = asyncio.ensure_future(
            gather_or_cancel(
                play_episode(engine, made, Problem(i, "q", "a"), SAMPLING, lambda turn: turn)
                for i in seeds
            )
        )
        while len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(engine.requests) == 2  # one program at a time
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    asyncio.run(stop_in_the_middle())
    wait_until(lambda: not processes_with("asker.py"))
    assert made._gateway is None


TEMPLATE = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"


def test_a_run_trains_and_evaluates_on_a_program(tmp_path):
    """On-policy numerics: every token of the gateway's path has the trainer's value to the bit."""
    rows = [json.dumps({"prompt": f"{i}+1=", "answer": f"{i + 1}"}) for i in range(8)]
    (tmp_path / "problems.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    program = tmp_path / "program"
    program.mkdir()
    source = (PROGRAMS / "asker.py").read_text().replace("go on", "2+2=")
    (program / "asker.py").write_text(source)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
        steps = 2
        numerics = "on-policy"
        model = {{ path = "{ROOT / "tests/support/policies/small"}" }}
        rollout.prompts_per_step = 2
        rollout.group_size = 2
        rollout.sampling = {{ max_tokens = 8 }}
        objective = {{ entropy_coef = 0.01 }}
        eval = {{ every = 2, problems = 2, k = 1 }}
        log = {{ tensorboard = false }}
        train = {{ threads = 1 }}
        [task]
        kind = "program"
        problems = {{ kind = "jsonl", path = "{tmp_path}/problems.jsonl", held_out = 2 }}
        command = ["python3", "/program/asker.py", "well"]
        folder = "{program}"
        reward = "exit"
        template = "{tmp_path}/template.jinja"
        seconds = 60
        """
    )
    out = tmp_path / "run"
    assert main(["train", str(recipe), f"out={out}"]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/reward" in line]
    assert len(steps) == 2
    for step in steps:
        assert (step["train/reward"], step["train/turns"], step["program/paths"]) == (1, 2, 1)
        assert step["program/died"] == step["program/broken"] == 0
        assert step["mismatch/k3"] == 0
    assert main(["eval", str(out), "task.kind=program"]) == 0
    assert main(["eval", str(out)]) == 2  # a stored run starts no program by itself
