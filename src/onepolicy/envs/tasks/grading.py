"""Graders: response text -> reward. A wrong or unreadable response earns 0, it never raises."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import subprocess
import sys
import threading
import weakref
from importlib.util import find_spec
from pathlib import Path

from onepolicy.config import UsageError

LOG = logging.getLogger(__name__)
WORKER = Path(__file__).with_name("math_verify_worker.py")
MOST_TIMEOUTS = 8
"""Responses of one step that may run out of time; each costs `timeout` and a new worker, a few seconds."""
_RELATION = r"[=<>≠≤≥]|\\(?:neq?|not\s*=|leq?|geq?|leqslant|geqslant|lt|gt)(?![a-zA-Z])"
FORMULA = re.compile(
    rf"(?=.*(?:{_RELATION}))(?:{_RELATION}|[-+*/^()\d\s.,!]|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z]))+",
    re.DOTALL,
)
"""Numbers, single letters and a relation, and nothing else: math-verify would take its last number for the answer."""


def answer_text(response: str, prefix: str) -> str | None:
    """What follows the last `prefix`, stripped (everything, if it is empty); None if the response lacks it."""
    if not prefix:
        return response.strip()
    _, found, rest = response.rpartition(prefix)
    return rest.strip() if found else None


def exact(response: str, answer: str, prefix: str = "") -> float:
    """1 if the response's answer is this string, else 0."""
    return float(answer_text(response, prefix) == answer.strip())


class MathGrader:
    """math-verify in a process of its own, so that a response like 9^{9^{9^9}} costs `timeout` seconds and not the run.

    math-verify's own time limit is a signal: it works in the main thread only and cannot stop one long computation on
    big integers. The process starts with the first response that needs it and ends with this object.
    """

    def __init__(self, timeout: float = 5.0, startup: float = 60.0) -> None:
        if find_spec("math_verify") is None:
            raise UsageError(
                "task.grader: math needs math-verify, which is not installed; pip install onepolicy[envs]"
            )
        self.timeout = timeout  # seconds for one response
        self.startup = startup  # seconds for the import
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._finalizer: weakref.finalize | None = None
        self._timeouts = self._skipped = 0  # since the last take_metrics

    def grade(self, response: str, answer: str, prefix: str = "") -> float:
        """1 if the response's answer equals the reference mathematically, else 0 (also: unreadable, out of time, or
        MOST_TIMEOUTS responses of the step were before).

        Without a prefix math-verify looks for the answer itself: a \\boxed{} first, then LaTeX, then the last number.
        """
        text = answer_text(response, prefix)
        if text is None:
            return 0.0
        if text == answer.strip():
            return 1.0
        if self._timeouts >= MOST_TIMEOUTS:
            self._skip()
            return 0.0
        if prefix or FORMULA.fullmatch(text):
            text = delimited(text)
        reply = self._ask({"answer": delimited(answer), "response": text})
        self._timeouts += reply is None
        return float(reply is not None and reply["equal"])

    def take_metrics(self) -> dict[str, float]:
        """Since the last call. A step begins anew: responses are read again after too many that took too long."""
        counted = {
            "rollout/grader_timeouts": self._timeouts,
            "rollout/grader_skipped": self._skipped,
        }
        self._timeouts = self._skipped = 0
        return {name: float(count) for name, count in counted.items() if count}

    def _skip(self) -> None:
        if not self._skipped:
            LOG.warning(
                "%d responses of this step took the math grader longer than %g s each; those that are left and are not "
                "the reference itself earn 0 unread (rollout/grader_skipped counts them)",
                self._timeouts,
                self.timeout,
            )
        self._skipped += 1

    def readable(self, answer: str) -> bool:
        """Whether math-verify finds an expression in this reference answer."""
        reply = self._ask({"answer": delimited(answer), "response": ""})
        return reply is not None and reply["readable"]

    def close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _ask(self, question: dict[str, str]) -> dict[str, bool] | None:
        """The worker's reply; None if it took too long or died on the question (the next one starts a new worker)."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self.close()
            process = self._process or self._start()
            reply = _exchange(process, json.dumps(question), self.timeout)
            if reply is None:
                self.close()
            return reply

    def _start(self) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-P",
            str(WORKER),
        ]  # -P: the script's folder must not shadow modules (json, gym)
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self._process, self._finalizer = process, weakref.finalize(self, _stop, process)
        if _exchange(process, "{}", self.startup) is None:
            self.close()
            raise RuntimeError(f"the math-verify worker did not start within {self.startup:g} s")
        return process


def delimited(answer: str) -> str:
    """An answer that is nothing but an expression, marked as LaTeX: math-verify reads a bare 2\\sqrt{3} as 2."""
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"


def _exchange(process: subprocess.Popen[str], line: str, seconds: float) -> dict[str, bool] | None:
    """One line there, one line back; the process is killed and None returned if that takes longer than `seconds`."""
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
    return json.loads(reply) if reply.endswith("\n") else None


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # an unsent line, and nobody left to read it
            stream.close()
    process.wait()
