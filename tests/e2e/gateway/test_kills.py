"""Programs, the engine and the gateway are killed: nothing that was answered is lost or counted
twice."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter

import httpx2
import pytest

from onepolicy.record.read import read_dump
from support.gateway_live import free_port
from support.paths import ROOT
from support.waiting import until

pytestmark = [pytest.mark.gateway, pytest.mark.slow, pytest.mark.timeout(7200)]
POLICY = ROOT / "tests" / "support" / "policies" / "small"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
SECRET = "a secret of this test"
EPISODES, LONG, NEW, MAX_LEN = 64, "e1", 4, 4096
TURNS = Counter({f"e{number}": 2 for number in range(EPISODES)} | {LONG: 200})
SECONDS = 0.05
"""Of the engine, for a turn."""
PROGRAM = """
import http.client, json, sys, time
port, key, turns, name = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def ask(messages):
    attempt = 0
    while True:
        try:
            # now and then it does not wait for its first answer, and asks again as SDKs do
            hasty = attempt == 0 and (name + len(messages)) % 5 == 0
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=0.02 if hasty else 300)
            headers = {"authorization": "Bearer " + key, "x-stainless-retry-count": str(attempt)}
            body = json.dumps({"messages": messages})
            client.request("POST", "/v1/chat/completions", body, headers)
            reply = client.getresponse()
            told = reply.read()
            if reply.status == 200:
                return json.loads(told)
            if reply.status < 500:
                sys.exit(told.decode())
        except ConnectionRefusedError:
            sys.exit("the gateway is gone")
        except (OSError, http.client.HTTPException):
            pass
        attempt += 1  # as often as it takes until the engine is there again
        time.sleep(0.2)

messages = [{"role": "user", "content": "%d+%d=" % (name % 10, name // 10)}]
for turn in range(turns):
    answer = ask(messages)
    print(json.dumps([answer["id"], answer["usage"]["completion_tokens"]]), flush=True)
    if turn == 0:
        sys.stdin.readline()  # all have begun
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "2+2="}]
"""


class Process:
    """A process of this test, which is killed and not asked to end."""

    def __init__(self, *words, log):
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
        environment = os.environ | {
            "KIT_SECRET": SECRET,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
        }
        with log.open("ab") as file:
            self.running = subprocess.Popen(
                [sys.executable, *map(str, words)], stdout=file, stderr=file, env=environment
            )
        self.log = log

    def kill(self):
        self.running.send_signal(signal.SIGKILL)
        self.running.wait()

    def is_alive(self):
        assert self.running.poll() is None, self.log.read_text()
        return True


class Machine:
    """An engine, and the gateways that used it one after the other."""

    def __init__(self, folder):
        self.folder, self.engine_port = folder, free_port()
        self.gateways, self.folders = [], []
        self.told = {}  # name of an episode -> program's answers, of its last start
        self.statuses = {}
        self.engine = None
        (folder / "template.jinja").write_text(TEMPLATE)
        self.model = shutil.copytree(POLICY, folder / "policy")
        config = json.loads((POLICY / "config.json").read_text())
        config["max_position_embeddings"] = MAX_LEN  # of 200 turns
        (self.model / "config.json").write_text(json.dumps(config))

    def start_engine(self):
        words = (self.engine_port, self.model, SECONDS, MAX_LEN)
        self.engine = Process(
            "-m", "support.fake_vllm_process", *words, log=self.folder / "engine.log"
        )

    def engine_listens(self):
        """A gateway gives up soon if its engine is not there."""
        assert self.engine.is_alive()
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.engine_port)) == 0

    async def start_gateway(self):
        out, self.port = self.folder / f"out{len(self.folders)}", free_port()
        engine = f"vllm-server:http://127.0.0.1:{self.engine_port}"
        gateway = Process(
            *("-m", "onepolicy", "gateway", self.model, "--engine", engine, "--out", out),
            *("--port", self.port, "--template", self.folder / "template.jinja"),
            *("--key-env", "KIT_SECRET", f"rollout.sampling.max_tokens={NEW}"),
            *("rollout.engine.dtype=float32", "rollout.engine.retries=4"),
            log=self.folder / "gateway.log",
        )
        self.gateways.append(gateway)
        self.folders.append(out)
        async with httpx2.AsyncClient() as client:

            async def answers():
                with contextlib.suppress(httpx2.RequestError):
                    return (await client.get(f"http://127.0.0.1:{self.port}/")).status_code == 200

            while gateway.is_alive() and not await answers():
                await asyncio.sleep(0.2)

    async def ask(self, client, path, **body):
        url = f"http://127.0.0.1:{self.port}/v1/{path}"
        return await client.post(url, json=body, headers={"x-api-key": SECRET}, timeout=600)

    async def play(self, client, name, begun, killed):
        """Start a program and end its episode. A killed one earns 0, and so does one that fails.

        begun: waits until every program has its first answer.
        """
        told = await self.ask(client, "episodes", episode=name)
        number = int(name.removeprefix("e"))
        words = ("-S", "-E", "-c", PROGRAM, self.port, told.json()["key"], TURNS[name], number)
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, *map(str, words)),
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL},
        )
        self.told[name] = []
        async for line in program.stdout:
            self.told[name].append(json.loads(line))
            if len(self.told[name]) == 1:
                await begun.wait()
                program.stdin.write(b"\n")
                if name in killed:
                    await asyncio.sleep(SECONDS)  # it has asked again by now
                    program.kill()
        if not self.told[name]:
            await begun.abort()
        self.statuses[name] = await program.wait()
        reward = float(self.statuses[name] == 0)
        while True:
            answer = await self.ask(client, "episodes/end", episode=name, reward=reward)
            if answer.status_code != 409:  # a turn whose client is gone is still sampled
                return
            await asyncio.sleep(0.1)

    async def play_all(self, names, killed=()):
        """Play episodes at once. If the gateway is killed those that had not ended stop."""
        limits, begun = httpx2.Limits(max_connections=None), asyncio.Barrier(len(names))
        async with httpx2.AsyncClient(limits=limits) as client:
            plays = (self.play(client, name, begun, killed) for name in names)
            return await asyncio.gather(*plays, return_exceptions=True)

    def lines(self):
        """Return the lines of all episodes that ended, and the file of each.

        A line without its file was written as the gateway was killed, and not answered.
        """
        found = []
        for folder in self.folders:
            file = folder / "episodes.jsonl"
            text = file.read_text() if file.exists() else ""
            for line in map(json.loads, text.splitlines()):
                rows = folder / "dump" / f"step_{line['step']:05d}_0.parquet"
                if line["reward"] is not None and rows.exists():
                    found.append((rows, line))
        return found

    def ended(self):
        return {line["episode"] for _, line in self.lines()}

    def kill(self):
        for process in (*self.gateways, self.engine):
            if process is not None and process.running.poll() is None:
                process.kill()


async def kill_all(machine):
    """Play 64 episodes, one of 200 turns. Kill six programs, the engine in the middle of turns, and
    the gateway."""
    names = [f"e{number}" for number in range(EPISODES)]
    killed = set(names[::11])

    def answers():
        return sum(map(len, machine.told.values()))

    machine.start_engine()
    await until(machine.engine_listens)
    await machine.start_gateway()
    playing = asyncio.ensure_future(machine.play_all(names, killed))
    await until(lambda: answers() > EPISODES)
    machine.engine.kill()
    machine.start_engine()
    await until(lambda: len(machine.ended()) > EPISODES // 4)
    machine.gateways[0].kill()
    await playing
    assert EPISODES // 4 < len(machine.ended()) < EPISODES
    await machine.start_gateway()
    left = [name for name in names if name not in machine.ended()]
    assert not any(await machine.play_all(left))
    return names, killed


def test_nothing_is_lost_or_counted_twice(tmp_path):
    machine = Machine(tmp_path)
    try:
        names, killed = asyncio.run(kill_all(machine))
    finally:
        machine.kill()
    lines = machine.lines()
    assert Counter(line["episode"] for _, line in lines) == Counter(names)
    turns = 0
    for file, line in lines:
        name, counts = line["episode"], line["counts"]
        told = machine.told[name]
        assert len({each for each, _ in told}) == len(told)
        turns += counts["turns"]
        assert not line["breaks"]
        assert not {"retry sibling", "abandoned"} & {key for key in counts if counts[key]}
        (block,) = read_dump(file, {})
        recorded = int(block.columns["mask"].sum())
        if machine.statuses[name] == 0:
            assert line["reward"] == 1.0
            assert (counts["turns"], recorded) == (TURNS[name], sum(count for _, count in told))
        else:  # a turn may have been sampled that its program never read
            assert (line["reward"], name in killed) == (0.0, True)
            assert counts["turns"] - len(told) in (0, 1)
    assert turns > TURNS[LONG] + EPISODES
    written = {file for folder in machine.folders for file in (folder / "dump").glob("*.parquet")}
    assert written == {file for file, _ in lines}
