"""`onepolicy gateway` in front of a live server: programs play episodes, and a dump is left."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager

import httpx2
import numpy as np

from onepolicy.record.read import read_dump
from support.own_processes import start_process
from support.paths import ROOT
from support.waiting import LIMIT_S, wait_until

SECRET = "a secret of this test"
ASKER = ROOT / "tests" / "support" / "gateway" / "programs" / "asker.py"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
TOKENS, EPISODES = 12, 4


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@contextmanager
def gateway(engine, model, folder):
    """Start the command in front of an engine, `KIND:URL`, and yield its address."""
    (folder / "template.jinja").write_text(TEMPLATE)
    port, log = free_port(), folder / "gateway.log"
    words = [sys.executable, "-m", "onepolicy", "gateway", str(model), "--engine", engine]
    words += ["--out", str(folder / "out"), "--port", str(port), "--key-env", "GATEWAY_SECRET"]
    words += ["--template", str(folder / "template.jinja"), "rollout.engine.dtype=float32"]
    words += [f"rollout.sampling.max_tokens={TOKENS}"]
    with log.open("wb") as file:
        process = start_process(
            words, stdout=file, stderr=file, env=os.environ | {"GATEWAY_SECRET": SECRET}
        )
    address = f"http://127.0.0.1:{port}"

    def answers():
        assert process.poll() is None, log.read_text()
        try:
            return httpx2.get(address, timeout=LIMIT_S).status_code == 200
        except httpx2.TransportError:
            return False

    try:
        wait_until(answers, 600, poll=0.5)
        yield address
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def play_and_end(address, name, folder):
    """Start a program with an episode's key, end its episode, and return the line of it."""
    secret = {"x-api-key": SECRET}
    with httpx2.Client(base_url=address, headers=secret, timeout=LIMIT_S) as client:
        key = client.post("/v1/episodes", json={"episode": name}).json()["key"]
        program = folder / "asker.py"
        program.write_text(ASKER.read_text().replace("go on", "2+2="))  # in the policy's alphabet
        variables = {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": key}
        printed = subprocess.run(
            [sys.executable, str(program), "well"],
            input=f"{name}+1=",
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        ).stdout
        assert printed == "done\n"
        answer = client.post("/v1/episodes/end", json={"episode": name, "reward": 1.0})
        assert answer.status_code == 200, answer.text
        return answer.json()


def record_programs(engine, model, folder):
    """Play some programs. Check their ids, values, routes and versions. Return the dump."""
    with gateway(engine, model, folder) as address:
        lines = [play_and_end(address, str(number), folder) for number in range(EPISODES)]
    for line in lines:
        assert (line["samples"], line["counts"]["turns"], line["breaks"]) == (1, 2, [])
    rows = 0
    for block in read_dump(folder / "out" / "dump", {}):
        mask = block.columns["mask"]
        rollout, trainer = (block.columns[f"logp_{side}"][mask] for side in ("rollout", "trainer"))
        np.testing.assert_allclose(rollout, trainer, atol=2e-3, rtol=0)
        assert (rollout < 0).all()
        assert set(block.columns["turn"][mask]) == {0, 1}
        assert len(set(block.columns["version"][mask])) == 1
        routes = [np.sort(block.columns[f"routes_{side}"], -1) for side in ("rollout", "trainer")]
        assert (routes[0] >= 0).mean() > 0.9  # all but those of each path's last token
        assert (routes[0] == routes[1]).mean() > 0.97
        rows += mask.sum()
    assert rows > 2 * EPISODES
    return folder / "out" / "dump"
