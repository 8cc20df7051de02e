"""`onepolicy gateway`: an engine, its trainer's scorer and episodes, behind one server."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from onepolicy.build.components import (
    check_replayable,
    duplicate_routes_of,
    load_tokenizer_and_max_len,
)
from onepolicy.build.measure import EngineAndScorer, build_engine_and_scorer, measure_config
from onepolicy.config.input_files import resolve_model
from onepolicy.console import print_status, print_text
from onepolicy.gateway.connections import HTTP, raise_most_connections
from onepolicy.gateway.episodes import Episodes
from onepolicy.gateway.history import History, Thoughts
from onepolicy.gateway.rendering import Renderer
from onepolicy.gateway.server import make_app
from onepolicy.gateway.session import Limits, Session, sampling_on
from onepolicy.gateway.traces import TraceWriter
from onepolicy.objective.advantages import compute_outcomes
from onepolicy.replay.checks import RoutingError, fill_missing_routes
from onepolicy.rollout.collect import request_seed
from onepolicy.support.checks import SupportError
from onepolicy.train.pack import pack
from onepolicy.types import Group, Sampling, TokenBatch

SECONDS_TO_END = 20
"""Seconds that turns may take after Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """The options of the command, beside the settings."""

    out: Path
    name: str  # of the model, in /v1/models
    template: str | None  # a chat template in place of the tokenizer's
    thoughts: Thoughts
    limits: Limits  # of an episode
    secret: str | None  # None: a new one


def run_gateway(
    tree: dict[str, Any], overrides: list[str], options: GatewayOptions, listener: socket.socket
) -> int:
    """Serve programs until Ctrl-C. listener: bound to an address."""
    app, episodes = build_gateway(tree, overrides, options)
    shown = "the one of --key-env"
    if options.secret is None:
        shown = episodes.secret
    host, port = listener.getsockname()
    print_text(f"gateway: http://{host}:{port}  secret: {shown}")
    config = uvicorn.Config(
        app,
        http=HTTP,
        ws="none",
        limit_concurrency=raise_most_connections(),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SECONDS_TO_END,
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def build_gateway(
    tree: dict[str, Any], overrides: list[str], options: GatewayOptions
) -> tuple[Starlette, Episodes]:
    """Build the engine, the scorer and the server in this process."""
    config = measure_config(tree, overrides, None)
    model = resolve_model(config.model)
    check_replayable(config, model)
    tokenizer, max_len = load_tokenizer_and_max_len(config, model)
    if options.template is not None:
        tokenizer.chat_template = options.template
    renderer = Renderer(tokenizer)
    if renderer.no_calls:
        print_status(f"calls of tools are not read: {renderer.no_calls}")
    pair = build_engine_and_scorer(config, model, max_len)
    recorder = Recorder(pair, renderer, options)
    episodes = Episodes(recorder.begin, options.secret)
    closed = functools.partial(recorder.leave, episodes)
    return make_app(episodes, options.name, ended=recorder.end, closed=closed), episodes


class Recorder:
    """Begins episodes, and scores and writes those that ended."""

    def __init__(
        self,
        pair: EngineAndScorer,
        renderer: Renderer,
        options: GatewayOptions,
    ) -> None:
        self.pair, self.renderer, self.options = pair, renderer, options
        self.writer = TraceWriter(options.out)
        given = pair.config.rollout.sampling
        self.sampling = Sampling(
            given.temperature,
            given.max_tokens,
            given.top_p,
            given.top_k,
            given.min_p,
            stop=(int(renderer.tokenizer.eos_token_id),),
            support=given.narrows,
        )
        self.route_spec = pair.route_spec
        if self.route_spec is not None:
            self.route_spec = dataclasses.replace(self.route_spec, missing="native")

    def begin(self, name: str) -> Session:
        """Begin an episode. Its random numbers depend on the run's seed and on its name alone."""
        digest = hashlib.blake2b(name.encode(), digest_size=6).digest()
        number = int.from_bytes(digest, "little")
        caps = self.pair.engine.caps
        history = History(
            self.renderer,
            max_len=caps.max_len,
            max_tokens=self.sampling.max_tokens,
            thoughts=self.options.thoughts,
            duplicate_routes=duplicate_routes_of(self.pair.config),
            expects_routes=caps.returns_routes and self.route_spec is not None,
        )
        sample = sampling_on(
            self.pair.engine,
            self.sampling,
            functools.partial(request_seed, self.pair.config.seed, number, 0, 0),
            route_spec=self.route_spec,
            name=f"episode {name}",
        )
        return Session(
            sample,
            history,
            sampling=dataclasses.asdict(self.sampling),
            limits=self.options.limits,
            name=f"episode {name}",
        )

    def end(self, name: str, session: Session, reward: float) -> dict[str, Any]:
        """Score and write an episode that has its reward. Return its line.

        If it cannot be scored, write a line that says so, and raise the error.
        """
        history = session.history
        try:
            scored, native, note = self._score(name, session, reward)
        except Exception as error:  # whatever it is, the trace says that the episode was played
            note = f"not scored: {error}"
            self.writer.write(name, history, scored=None, reward=reward, note=note, is_open=True)
            raise
        return self.writer.write(
            name, history, scored=scored, native=native, reward=reward, note=note
        )

    def _score(
        self, name: str, session: Session, reward: float
    ) -> tuple[TokenBatch | None, TokenBatch | None, str]:
        """Return the scored batch, the same without the engine's routes, and a note on a fault."""
        batch = self._pack(name, session, reward)
        if batch is None:
            return None, None, ""
        scorer = self.pair.scorer
        native: TokenBatch | None = scorer.score(batch, replay=False)
        if scorer.routers is None:
            return native, None, ""
        try:
            return scorer.score(batch), native, ""
        except (RoutingError, SupportError) as error:
            return native, None, str(error)

    def leave(self, episodes: Episodes) -> None:
        """Note the episodes that nobody ended before the gateway stopped."""
        for name in episodes.names:
            history = episodes.end(name).history
            self.writer.write(name, history, scored=None, reward=None, note="not ended")

    def _pack(self, name: str, session: Session, reward: float) -> TokenBatch | None:
        samples = tuple(
            fill_missing_routes(sample, self.route_spec, name)
            for sample in session.history.to_samples(
                reward=reward, temperature=self.sampling.temperature
            )
        )
        if not samples:
            return None
        groups = [Group(0, tuple(dataclasses.replace(s, episode=0) for s in samples))]
        return pack(compute_outcomes(groups, self.pair.config.objective))
