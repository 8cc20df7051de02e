"""Episodes that a program plays: `task.kind = "program"`.

An episode starts the program in a sandbox, answers its requests for turns, and ends with it. The
turns are sampled by the run's own function, as those of every environment, and `history.py` makes
the samples: one of each path, all with the episode's reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import socket
import time
from collections.abc import AsyncIterator
from typing import Unpack

import uvicorn
from transformers import PreTrainedTokenizerBase

from onepolicy.config import DuplicateRoutes, ProgramTask, UsageError
from onepolicy.config.input_files import read_template
from onepolicy.envs.counts import Counts
from onepolicy.envs.multiturn.episode import PathOptions, grade_beside
from onepolicy.envs.multiturn.prompt_checks import check_characters, check_prompt_length
from onepolicy.envs.multiturn.tokenization import encode_text
from onepolicy.envs.tasks.single_turn import Task
from onepolicy.gateway.connections import HTTP, raise_most_connections
from onepolicy.gateway.episodes import Episodes
from onepolicy.gateway.history import History, Plan
from onepolicy.gateway.program_sandbox import Ended, ProgramSandbox
from onepolicy.gateway.rendering import Renderer
from onepolicy.gateway.server import make_app
from onepolicy.gateway.session import Limits, Session
from onepolicy.gateway.socket_folder import SocketFolder
from onepolicy.interfaces import EpisodeError, MetricsSource, Problem, SampleFn
from onepolicy.types import Completion, Sample

LOG = logging.getLogger(__name__)
PROMPT = "{prompt}"
MODEL = "policy"
"""The model's name that programs are told; they may ask for any."""
LARGEST_REWARD = 1e9
CONNECTIONS, CONNECTIONS_OF_PROGRAM = 64, 16
"""Open connections to the gateway: some, and so many for each program that may run."""


class Programs:
    """The environment of programs."""

    def __init__(
        self,
        config: ProgramTask,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        **path: Unpack[PathOptions],
    ) -> None:
        """Store the settings. task: of the problems. Raises UsageError where no sandbox works."""
        self.config, self.task, self.tokenizer = config, task, tokenizer
        if config.template is not None:
            tokenizer.chat_template = read_template(config.template, "task.template")
        self.renderer = Renderer(tokenizer)
        if self.renderer.no_calls:
            reason = self.renderer.no_calls
            LOG.warning("task.command: the policy's calls of tools stay text: %s", reason)
        self.max_len = path["max_len"]
        self.duplicate_routes: DuplicateRoutes = path.get("duplicate_routes", "as-sampled")
        self.sandbox = ProgramSandbox(config)
        self._max_tokens = 0  # of a turn, the most of training and evaluation
        self._numbers = itertools.count()
        self._gateway: _Gateway | None = None
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._ended = Counts()  # since the last take_metrics
        self._told = False

    def train_problem(self, index: int) -> Problem:
        return self.task.train_problem(index)

    def held_out(self, count: int) -> list[Problem]:
        return self.task.held_out(count)

    def check(self, *, max_tokens: int, max_len: int) -> None:
        """Check before a run that prompts fit and that the sandbox works. Raises UsageError."""
        for problem in self.task.start_up_problems():
            ids = encode_text(self.tokenizer, problem.prompt)
            check_characters(self.tokenizer, ids, problem, problem.prompt)
            check_prompt_length(ids, max_tokens, max_len, problem)
        if not self._max_tokens:
            asyncio.run(self._check_sandbox())
        self._max_tokens = max(self._max_tokens, max_tokens)

    async def _check_sandbox(self) -> None:
        async with self._serving() as gateway:
            await self.sandbox.check(gateway.socket)

    async def episode(
        self, problem: Problem, sample: SampleFn, temperature: float
    ) -> tuple[Sample, ...]:
        """Start the program and return the samples of all its conversations.

        A program that dies or takes too long has ended its episode, with reward 0. Raises
        EpisodeError if it could not be started, or no turn of it was sampled to its end; an error
        of the engine ends the program and is raised.
        """
        async with self._slot(), self._serving() as gateway:
            return await self._play(problem, sample, temperature, gateway)

    async def _play(
        self, problem: Problem, sample: SampleFn, temperature: float, gateway: _Gateway
    ) -> tuple[Sample, ...]:
        name, lost = f"episode{next(self._numbers)}", asyncio.Event()
        failures: list[BaseException] = []

        async def sample_turn(plan: Plan, number: int, max_tokens: int) -> tuple[Completion, None]:
            try:
                completion = await sample(
                    plan.tokens,
                    max_tokens=max_tokens,
                    routes_from=plan.routes_from,
                    root=plan.initial_prompt_len,
                )
            except Exception as error:  # the run's, not the program's: it ends the episode
                failures.append(error)
                lost.set()
                raise
            return completion, None

        history = self._history()
        limits = Limits(self.config.max_turns, self.config.max_tokens)
        session = Session(
            sample_turn, history, sampling={"temperature": temperature}, limits=limits, name=name
        )
        key, begun = gateway.open(name, session), time.monotonic()
        program = asyncio.ensure_future(
            self.sandbox.run(*self._command(problem), key, gateway.socket)
        )
        waiting = asyncio.ensure_future(lost.wait())
        try:
            await asyncio.wait({program, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if failures:
                raise failures[0]
            ended = program.result()
        finally:
            gateway.close(name)
            for each in (program, waiting):
                each.cancel()
            await asyncio.gather(program, waiting, session.close(), return_exceptions=True)
        reward = await grade_beside(self._reward, problem, ended)
        samples = history.to_samples(reward=reward, temperature=temperature)
        if not samples:
            raise EpisodeError(f"{_lack_of_turns(session, ended)}; {_describe(ended)}")
        self._count(ended, history, time.monotonic() - begun)
        return samples

    def _history(self) -> History:
        return History(
            self.renderer,
            max_len=self.max_len,
            max_tokens=self._max_tokens or self.max_len,
            thoughts=self.config.thoughts,
            credit=self.config.credit,
            duplicate_routes=self.duplicate_routes,
        )

    def _command(self, problem: Problem) -> tuple[list[str], str]:
        """Return the words of a problem's command, and the text of its stdin."""
        words = [word.replace(PROMPT, problem.prompt) for word in self.config.command]
        if any(PROMPT in word for word in self.config.command):
            return words, ""
        return words, problem.prompt

    def _reward(self, problem: Problem, ended: Ended) -> float:
        """Return the reward of a program that has ended, 0 unless it did so by itself and well."""
        if ended.status != 0:
            return 0.0
        if self.config.reward == "exit":
            return 1.0
        answer = ended.printed
        if self.config.result_file is not None:
            answer = ended.file or ""
        if self.config.reward == "grader":
            return float(self.task.grade(problem, answer))
        return _number(answer) or 0.0

    def _count(self, ended: Ended, history: History, seconds: float) -> None:
        counts, ends = history.counts(), self._ended.here
        ends["episodes"] += 1
        ends["seconds"] += seconds
        ends["paths"] += len(history.last_turns())
        ends["broken"] += sum(root.break_ is not None for root in history.roots)
        ends["abandoned"] += counts["abandoned"]
        ends["auxiliary"] += counts["auxiliary"]
        ends["out_of_time"] += ended.status is None
        ends["died"] += ended.status not in (0, None)
        lacks_file = self.config.result_file is not None and ended.file is None
        wrong = self.config.reward == "file" and _number(ended.file or "") is None
        ends["no_result"] += ended.status == 0 and (lacks_file or wrong)
        if ended.status != 0 and self.config.reward != "exit" and not self._told:
            self._told = True
            LOG.warning("a program earned 0: %s", _describe(ended))

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the programs that ended since the last call, and the grader's."""
        counts = self._ended.take()
        episodes = counts.pop("episodes", 0)
        metrics = {f"program/{name}": counts[name] / episodes for name in counts if episodes}
        if isinstance(self.task, MetricsSource):
            metrics |= self.task.take_metrics()
        return metrics

    def _slot(self) -> asyncio.Semaphore:
        """Return the semaphore of programs in the running event loop."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self.config.concurrency)
        return self._slots[1]

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[_Gateway]:
        """Give the gateway, which runs as long as somebody uses it."""
        gateway = self._gateway
        if gateway is None:
            gateway = self._gateway = _Gateway(self.config.concurrency)
        gateway.users += 1
        try:
            await gateway.start()
            yield gateway
        finally:
            gateway.users -= 1
            if not gateway.users:
                self._gateway = None
                await gateway.stop()


class _Server(uvicorn.Server):
    """uvicorn inside a run, which has its own handlers of signals."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


class _Gateway:
    """The gateway's server on a Unix socket in a folder of its own, for all episodes of a loop.

    Its connections are files of the process that trains, so they are bounded.
    """

    def __init__(self, programs: int) -> None:
        """Make the server. programs: how many may run at once."""
        self.users = 0
        self._folder = SocketFolder()
        self.socket = self._folder.socket
        self._sessions: dict[str, Session] = {}
        self._episodes = Episodes(self._sessions.__getitem__)
        app = make_app(self._episodes, MODEL)
        # asyncio accepts a backlog at once, and some of them before it closes the first connection.
        most = raise_most_connections() // 4
        most = min(CONNECTIONS + CONNECTIONS_OF_PROGRAM * programs, most)
        config = uvicorn.Config(
            app,
            http=HTTP,
            ws="none",
            backlog=most,
            limit_concurrency=most,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, if that has not begun. Raises UsageError where it is not possible."""
        if self._running is None:
            self._running = asyncio.create_task(self._server.serve([self._listen()]))
        while not self._server.started:
            if self._running.done():
                raise UsageError(
                    f"task.kind: the gateway of programs does not start at {self.socket}"
                )
            await asyncio.sleep(0.001)

    def _listen(self) -> socket.socket:
        """Return the server's socket. Raises UsageError where none can be made."""
        try:
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(str(self.socket))
                # A sandbox has another user. The folder is closed to all others.
                self.socket.chmod(0o666)
            except BaseException:
                listener.close()
                raise
        except OSError as error:
            raise UsageError(
                f"task.kind: the gateway of programs has no socket at {self.socket} ({error}); a "
                "path has 107 bytes at most: set the variable TMPDIR to a shorter one"
            ) from error
        return listener

    def open(self, name: str, session: Session) -> str:
        """Begin an episode and return its API key."""
        self._sessions[name] = session
        key = self._episodes.key_of(name)
        self._episodes.find(key)
        return key

    def close(self, name: str) -> None:
        """End an episode: its key serves nothing any more."""
        self._episodes.end(name)
        del self._sessions[name]

    async def stop(self) -> None:
        """End the server and remove its folder."""
        if self._running is not None:
            self._server.should_exit = True
            await asyncio.gather(self._running, return_exceptions=True)
        self._folder.remove()


def _number(text: str) -> float | None:
    """Return the one number of a text, None if it is none or too large for a reward."""
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value) or abs(value) > LARGEST_REWARD:
        return None
    return value


def _lack_of_turns(session: Session, ended: Ended) -> str:
    """Return why an episode has no sample."""
    if session.requests and ended.status is None:
        return "no turn was sampled in its time; raise task.seconds"
    if session.requests:
        return "the program ended before a turn was sampled"
    if session.refused is not None:
        return f"no request of the program could be served: {session.refused}"
    return "the program asked for no turn"


def _describe(ended: Ended) -> str:
    """Return how a program ended, and the end of its stderr."""
    how = f"it ended with status {ended.status}"
    if ended.status is None:
        how = "it ran into task.seconds"
    said = ended.errors.strip() or ended.printed.strip()
    if said:
        how += f": {said[-400:]}"
    return how
