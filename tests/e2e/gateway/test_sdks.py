"""The official SDKs of OpenAI and Anthropic against the gateway: bodies, streams, tools, errors."""

import asyncio
import json

import pytest

from support.gateway_app import App

openai = pytest.importorskip("openai", reason="make test-gateway installs it")
anthropic = pytest.importorskip("anthropic", reason="make test-gateway installs it")
httpx = pytest.importorskip("httpx")
httpx2 = pytest.importorskip("httpx2")
pytestmark = pytest.mark.gateway

CALL = '<call>\n{"name": "look", "arguments": {"q": "x"}}\n</call>'
TEXTS = ("<think>\nhm\n</think>\n\nso " + CALL + CALL, "the end")
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
LOOK = {"name": "look", "description": "Look."}


def client_of(kind, app, **how):
    how = {"api_key": app.key, "max_retries": 0} | how
    if kind is anthropic:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app.asgi))
        return anthropic.AsyncAnthropic(base_url="http://gateway", http_client=http, **how)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi))
    return openai.AsyncOpenAI(base_url="http://gateway/v1", http_client=http, **how)


async def play_chat(client, stream):
    """Play two turns and return both messages of the assistant."""
    tools = [{"type": "function", "function": LOOK | {"parameters": SCHEMA}}]
    messages = [{"role": "user", "content": "q"}]
    seen = []
    while True:
        given = {"model": "tiny", "messages": messages, "tools": tools}
        if stream:
            async with client.chat.completions.stream(
                **given, stream_options={"include_usage": True}
            ) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(**given)
        (choice,) = answer.choices
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + len_of(len(seen))
        message = choice.message
        calls = message.tool_calls or []
        seen.append((message.content, [(c.function.name, c.function.arguments) for c in calls]))
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        if not calls:
            return seen
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages += [{"role": "tool", "tool_call_id": c.id, "content": "seen"} for c in calls]


async def play_anthropic(client, stream):
    tools = [LOOK | {"input_schema": SCHEMA}]
    messages = [{"role": "user", "content": "q"}]
    seen = []
    while True:
        given = {"model": "tiny", "messages": messages, "tools": tools, "max_tokens": 9000}
        if stream:
            async with client.messages.stream(**given) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**given)
        assert answer.usage.output_tokens == len_of(len(seen))
        counted = await client.messages.count_tokens(model="tiny", messages=messages, tools=tools)
        assert counted.input_tokens == answer.usage.input_tokens
        calls = [block for block in answer.content if block.type == "tool_use"]
        texts = [block.text for block in answer.content if block.type == "text"]
        seen.append(("".join(texts), [(c.name, json.dumps(c.input)) for c in calls]))
        assert answer.stop_reason == ("tool_use" if calls else "end_turn")
        if not calls:
            return seen
        messages.append({"role": "assistant", "content": answer.content})
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": "seen"} for c in calls]
        messages.append({"role": "user", "content": results})


async def play_responses(client, stream):
    tools = [LOOK | {"type": "function", "parameters": SCHEMA}]
    given = [{"role": "user", "content": "q"}]
    seen = []
    while True:
        how = {"model": "tiny", "input": given, "tools": tools, "store": False}
        if stream:
            async with client.responses.stream(**how) as events:
                answer = await events.get_final_response()
        else:
            answer = await client.responses.create(**how)
        assert (answer.status, answer.usage.output_tokens) == ("completed", len_of(len(seen)))
        calls = [item for item in answer.output if item.type == "function_call"]
        seen.append((answer.output_text, [(c.name, c.arguments) for c in calls]))
        if not calls:
            return seen
        given += [item.model_dump(exclude={"parsed_arguments"}) for item in answer.output]
        given += [
            {"type": "function_call_output", "call_id": c.call_id, "output": "seen"} for c in calls
        ]


def len_of(turn):
    return len(TEXTS[turn]) + 1


PLAYED = [("so", [("look", '{"q": "x"}')] * 2), ("the end", [])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "play"),
    [(openai, play_chat), (anthropic, play_anthropic), (openai, play_responses)],
)
def test_a_conversation_with_parallel_calls(kind, play, stream):
    app = App(*TEXTS)
    assert asyncio.run(play(client_of(kind, app), stream)) == PLAYED
    history = app.episodes.find(app.key).history
    first, second = history.turns
    assert second.parent is first  # continued from our ids
    assert len(history.to_samples(reward=1.0, temperature=1.0)) == 1


def test_all_dialects_give_the_same_tokens():
    paths = []
    for kind, play in ((openai, play_chat), (anthropic, play_anthropic), (openai, play_responses)):
        app = App(*TEXTS)
        asyncio.run(play(client_of(kind, app), stream=False))
        paths.append(app.episodes.find(app.key).history.turns[-1].path.tokens)
    assert paths[0] == paths[1] == paths[2]


def test_errors_are_the_sdks_own():
    app = App("yes")
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "q"}]}

    async def refused():
        with pytest.raises(openai.AuthenticationError):
            await client_of(openai, app, api_key="x").chat.completions.create(**ask)
        with pytest.raises(anthropic.AuthenticationError):
            await client_of(anthropic, app, api_key="x").messages.create(**ask, max_tokens=9)
        with pytest.raises(openai.BadRequestError, match="n: one answer"):
            await client_of(openai, app).chat.completions.create(**ask, n=2)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client_of(openai, app).responses.create(
                model="tiny", input="x", previous_response_id="r"
            )
        await client_of(openai, app).models.list()
        models = await client_of(anthropic, app).models.list()
        assert models.data[0].id == "tiny"

    asyncio.run(refused())


def test_an_engine_that_fails_once_is_asked_again_by_the_sdk():
    app = App("yes")
    generate, failures = app.engine.generate, [RuntimeError("lost")]

    async def fail_once(*args, **how):
        if failures:
            raise failures.pop()
        return await generate(*args, **how)

    app.engine.generate = fail_once
    client = client_of(openai, app, max_retries=1)
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "q"}]}
    answer = asyncio.run(client.chat.completions.create(**ask))
    assert answer.choices[0].message.content == "yes"
    assert app.episodes.find(app.key).history.counts()["turns"] == 1
