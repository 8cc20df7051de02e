"""Connections to a gateway: how many there may be, and when one is closed."""

import asyncio
import functools
import resource

import pytest

pytest.importorskip("uvicorn", reason="make test-gateway installs it")
from onepolicy.gateway import connections, program_task

pytestmark = pytest.mark.gateway
HELLO = b"GET / HTTP/1.1\r\nhost: gateway\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-length: 100\r\n"
NO_KEY = POST + b"\r\n{"


def on_gateway(play, programs=1, episodes=()):
    """Run a coroutine function with a function that opens a connection to a gateway.

    It also gets the keys of these episodes.
    """

    async def run():
        gateway = program_task._Gateway(programs)
        await gateway.start()
        try:
            connect = functools.partial(asyncio.open_unix_connection, str(gateway.socket))
            return await play(connect, *(gateway.open(name, None) for name in episodes))
        finally:
            await gateway.stop()

    return asyncio.run(asyncio.wait_for(run(), 60))


async def is_closed(reader, seconds=0.5):
    """Return whether the other side closes a connection within some seconds."""
    try:
        async with asyncio.timeout(seconds):
            await reader.read()
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("sent", [b"", b"GET", NO_KEY, HELLO])
def test_a_connection_without_a_new_head_is_closed(monkeypatch, sent):
    """After an answer that came before the whole body, too."""
    monkeypatch.setattr(connections, "SECONDS_OF_HEAD", 0.2)

    async def play(connect):
        reader, writer = await connect()
        writer.write(sent)
        if sent in (NO_KEY, HELLO):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"x" if sent == NO_KEY else b"G")
        return await is_closed(reader, 30)

    assert on_gateway(play)


def test_a_client_that_goes_away_while_it_sends_is_no_error_of_ours(caplog):
    async def play(connect, key):
        reader, writer = await connect()
        writer.write(POST + f"authorization: Bearer {key}\r\nexpect: 100-continue\r\n\r\n".encode())
        await reader.readuntil(b"100 Continue\r\n")
        writer.close()
        await writer.wait_closed()
        reader, writer = await connect()
        writer.write(HELLO)
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    on_gateway(play, episodes=["a"])
    assert [record.getMessage() for record in caplog.records] == []


def test_a_program_cannot_take_the_files_of_the_run(monkeypatch):
    monkeypatch.setattr(program_task, "CONNECTIONS", 4)
    monkeypatch.setattr(program_task, "CONNECTIONS_OF_PROGRAM", 2)

    async def play(connect):
        opened = []
        for _ in range(20):
            try:
                opened.append(await connect())
            except ConnectionError:
                continue
        closed = await asyncio.gather(*(is_closed(reader) for reader, _ in opened))
        for _, writer in opened:
            writer.close()
        await asyncio.sleep(0.2)
        reader, writer = await connect()
        writer.write(HELLO)
        answer = await reader.readuntil(b"\r\n")
        writer.close()
        return closed.count(False), answer

    held, answer = on_gateway(play, programs=2)
    assert 0 < held <= 8
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "left"),
    [
        (1024, 2**20, 2**16, 2**16 - 256),
        (2**17, 2**20, None, 2**16 - 256),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 2**16 - 256),
        (1024, resource.RLIM_INFINITY, 2**16, 2**16 - 256),
        (1024, 1024, None, 768),
        (64, 128, 128, 64),
    ],
)
def test_the_limit_of_files_is_raised_and_never_lowered(monkeypatch, soft, hard, raised, left):
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append(limits))
    assert connections.raise_most_connections() == left
    assert set_to == ([] if raised is None else [(raised, hard)])


def test_a_limit_that_cannot_be_raised_stays(monkeypatch):
    def refuse(kind, limits):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert connections.raise_most_connections() == 768
