"""Programs that nobody here wrote, as PyPI and npm have them: each plays an episode in its sandbox
on a small policy. Its samples are, to the bit, those of the same conversation played by our own
episode code."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("uvicorn", reason="make test-gateway installs it")
from onepolicy.config import ProgramTask
from onepolicy.envs import make_task
from onepolicy.gateway.dialects import anthropic, chat, responses
from onepolicy.gateway.program_sandbox import ADDRESS
from onepolicy.gateway.program_task import Programs
from onepolicy.gateway.turns import Reason
from onepolicy.interfaces import Problem
from onepolicy.rollout.collect import play_episode
from onepolicy.types import Sampling
from support.paths import ROOT
from support.recording_engine import assert_equal_samples
from support.spoken_policy import PlayedAgain, SpokenPolicy, make_tokenizer

pytestmark = [pytest.mark.gateway, pytest.mark.process, pytest.mark.needs("bwrap")]
MAX_LEN = 2**14
BIN = Path(sys.prefix) / "bin"
NPM = Path(sys.prefix) / "npm" / "node_modules"
PROBLEM = Problem(0, "What is 6*7? Use the shell.", "42")
SUM = "echo $((6*7))"
DIALECTS = {chat: "chat", anthropic: "messages", responses: "responses"}


def call(name, **arguments):
    return f"<call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</call>"


OPENCODE = {
    "provider": {
        "here": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{ADDRESS}/v1", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {"tiny": {}},
        }
    },
    "agent": {"build": {"prompt": "Be brief.", "tools": {"*": False, "bash": True}}},
    "autoupdate": False,
    "share": "disabled",
}
CODEX = (
    'model_provider="here"',
    f'model_providers.here={{name="here", base_url="{ADDRESS}/v1", env_key="OPENAI_API_KEY", '
    'wire_api="responses"}',
    "check_for_update_on_startup=false",
    "analytics.enabled=false",
    "features.apps=false",
    "features.plugins=false",
)
PROGRAMS = {
    "mini-swe-agent": {
        "asks": ("chat", False),
        "command": [
            *(BIN / "mini", "-m", "openai/tiny", "-t", "{prompt}", "-y", "--exit-immediately"),
            *("-l", "0"),
        ],
        "env": {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        "texts": [
            f"so {call('bash', command=SUM)}",
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 42"),
        ],
    },
    "openai-agents": {
        "asks": ("responses", False),
        "command": [sys.executable, "/program/agents_sdk.py", "{prompt}"],
        "env": {"OPENAI_AGENTS_DISABLE_TRACING": "1"},
        "texts": [f"so {call('look', q='x')}", "it is 42"],
    },
    "opencode": {
        "asks": ("chat", True),
        "command": [NPM / ".bin/opencode", "run", "-m", "here/tiny", "{prompt}"],
        "env": {
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE),
        },
        "texts": [f"so {call('bash', command=SUM, description='sum')}", "it is 42"],
    },
    "Claude Code": {
        "asks": ("messages", True),
        "command": [
            *(NPM / ".bin/claude", "--bare", "-p", "{prompt}", "--model", "tiny"),
            *("--allowedTools", "Bash"),
        ],
        "env": {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        "texts": [f"so {call('Bash', command=SUM, description='sum')}", "it is 42"],
    },
    "codex": {
        "asks": ("responses", True),
        "command": [
            *(BIN / "node", NPM / "@openai/codex/bin/codex.js", "exec", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", "-m", "tiny"),
            *(word for setting in CODEX for word in ("-c", setting)),
            "{prompt}",
        ],
        "env": {},
        "texts": [f"so {call('exec_command', cmd=SUM)}", "it is 42"],
    },
    "smolagents": {
        "asks": ("chat", True),
        "command": [
            *(BIN / "smolagent", "{prompt}", "--model-type", "OpenAIModel", "--model-id", "tiny"),
            *("--api-base", f"{ADDRESS}/v1", "--tools"),
        ],
        "env": {},
        "texts": [
            "Thought: go\n<code>\nprint(6*7)\n</code>",
            "<code>\nfinal_answer(42)\n</code>",
        ],
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def programs(name, tokenizer):
    """Return the environment of a program, and where `play` puts how it ended. Skip where it is
    not installed."""
    command = list(map(str, PROGRAMS[name]["command"]))
    for word in command[:2]:
        if word.startswith(sys.prefix) and not Path(word).exists():
            pytest.skip(f"needs {name}, which `make test-gateway` installs if npm can be reached")
    paths = {Path(path).resolve() for path in (sys.prefix, sys.base_prefix, *sys.path[1:])}
    seen = {path for path in paths if path.exists()} - {ROOT / "src", ROOT / "tests"}
    config = ProgramTask(
        problems={"kind": "gym", "name": "products"},
        command=command,
        folder=str(ROOT / "tests" / "support" / "gateway" / "programs"),
        readable=sorted(map(str, seen)),
        env=PROGRAMS[name]["env"],
        reward="exit",
        seconds=900,
        processes=256,
        memory_mib=8192,
    )
    made = Programs(config, make_task(config.problems), tokenizer, max_len=MAX_LEN)
    made.check(max_tokens=200, max_len=MAX_LEN)
    ended = []
    made._count = lambda *told: ended.append(told)
    return made, ended


def play(engine, environment):
    sampling = Sampling(1.0, 200, stop=(environment.tokenizer.eos_token_id,))
    return asyncio.run(play_episode(engine, environment, PROBLEM, sampling, lambda turn: turn))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - {"smolagents"}))
def test_its_samples_are_those_of_our_own_episode_code(name, tokenizer, monkeypatch):
    (made, ended), texts = programs(name, tokenizer), PROGRAMS[name]["texts"]
    asked = set()

    def reading(dialect, read):
        def read_and_note(body):
            asked.add((DIALECTS[dialect], bool(body.get("stream"))))
            return read(body)

        return read_and_note

    for dialect in DIALECTS:
        monkeypatch.setattr(dialect, "read", reading(dialect, dialect.read))
    (sample,) = play(SpokenPolicy(tokenizer, texts, max_len=MAX_LEN), made)
    ((end, history, _),) = ended
    assert sample.reward == 1.0, end
    assert "42" in end.printed
    assert asked == {PROGRAMS[name]["asks"]}
    assert not any(root.break_ for root in history.roots)
    turns = [turn for turn in history.turns if not history.is_auxiliary(turn.root)]
    assert len(turns) == 2
    versions = [int(turn.completion.version[0]) for turn in turns]
    assert torch.equal(sample.version.unique(), torch.tensor([-1, *versions]))
    assert sample.routing.valid.all()
    engine = SpokenPolicy(tokenizer, texts, max_len=MAX_LEN, versions=versions)
    (ours,) = play(engine, PlayedAgain(tokenizer, turns, max_len=MAX_LEN))
    assert_equal_samples(sample, ours)


@pytest.mark.timeout(1800)
def test_a_program_that_rewrites_its_turns_is_named(tokenizer):
    """smolagents writes its calls anew as text: two samples, each as it was sampled."""
    (made, ended), texts = programs("smolagents", tokenizer), PROGRAMS["smolagents"]["texts"]
    samples = play(SpokenPolicy(tokenizer, texts, max_len=MAX_LEN), made)
    ((end, history, _),) = ended
    assert end.status == 0, end
    first, second = history.roots
    assert (first.break_, second.break_.reason) == (None, Reason.RETOKENISED)
    assert [sample.version.unique().tolist() for sample in samples] == [[-1, 1], [-1, 2]]
    for sample, text in zip(samples, texts, strict=True):
        assert tokenizer.decode(sample.tokens).endswith(f"<assistant>{text}")  # its stop text
