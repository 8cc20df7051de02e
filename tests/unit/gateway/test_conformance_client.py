"""The conformance kit against broken and mean servers: a row of the table, and no secret."""

import asyncio

import httpx2
import pytest

from onepolicy.config import UsageError
from onepolicy.gateway.conformance import client as kit
from onepolicy.gateway.conformance.answers import Illegal, read_events, want_calls
from onepolicy.gateway.conformance.checks import check_transcript
from onepolicy.gateway.conformance.client import Client
from onepolicy.gateway.conformance.command import check_gateway, print_outcomes
from onepolicy.gateway.conformance.transcripts import load_transcripts

KEY = "a-key-that-nobody-may-see"
DEEP = "[" * 100_000
(FIRST, *_) = load_transcripts()


class Drip(httpx2.AsyncByteStream):
    """A body that never ends."""

    async def __aiter__(self):
        while True:
            yield b": ping\n\n"
            await asyncio.sleep(0.001)


class Body(httpx2.AsyncByteStream):
    """A body that is sent."""

    def __init__(self, content):
        self.content = content

    async def __aiter__(self):
        yield self.content


def echo(request):
    return httpx2.Response(500, stream=Body(request.headers["x-api-key"].encode()))


def outcome(handler, key=KEY, **more):
    """Play the first transcript against a handler of requests. Return its outcome."""

    async def run():
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(handler)) as http:
            return await check_transcript(FIRST, Client(http, "http://u:pw@gw", key, "m", **more))

    return asyncio.run(run())


def dropped(request):
    raise httpx2.RemoteProtocolError(f"gone, {request.headers.get('x-api-key')}")


CASES = {
    "a connection that ends": (dropped, "answer", "RemoteProtocolError"),
    "an answer without end": (
        lambda _: httpx2.Response(200, stream=Drip()),
        "answer",
        "no whole answer",
    ),
    "a large answer": (
        lambda _: httpx2.Response(200, stream=Body(b"x" * 3000)),
        "answer",
        "a body of more than 2,000 bytes",
    ),
    "an echo of the key": (echo, "answer", "status 500: ***"),
    "an unknown encoding": (
        lambda _: httpx2.Response(
            200, stream=Body(b"{}"), headers={"content-type": "a; charset=hex"}
        ),
        "answer",
        "",
    ),
}


def test_a_broken_server_is_a_row_and_nobody_sees_the_key(subtests, monkeypatch):
    monkeypatch.setattr(kit, "MAX_REPLY_BYTES", 2000)
    for name, (handler, check, why) in CASES.items():
        with subtests.test(name):
            found = outcome(handler, seconds=0.2)
            assert found.check == check
            assert why in found.why
            assert KEY not in found.why
            assert "pw@" not in found.why


def test_json_that_nobody_can_parse_is_illegal():
    (event,) = read_events(f"data: {DEEP}\n\n")
    assert event.data == DEEP
    call = type("Call", (), {"id": "1", "name": "f", "arguments": DEEP})
    with pytest.raises(Illegal, match="no JSON object"):
        want_calls([call])


def test_a_key_is_taken_without_its_line_end_and_never_printed():
    assert outcome(echo, key=f"{KEY}\n").why.endswith("status 500: ***")
    with pytest.raises(UsageError, match="--key-env: its value has a character") as error:
        outcome(echo, key=f"{KEY}\r\nx: y")
    assert KEY not in str(error.value)


def test_a_server_that_is_not_there_is_said_without_its_password():
    async def run():
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(dropped)) as http:
            await check_gateway(Client(http, "http://u:pw@gw", KEY, "m"))

    with pytest.raises(UsageError, match="start the gateway") as error:
        asyncio.run(run())
    assert "pw" not in str(error.value)
    assert KEY not in str(error.value)


async def hanging(request):
    """Answer what the kit asks first, and nothing more."""
    if request.method == "POST":
        await asyncio.Event().wait()
    return httpx2.Response(404, stream=Body(b"{}"))


def test_a_gateway_that_hangs_ends_the_kit_and_the_rest_is_not_run(capsys):
    async def run(seconds):
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(hanging)) as http:
            return await check_gateway(Client(http, "http://gw", None, "m"), seconds=seconds)

    broken_off, *others = asyncio.run(run(1))
    assert (broken_off.not_run, broken_off.why) == (True, "1 s were over in the middle of it")
    assert {(each.not_run, each.why) for each in others} == {(True, "1 s were over before it")}
    assert [each.transcript for each in (broken_off, *others)] == load_transcripts()
    print_outcomes([broken_off, *others])
    printed = capsys.readouterr().out
    assert f"0 pass, 0 fail, 0 left out, {1 + len(others)} not run" in printed
    assert "give the kit more time by --seconds" in printed
