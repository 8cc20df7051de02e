"""A gateway over a scripted engine, asked without a socket."""

import asyncio
import dataclasses
import json

import httpx2

from onepolicy.gateway.episodes import Episodes
from onepolicy.gateway.history import History
from onepolicy.gateway.rendering import Renderer
from onepolicy.gateway.session import Session, sampling_on
from onepolicy.types import Sampling
from support.recording_engine import RecordingEngine
from support.scripted_engine import HERMES, tokenizer_of

SAMPLING = Sampling(1.0, 400, top_p=0.9, support=True)


def session_on(engine, history, sampling, seeds, **how):
    """Return a session that samples on an engine, which `session.engine` is."""
    sample = sampling_on(engine, sampling, seeds)
    session = Session(sample, history, sampling=dataclasses.asdict(sampling), **how)
    session.engine = engine
    return session


def session_of(*texts, renderer=None, engine=None):
    renderer = renderer or Renderer(tokenizer_of(HERMES))
    engine = engine or RecordingEngine(renderer.tokenizer, texts)
    history = History(renderer, max_len=engine.caps.max_len, max_tokens=SAMPLING.max_tokens)
    return session_on(engine, history, SAMPLING, lambda turn: turn)


class App:
    """The application, and a client that plays the episode `a`."""

    def __init__(self, *texts, pace=None):
        from onepolicy.gateway.server import make_app  # needs the extra gateway

        renderer = Renderer(tokenizer_of(HERMES))
        self.engine = RecordingEngine(renderer.tokenizer, texts)
        self.episodes = Episodes(lambda name: session_of(renderer=renderer, engine=self.engine))
        self.secret, self.key = self.episodes.secret, self.episodes.key_of("a")
        self.asgi = make_app(self.episodes, "tiny", ended=self.end, pace=pace)
        self.fail, self.ended = False, None

    def end(self, name, session, reward):
        if self.fail:
            raise RuntimeError("lost")
        self.ended = (name, session, reward)
        return {"turns": len(session.history.turns)}

    def post(self, path, body, key=None, headers=()):
        key = self.key if key is None else key
        headers = {"authorization": f"Bearer {key}"} | dict(headers)
        if not key:
            del headers["authorization"]
        data = body if isinstance(body, str) else json.dumps(body)
        return self.send("POST", path, content=data, headers=headers)

    def send(self, method, path, **how):
        async def request():
            async with self.client() as client:
                return await client.request(method, path, **how)

        return asyncio.run(request())

    def client(self):
        transport = httpx2.ASGITransport(self.asgi)
        return httpx2.AsyncClient(transport=transport, base_url="http://gateway")
