"""benchmarks/zero: the same path with a small random hybrid, and what it would say if bits
differed."""

import asyncio
import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("agents", reason="make test-gateway installs it")
from zero import conversations, picture, run
from zero.arms import ALL, OFF, measure, without_thoughts
from zero.witness import Witness

from onepolicy.config import ProgramTask
from onepolicy.config.policy import PolicyConfig
from onepolicy.envs import make_task
from onepolicy.gateway.program_task import Programs
from onepolicy.gateway.rendering import Renderer
from onepolicy.interfaces import Problem
from onepolicy.rollout.collect import play_episode
from onepolicy.run.hooks import OwnWeights
from onepolicy.tiny.model import make_model, save_policy
from onepolicy.types import Sampling
from support.paths import ROOT
from support.recording_engine import RecordingEngine
from support.small_policy import SMALL

pytestmark = [pytest.mark.gateway, pytest.mark.needs("bwrap")]
PROGRAMS = ROOT / "tests" / "support" / "gateway" / "programs"
SMALLER = (
    *("steps=3", "rollout.group_size=2", "rollout.sampling.max_tokens=12", "log.report=false"),
    *('task.command=["python3", "/program/asker.py", "well"]', f"task.folder={PROGRAMS}"),
    *("task.reward=exit", "optim.lr=1e-3", "checkpoint.every=3"),
)
"""A program of two turns, without an SDK, and few tokens."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make a small hybrid with random weights. Return the settings of a small run."""
    path = tmp_path_factory.mktemp("zero") / "policy"
    config = PolicyConfig(**(SMALL.model_dump() | {"recurrent": 3, "layers": 4, "max_len": 768}))
    tokenizer = conversations.make_tokenizer()
    save_policy(make_model(config, len(tokenizer)).eval(), tokenizer, config, path)
    return (*SMALLER, f"model.path={path}")


def test_every_token_of_a_program_has_the_bits_that_are_trained(made, tmp_path):
    witness = Witness(tmp_path / "rows")
    run.play(tmp_path, made, witness.watching, witness)
    counts = witness.counts
    assert counts.is_zero
    total = counts.total
    assert counts.line().startswith(f"0 of {total.tokens:,} log-probabilities differ")
    assert counts.requests["turns"] >= 24  # 12 episodes and those that the run left behind
    assert {0, 1} <= set(counts.turns)
    assert total.tokens == sum(counts.by_version.values()) > 100
    assert len(counts.by_version) > 1
    assert len(set(counts.weights)) == 3
    assert total.routes > 0
    assert 0 < total.newest < total.tokens  # the weights moved, so their zero says something
    assert json.loads(json.dumps(counts.as_json()))["turns"]["0"]["tokens"] > 0
    assert picture.write_pages(tmp_path, counts).exists()
    assert "equal" in (tmp_path / "report.html").read_text()
    files = sorted((tmp_path / "rows").iterdir())
    assert [file.name for file in files] == [f"step_{step:05d}_0.parquet" for step in range(3)]


def test_a_bit_that_differs_stops_the_run(made, tmp_path, monkeypatch):
    score = OwnWeights.score

    def wrong(self, batch):
        scored = score(self, batch)
        slot = int(scored.trainable.nonzero()[0, 0])
        scored.logp_old[slot] = torch.nextafter(scored.logp_old[slot], torch.tensor(-99.0))
        return scored

    monkeypatch.setattr(OwnWeights, "score", wrong)
    witness = Witness(tmp_path / "rows")
    with pytest.raises(Exception, match=r"1 of .* log-probabilities differ"):
        run.play(tmp_path, made, witness.watching, witness)


def test_a_protection_that_is_off_is_a_gap(made, tmp_path):
    """In bfloat16, on few tokens of random weights, that of most is plain."""
    rows = {row["arm"]: row for row in measure(tmp_path, made)}
    assert list(rows) == [ALL, *OFF]
    whole = rows[ALL]["k3"]
    assert 0 < whole < 1e-5
    for arm in ("R3", "reset of recurrent states"):
        assert rows[arm]["k3"] > whole, arm
    for arm in ("support", "weight versions"):
        assert rows[arm]["k3"] > 10 * whole, arm
    assert "linear_attn" in rows["reset of recurrent states"]["also"]
    taken = 1 - whole / rows["R3"]["k3"]
    assert rows["R3"]["also"].endswith(f"; replay takes off {taken:.0%} of it.")


def test_the_venv_of_programs_finds_the_package_by_itself(tmp_path):
    """`make zero` gives no PYTHONPATH, as the phases of the tests do."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import onepolicy; print(onepolicy.__file__)"]
    found = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True)
    assert found.stdout.strip().endswith("/onepolicy/__init__.py"), found.stderr


def test_the_teacher_writes_what_the_programs_ask(subtests):
    """Each program plays a whole episode; each prompt is that of the warm-up, to the token.

    plain.py asks for no title.
    """
    renderer = Renderer(conversations.make_tokenizer())
    teacher = conversations.Teacher(renderer)
    conversations.play(teacher, [7, 1, 3, 5], random.Random(0), guesses=0.0)
    for name, turns in (("agent", teacher.turns), ("plain", teacher.turns[1:])):
        with subtests.test(name):
            asked, samples = prompts_of(f"{name}.py", [text for _, text in turns])
            assert asked == [prompt for prompt, _ in turns]
            assert len(samples) == 6  # the lead's path, a compaction each, and three of the helper


def prompts_of(program, turns):
    """Return the prompts of a program that is answered so, and the samples of its episode."""
    tokenizer = conversations.make_tokenizer()
    config = ProgramTask(
        problems={"kind": "gym", "name": "products"},
        command=[sys.executable, f"/program/{program}", "{prompt}"],
        folder=str(run.HERE / "program"),
        template=str(conversations.TEMPLATE),
        env={"OPENAI_AGENTS_DISABLE_TRACING": "1"},
        readable=run.readable(),
    )
    programs = Programs(config, make_task(config.problems), tokenizer, max_len=768)
    programs.check(max_tokens=110, max_len=768)
    engine = RecordingEngine(tokenizer, turns)
    sampling = Sampling(1.0, 110, top_p=0.95, support=True)
    problem = Problem(0, "7135", "16")
    samples = asyncio.run(play_episode(engine, programs, problem, sampling, lambda turn: turn))
    return [tokenizer.decode(tokens) for tokens, _, _ in engine.requests], samples


def test_a_history_without_thoughts_is_the_one_that_the_client_sent():
    """Planted in the arm of exact ids: the tokens of a rendering, with each token's own values."""
    teacher = next(conversations.episodes(0.0))
    decode = teacher.tokenizer.decode
    samples = teacher.history.to_samples(reward=1.0, temperature=1.0)
    sample = max(samples, key=lambda each: decode(each.tokens.tolist()).count("<think>"))
    numbered = torch.arange(len(sample.tokens) - 1, dtype=torch.int32)
    found = without_thoughts(replace(sample, version=numbered), teacher.tokenizer)
    text = decode(sample.tokens.tolist())
    first = text.index("<think>")
    stop = text.index("</think>\n") + len("</think>\n")
    assert decode(found.tokens.tolist()) == text[:first] + text[stop:]
    assert "<think>" in text[stop:]  # the last turn has its own
    kept = [slot for slot in numbered.tolist() if found.version.eq(slot).any()]
    assert torch.equal(sample.tokens[1:][kept], found.tokens[1:])
