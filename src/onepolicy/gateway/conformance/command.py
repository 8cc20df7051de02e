"""`onepolicy gateway --conformance URL`: every transcript against a gateway, and a table."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from onepolicy.config import UsageError
from onepolicy.console import Console, make_table, print_status
from onepolicy.gateway.conformance.checks import Outcome, check_transcript, end_episode
from onepolicy.gateway.conformance.client import Client
from onepolicy.gateway.conformance.transcripts import load_transcripts

SECONDS = 600
"""Of the whole kit."""
OF_AN_ANSWER = 1 / 5
"""Share of them that one answer may take. A gateway that always hangs fails some transcripts."""
LAST_SECONDS = 5
"""For the end of the episode that is broken off."""
UNSEEN = (
    "left out of all: trees, reasons, ids and log-probabilities, which this gateway does not show"
)


def run_conformance(url: str, key: str | None, model: str, seconds: float = SECONDS) -> int:
    """Check a gateway and print the result.

    seconds: after which the transcripts that are left are not run. Return the exit status: 1 if a
    check failed, if a transcript was not run, or if all was left out.
    """
    if find_spec("httpx2") is None:
        raise UsageError("--conformance needs httpx2; pip install 'onepolicy[server]'")
    import httpx2

    async def check() -> list[Outcome]:
        async with httpx2.AsyncClient(timeout=None, trust_env=False) as http:
            client = Client(http, url, key, model, seconds=seconds * OF_AN_ANSWER)
            return await check_gateway(client, print_status, seconds=seconds)

    outcomes = asyncio.run(check())
    print_outcomes(outcomes)
    nothing_passed = all(outcome.check or outcome.left_out for outcome in outcomes)
    return int(nothing_passed or any(outcome.check or outcome.not_run for outcome in outcomes))


async def check_gateway(
    client: Client,
    told: Callable[[str], None] = lambda name: None,
    *,
    seconds: float = math.inf,
) -> list[Outcome]:
    """Return the outcome of every transcript, one after the other.

    told: called with the name of each before it is played. seconds: after which the one that is
    played is broken off, and the others are not begun.
    """
    clock = asyncio.get_running_loop().time
    over_at = clock() + seconds
    await client.find_out()
    outcomes, over = [], f"{seconds:g} s were over"
    for transcript in load_transcripts():
        if clock() >= over_at:
            outcomes.append(Outcome(transcript, why=f"{over} before it", not_run=True))
            continue
        told(transcript.name)
        try:
            async with asyncio.timeout_at(over_at):
                outcomes.append(await check_transcript(transcript, client))
        except TimeoutError:
            outcomes.append(Outcome(transcript, why=f"{over} in the middle of it", not_run=True))
            if client.shows_trees:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_SECONDS):
                        await end_episode(client)
    return outcomes


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print a row for every transcript, and how many there are of each kind."""
    console, table = Console(), make_table("transcript", "dialect", "result", "")
    counts = {"pass": 0, "fail": 0, "left out": 0, "not run": 0}
    for outcome in outcomes:
        result, why = "pass", outcome.transcript.shape
        if outcome.not_run:
            result, why = "not run", outcome.why
        elif outcome.left_out:
            result, why = "left out", outcome.why
        elif outcome.check:
            result, why = "fail", f"{outcome.check}: {outcome.why}"
        counts[result] += 1
        table.add_row(outcome.transcript.name, outcome.transcript.path, result, why)
    console.print(table)
    console.print_line(", ".join(f"{count} {result}" for result, count in counts.items()))
    if counts["not run"]:
        console.print_line("not run: give the kit more time by --seconds")
    if not all(outcome.sees_tree or outcome.not_run for outcome in outcomes):
        console.print_line(UNSEEN)
