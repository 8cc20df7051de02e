"""Milliseconds that a gateway adds to a turn, at 1 to 64 episodes at once; needs the extra gateway.

    PYTHONPATH=src:tests python benchmarks/gateway.py

An engine that computes nothing answers each turn after --seconds, with routes of 48 layers. Each
episode plays turns of 200 characters, a token each, with a tool and a history that grows. A process
of its own asks. A turn's overhead is the time from the question to its whole answer, less the
engine's. The load average of the machine is printed beside it: other programs' work is in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import time
from typing import Any

import torch
import uvicorn

from onepolicy.envs.multiturn.tokenization import encode_text
from onepolicy.gateway.connections import HTTP
from onepolicy.gateway.episodes import Episodes
from onepolicy.gateway.history import History
from onepolicy.gateway.rendering import Renderer
from onepolicy.gateway.server import make_app
from onepolicy.interfaces import EngineCaps
from onepolicy.types import Completion, RoutingTrace, Sampling
from support.gateway_app import session_on
from support.scripted_engine import HERMES, tokenizer_of

LAYERS, EXPERTS, TOP_K = 48, 128, 8
CHARACTERS = 200
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a file. " * 10,
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


class PacedEngine:
    """Answers each turn with the same text after so many seconds."""

    def __init__(self, tokenizer: Any, seconds: float) -> None:
        self.caps = EngineCaps(returns_routes=True, max_len=2**15)
        self.seconds, self.version = seconds, 0
        text = ("said " * CHARACTERS)[:CHARACTERS]
        self.ids = [*encode_text(tokenizer, text, untrusted=True), tokenizer.eos_token_id]
        self.layers = tuple(range(LAYERS))

    async def generate(self, prompt_ids: Any, sampling: Sampling, *, seed: int) -> Completion:
        await asyncio.sleep(self.seconds)
        new = len(self.ids)
        rows = len(prompt_ids) + new - 1 - sampling.routes_from
        ids = torch.zeros((rows, LAYERS, TOP_K), dtype=torch.uint8)
        valid = torch.ones(rows, dtype=torch.bool)
        return Completion(
            torch.tensor(self.ids, dtype=torch.int32),
            torch.full((new,), -1.0),
            torch.zeros(new, dtype=torch.int32),
            "stop",
            RoutingTrace(ids, valid, self.layers, EXPERTS),
            sampling.routes_from,
        )


async def ask(port: int, key: str, turns: int) -> list[float]:
    """Play an episode on one connection. Return the seconds of each turn."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages: list[Any] = [{"role": "user", "content": "question " * 20}]
    seconds = []
    for _ in range(turns):
        body = json.dumps({"messages": messages, "tools": [TOOL]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {key}\r\n"
        start = time.perf_counter()
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        told = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if " 200 " not in told.splitlines()[0]:
            raise RuntimeError(told)
        answer = await reader.readexactly(int(told.split("content-length: ")[1].split()[0]))
        seconds.append(time.perf_counter() - start)
        messages += [json.loads(answer)["choices"][0]["message"], {"role": "user", "content": "go"}]
    writer.close()
    return seconds


def play(port: int, keys: list[str], turns: int) -> list[float]:
    """Play episodes at once, in a process of their own. Return the seconds of all turns."""

    async def together() -> list[list[float]]:
        return await asyncio.gather(*(ask(port, key, turns) for key in keys))

    return [each for episode in asyncio.run(together()) for each in episode]


async def measure(episodes: int, turns: int, seconds: float, pool: Any) -> list[float]:
    """Return the overhead of each turn [ms], ascending."""
    renderer = Renderer(tokenizer_of(HERMES))
    engine = PacedEngine(renderer.tokenizer, seconds)
    sampling = Sampling(1.0, 400)

    def begin(name: str) -> Any:
        history = History(renderer, max_len=2**15, max_tokens=400, expects_routes=True)
        return session_on(engine, history, sampling, lambda turn: turn)

    open_episodes = Episodes(begin)
    config = uvicorn.Config(
        make_app(open_episodes, "m"), port=0, http=HTTP, log_level="error", lifespan="off"
    )
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    keys = [open_episodes.key_of(f"e{number}") for number in range(episodes)]
    loop = asyncio.get_running_loop()
    told = await loop.run_in_executor(None, pool.apply, play, (port, keys, turns))
    server.should_exit = True
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    return sorted(1000 * (each - seconds) for each in told)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="of the engine, for a turn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        asyncio.run(measure(1, 2, 0.0, pool))  # warms up
        for episodes in arguments.episodes:
            own = time.process_time()
            found = asyncio.run(measure(episodes, arguments.turns, arguments.seconds, pool))
            cpu = 1000 * (time.process_time() - own) / len(found)
            median, late = statistics.median(found), found[int(0.95 * (len(found) - 1))]
            share = median / (median + 1000 * arguments.seconds)
            print(
                f"{episodes} episodes, {len(found)} turns: {median:.1f} ms a turn ({share:.1%}), "
                f"95% under {late:.1f} ms, {cpu:.1f} ms of a core; load {os.getloadavg()[0]:.1f} "
                f"on {os.cpu_count()} cores",
                flush=True,
            )


if __name__ == "__main__":
    main()
