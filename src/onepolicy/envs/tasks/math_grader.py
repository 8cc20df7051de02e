"""The grader of mathematical answers. A wrong or unreadable response earns 0 and never raises."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import subprocess
import sys
import threading
import weakref
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path

from onepolicy.config import UsageError
from onepolicy.envs.counts import SKIPPED, TIMEOUTS, Counts
from onepolicy.envs.tasks.single_turn import extract_answer

LOG = logging.getLogger(__name__)
WORKER = Path(__file__).with_name("math_verify_worker.py")
MAX_TIMEOUTS = 8
"""Responses of one step that may run out of time.

Each of them costs `timeout` and the start of a new worker, a few seconds.
"""
_RELATION = r"[=<>≠≤≥]|\\(?:neq?|not\s*=|leq?|geq?|leqslant|geqslant|lt|gt)(?![a-zA-Z])"
BARE_RELATION = re.compile(
    rf"(?=.*(?:{_RELATION}))(?:{_RELATION}|[-+*/^()\d\s.,!]|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z]))+",
    re.DOTALL,
)
"""Pattern of a text of numbers, single letters and at least one relation, without words.

math-verify would read only its last number as the answer.
"""

SCIENTIFIC = re.compile(r"(?<![\w.\\])\d+(?:\.\d*)?[eE][+-]?\d{1,3}(?!\w|\.\d)")
"""Pattern of a number as JSON and Python write it: 1e-05."""
WORD_OR_DATE = re.compile(r"[A-Za-z]{3,}|[A-Z][a-z]|\d{4}-\d\d?-\d\d?")


class MathGrader:
    """A grader that runs math-verify in a worker process, with a time limit per response.

    A response like 9^{9^{9^9}} would otherwise block the run. math-verify's own time limit is a
    signal: it works in the main thread only and cannot stop one long computation on big integers.
    The worker starts with the first response that needs it and ends with this object.
    """

    def __init__(self, timeout: float = 5.0, startup: float = 60.0) -> None:
        """Store the settings. timeout: for one response [s]. startup: for math-verify's import [s].

        Raises UsageError if math-verify is not installed.
        """
        if find_spec("math_verify") is None:
            raise UsageError(
                "task.grader: math needs math-verify, which is not installed; pip install "
                "onepolicy[envs]"
            )
        self.timeout = timeout
        self.startup = startup
        self._lock = threading.RLock()
        self._process: subprocess.Popen[str] | None = None
        self._finalizer: weakref.finalize | None = None
        self._counts = Counts()  # since the last take_metrics

    def grade(self, response: str, answer: str, prefix: str = "") -> float:
        r"""Return 1 if the response's answer equals the reference mathematically, else 0.

        An unreadable response earns 0. So does a response that takes too long, and every response
        after MAX_TIMEOUTS of these in a step. Without a prefix math-verify searches for the answer:
        a \boxed{} first, then LaTeX, then the last number.
        """
        text = extract_answer(response, prefix)
        if text is None:
            return 0.0
        if text == answer.strip():
            return 1.0
        if _is_no_expression(answer) and answer.strip().lower() not in text.lower():
            return 0.0
        text = SCIENTIFIC.sub(_written_out, text)
        if prefix or BARE_RELATION.fullmatch(text):
            text = mark_as_latex(text)
        with self._lock:
            if self._counts.here[TIMEOUTS] >= MAX_TIMEOUTS:
                self._count_skipped()
                return 0.0
            reply = self._query_worker({"answer": mark_as_latex(answer), "response": text})
            self._counts.here[TIMEOUTS] += reply is None
        return float(reply is not None and reply["equal"])

    def take_metrics(self) -> dict[str, float]:
        """Return the counts since the last call and reset them.

        After this, responses are graded again even if too many took too long before.
        """
        return {name: count for name, count in self._counts.take().items() if count}

    def _count_skipped(self) -> None:
        counts = self._counts.here
        if not counts[SKIPPED]:
            LOG.warning(
                "%d responses of this step took the math grader longer than %g s each; the other "
                "responses earn 0 unread unless they are the reference itself "
                "(rollout/grader_skipped counts them)",
                counts[TIMEOUTS],
                self.timeout,
            )
        counts[SKIPPED] += 1

    def can_parse_answer(self, answer: str) -> bool:
        """Return whether math-verify finds an expression in this reference answer."""
        reply = self._query_worker({"answer": mark_as_latex(answer), "response": ""})
        return reply is not None and reply["readable"]

    def close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _query_worker(self, question: dict[str, str]) -> dict[str, bool] | None:
        """Return the worker's reply, or None if the worker took too long or died on the question.

        The next question then starts a new worker.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self.close()
            process = self._process or self._start_worker()
            reply = _exchange_line(process, json.dumps(question), self.timeout)
            if reply is None:
                self.close()
            return reply

    def _start_worker(self) -> subprocess.Popen[str]:
        # -P: the script's folder must not shadow modules (json, gym).
        command = [sys.executable, "-P", str(WORKER)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self._process, self._finalizer = process, weakref.finalize(self, _stop_process, process)
        if _exchange_line(process, "{}", self.startup) is None:
            self.close()
            raise RuntimeError(f"the math-verify worker did not start within {self.startup:g} s")
        return process


def mark_as_latex(answer: str) -> str:
    r"""Return the answer in $...$ unless it is marked as LaTeX already.

    math-verify reads a bare 2\sqrt{3} as 2, and 1e-05 as e - 5.
    """
    answer = SCIENTIFIC.sub(_written_out, answer)
    if "$" in answer or "\\boxed" in answer:
        return answer
    return f"${answer}$"


def _written_out(number: re.Match[str]) -> str:
    return format(Decimal(number[0]), "f")


def _is_no_expression(answer: str) -> bool:
    """Return whether an answer is a word or a date: math-verify reads a product or a sum."""
    infinite = answer.strip().lower() in ("inf", "infinity")
    return not infinite and WORD_OR_DATE.fullmatch(answer.strip()) is not None


def _exchange_line(
    process: subprocess.Popen[str], line: str, seconds: float
) -> dict[str, bool] | None:
    """Write one line and return the process's one-line reply.

    If that takes longer than `seconds`, kill the process and return None.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        reply = process.stdout.readline()
    except BrokenPipeError:
        return None
    finally:
        timer.cancel()
    if not reply.endswith("\n"):
        return None
    return json.loads(reply)


def _stop_process(process: subprocess.Popen[str]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # an unsent line to a process that has ended
            stream.close()
    process.wait()
