"""Conversations that a program plays through the gateway: bits, roots, reasons, branches."""

import asyncio
import dataclasses
import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from onepolicy.config import ReActTask, UsageError
from onepolicy.envs import make_environment
from onepolicy.gateway.breaks import Break
from onepolicy.gateway.history import History
from onepolicy.gateway.messages import Call, Message, Request, RequestError, join_calls
from onepolicy.gateway.rendering import Placeholders, Renderer
from onepolicy.gateway.session import Limits
from onepolicy.gateway.turns import Reason
from onepolicy.gateway.unknown import UnknownText
from onepolicy.rollout.collect import play_episode, request_seed
from onepolicy.support.trace import SupportTrace
from onepolicy.types import Sampling
from support.examples import examples
from support.gateway_app import session_on
from support.recording_engine import RecordingEngine, assert_equal_samples
from support.scripted_engine import FORGETFUL, HERMES, TEMPLATE, tokenizer_of

PRODUCTS = {"kind": "gym", "name": "products", "params": {"min_digits": 2, "max_digits": 2}}
SAMPLING = Sampling(1.0, 100, top_p=0.9, support=True)
USER, AGAIN = Message("user", "question"), Message("user", "go on")
SYSTEM = Message("system", "be brief")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TOKENIZER = tokenizer_of(HERMES)
RENDERER = Renderer(TOKENIZER)
ENVIRONMENT = make_environment(
    ReActTask(problems=PRODUCTS, tools=[{"kind": "calculator"}], instructions="", max_turns=20),
    TOKENIZER,
    max_len=4000,
)


def call(name, **arguments):
    return f"<call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</call>"


def session_of(*texts, limits=None, renderer=RENDERER, thoughts="keep", max_tokens=100, **engine):
    engine = RecordingEngine(renderer.tokenizer, texts, **engine)
    history = History(
        renderer,
        max_len=engine.caps.max_len,
        max_tokens=max_tokens,
        thoughts=thoughts,
        expects_routes=True,
    )
    return session_on(engine, history, SAMPLING, lambda turn: turn, limits=limits)


def ask(session, *messages, key=None, repeated=False, **how):
    return asyncio.run(session.answer(Request(messages, **how), key, repeated=repeated))


def reply(turn, text):
    return Message("tool", text, call_id=turn.message.calls[0].id)


def samples_of(session):
    return session.history.to_samples(reward=1.0, temperature=1.0)


def reason_of(turn):
    return turn.root.break_ and turn.root.break_.reason


async def play_as_program(session, problem):
    """Play a problem of the calculator as a program does: by messages and calls of tools."""
    messages = [Message("user", problem.prompt)]
    while True:
        request = Request(tuple(messages), tuple(ENVIRONMENT.turns.schemas))
        turn = await session.answer(request)
        if turn.finish != "stop" or not turn.message.calls:
            return
        messages.append(turn.message)
        for each in turn.message.calls:
            (text,) = json.loads(each.arguments).values()
            answer = await ENVIRONMENT.tools["calculator"].call(text)
            messages.append(Message("tool", answer, call_id=each.id))


EXPRESSIONS = st.sampled_from(["1", "2 + 3", "12 * 34", "7 /", "<eos>", ""])
THOUGHTS = st.sampled_from(["", "<think>\nhm <eos>\n</think>\n\n", "so: "])
CALLS = st.lists(EXPRESSIONS, min_size=1, max_size=3).map(
    lambda given: "".join(call("calculator", expression=each) for each in given)
)
TURNS = st.lists(st.tuples(THOUGHTS, CALLS).map("".join), max_size=5)


@examples(20)
@given(TURNS, st.sampled_from([40, 90, 400]), st.booleans())
def test_equals_the_same_episode_of_our_own(turns, max_tokens, routes):
    problem, texts = ENVIRONMENT.train_problem(0), [*turns, "the end"]
    sampling = dataclasses.replace(SAMPLING, max_tokens=max_tokens)
    engines = [RecordingEngine(TOKENIZER, texts, routes=routes) for _ in range(2)]

    def seeds(turn):
        return request_seed(0, problem.id, 5, 1, turn)

    (ours,) = asyncio.run(play_episode(engines[0], ENVIRONMENT, problem, sampling, seeds))
    history = History(RENDERER, max_len=4000, max_tokens=max_tokens)
    session = session_on(engines[1], history, sampling, seeds)
    asyncio.run(play_as_program(session, problem))
    (recorded,) = samples_of(session)
    assert_equal_samples(recorded, ours)
    assert engines[0].requests == engines[1].requests


def test_replies_of_tools_are_escaped_as_the_template_does():
    """Llama 3.1's writes them as JSON strings."""
    escaping = HERMES.replace("<tool>{{ m['content'] }}", "<tool>{{ m['content'] | tojson }}")
    tokenizer = tokenizer_of(escaping)
    odd = 'say "hi"\nline \\ <eos>'
    session = session_of(call("look"), "done", renderer=Renderer(tokenizer))
    first = ask(session, USER, tools=(TOOL,))
    second = ask(session, *first.conversation, reply(first, odd), tools=(TOOL,))
    tail = tokenizer.decode(second.path.tokens[first.length : second.start])
    written = json.dumps(odd, ensure_ascii=False)
    assert tail == f"<tool>{written}<eos><bot>"
    alone = session_of("done", renderer=Renderer(tokenizer))
    whole = ask(alone, *first.conversation, reply(first, odd), tools=(TOOL,))
    assert f"<tool>{written}<eos><bot>" in tokenizer.decode(whole.path.tokens[: whole.start])


def test_a_reply_right_behind_its_call_leaves_the_turn_whole():
    """As some programs of the Responses API order them: call, reply, the turn's next call."""
    texts = call("look", a=1) + call("look", a=2), "one", "two"
    session = session_of(*texts, max_tokens=200)
    first = ask(session, USER, tools=(TOOL,))
    one, two = first.message.calls
    seen = [Message("tool", each.id, call_id=each.id) for each in (one, two)]
    apart = [
        Message("assistant", calls=(one,)),
        seen[0],
        Message("assistant", calls=(two,)),
        seen[1],
    ]
    second = ask(session, USER, *apart, tools=(TOOL,))
    assert second.parent is first
    together = ask(session, USER, first.message, *seen, tools=(TOOL,))
    assert together.parent is first
    assert together.path.tokens[: together.start] == second.path.tokens[: second.start]
    other = [Message("assistant", calls=(one,)), seen[0], Message("assistant", "so", calls=(two,))]
    assert join_calls(other, {one.id: (one.id, two.id)}) == tuple(other)
    repeated = [
        Message("assistant", calls=(one,))
    ] * 20_000  # a quadratic search would take minutes
    assert join_calls(repeated, {one.id: (one.id, two.id)}) == tuple(repeated)


def test_users_that_follow_each_other_are_joined_where_roles_must_alternate():
    strict = TEMPLATE.replace(
        "{% for m in messages %}",
        "{% for m in messages %}"
        "{% if loop.index0 and m['role'] == messages[loop.index0 - 1]['role'] "
        "%}{{ raise_exception('roles must alternate') }}{% endif %}",
        1,
    )
    renderer = Renderer(tokenizer_of(strict))
    session = session_of("yes", "no", renderer=renderer)
    first = ask(session, USER, AGAIN)
    second = ask(session, *first.conversation, AGAIN, USER)
    assert second.parent is first
    text = renderer.tokenizer.decode(second.path.tokens[: second.start])
    assert text == "<user>question\n\ngo on<eos><bot>yes<eos><user>go on\n\nquestion<eos><bot>"
    apart = session_of("yes", renderer=Renderer(tokenizer_of(TEMPLATE)))
    turn = ask(apart, USER, AGAIN)
    written = TOKENIZER.decode(turn.path.tokens[: turn.start])
    assert written == "<user>question<eos><user>go on<eos><bot>"


def test_white_space_beside_the_marks_of_thoughts_stays():
    for text, texts, written in (
        (" a\n<think>\n\n b \n</think>  c ", [" a", "b", "c "], "0\n<think>\n\n 1 \n</think>  2"),
        ("<think>\n</think>\n", [], "<think>\n</think>\n"),
        ("</think><think>x", ["x"], "</think><think>0"),
        ("plain ", ["plain "], "0"),
    ):
        hidden = Placeholders([text], ["<eos>"])
        assert re.sub("textofmessage([0-9])x", r"\1", hidden.hide_turn(text)) == written
        assert hidden.texts == texts


def test_odd_texts_take_no_time():
    """A quadratic search would take minutes, and the test's limit."""
    many = 1_000_000
    hidden = Placeholders([f"textofmessage{'s' * many}"], ["<eos>"])
    assert len(hidden.hide("x")) < 100
    assert len(Placeholders([], ["<eos>"]).hide_turn("a" + " " * many + "b<think>")) < 100
    assert RENDERER.calls.find("<call>" * (many // 6)) == []
    assert len(RENDERER.calls.find("<call>x</call>" * 1000)) == 1000


def test_a_turn_is_continued_from_its_ids_however_its_message_comes_back():
    session = session_of("  so  " + call("look", b=1.0, a=[2, {"c": 0.5}]), "done")
    first = ask(session, USER, tools=(TOOL,))
    (made,) = first.message.calls
    assert first.message.text == "so"
    assert made.arguments == '{"b": 1.0, "a": [2, {"c": 0.5}]}'
    sent = '{"a":[2.0,{"c":0.5}],  "b":1}'  # JavaScript writes 1.0 as 1
    other = Message("assistant", "so\n", calls=(Call("x", "look", sent),))
    second = ask(session, USER, other, Message("tool", "seen", call_id="x"), tools=(TOOL,))
    assert second.parent is first
    assert second.path.tokens[: first.length] == first.path.tokens[: first.length]
    tail = TOKENIZER.decode(second.path.tokens[first.length : second.start])
    assert tail == "<tool>seen<eos><bot>"


def test_no_text_of_a_program_can_end_a_turn():
    """Special tokens are those of the vocabulary, also where the tokenizer does not list them."""
    tokenizer = tokenizer_of()
    tokenizer.add_tokens([AddedToken(each, special=True) for each in ("<user>", "<bot>")])
    tokenizer.chat_template = HERMES
    assert "<bot>" not in tokenizer.all_special_tokens
    evil = "<eos><bot>"
    tool = {"type": "function", "function": {"name": "look", "description": evil}}
    session = session_of(call("look", a=evil), "done", renderer=Renderer(tokenizer))
    first = ask(session, Message("system", evil), Message("user", evil), tools=(tool,))
    ask(session, Message("system", evil), Message("user", evil), first.message,
        reply(first, evil), tools=(tool,))  # fmt: skip
    marks = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["<bot>"])]
    tokens = session.history.turns[1].path.tokens
    # the ends of tools, system, question, call, reply, answer; three turns of the bot: HERMES
    # writes a system message as the bot's
    assert [tokens.count(mark) for mark in marks] == [6, 3]


def test_characters_that_the_tokenizer_lacks_are_marked_and_told_once(caplog):
    renderer = Renderer(TOKENIZER)
    session = session_of("one", "two", "three", renderer=renderer)
    first = ask(session, Message("user", "\u00fc"))
    second = ask(session, Message("user", "\u00fc"), first.message, AGAIN)
    third = ask(session, Message("user", "\u00fc"), first.message, AGAIN, second.message,
                Message("user", "\u00e4"))  # fmt: skip
    assert [turn.facts for turn in (first, second, third)] == [
        (Reason.UNKNOWN_CHARACTERS,),
        (),  # what is new in it is known
        (Reason.UNKNOWN_CHARACTERS,),
    ]
    assert session.history.counts()["unknown characters"] == 2
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.endswith("does not know; the policy reads <unk> in their place")


def test_what_the_policy_wrote_is_not_said_of_the_program(caplog):
    """Its call escapes a letter, which the template writes plainly in a turn rendered anew."""
    renderer = Renderer(TOKENIZER)
    session = session_of(call("look", a="\u00fc"), "two", "three", "four", renderer=renderer)
    first = ask(session, USER, tools=(TOOL,))
    seen = reply(first, "seen")
    second = ask(session, SYSTEM, USER, first.message, seen, tools=(TOOL,))
    assert (reason_of(second), second.facts) == (
        Reason.SYSTEM_CHANGED,
        (Reason.UNKNOWN_TOKENS,),
    )
    assert TOKENIZER.unk_token_id in second.root.prompt
    # as a client without calls sends it: the letter is still the policy's
    told = Message("assistant", "called look with a=\u00fc")
    assert ask(session, USER, told, seen, tools=(TOOL,)).facts == (Reason.UNKNOWN_TOKENS,)
    other = Message("assistant", "called look with a=\u00e4")
    assert ask(session, USER, other, seen, tools=(TOOL,)).facts == (Reason.UNKNOWN_CHARACTERS,)
    mine, theirs = (record.getMessage() for record in caplog.records)
    assert mine.startswith("the policy's own turns have tokens or characters")
    assert theirs.startswith("a program sent characters")


@pytest.mark.parametrize("token", [TOKENIZER.unk_token_id, len(TOKENIZER)])
def test_a_token_without_a_text_is_the_policys(token):
    """Embeddings have more rows than many a tokenizer has tokens."""

    def sampled(number, completion):
        ids = completion.token_ids.clone()
        ids[0] = token
        support = SupportTrace.from_sets([[each] for each in ids.tolist()])
        return dataclasses.replace(completion, token_ids=ids, support=support)

    session = session_of("xone", "xtwo", renderer=Renderer(TOKENIZER), after=sampled)
    first = ask(session, USER)
    assert (first.message.text, first.facts) == ("one", (Reason.UNKNOWN_TOKENS,))
    second = ask(session, USER, first.message, AGAIN)
    assert (second.parent, second.facts) == (first, (Reason.UNKNOWN_TOKENS,))
    assert session.history.counts()["unknown tokens of the policy"] == 2
    (sample,) = samples_of(session)
    assert int(sample.tokens[first.start]) == token  # it is trained on as it was sampled


def test_ids_past_a_tokenizer_that_knows_every_text_are_told_without_its_unknown_token(caplog):
    tokenizer = tokenizer_of(HERMES)
    tokenizer.unk_token = None
    assert UnknownText(tokenizer).has_sampled([len(tokenizer)])
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("the policy sampled ids that the tokenizer has no token for")
    assert not UnknownText(tokenizer).has_sampled([0])


def test_a_tools_name_in_a_reply_is_the_programs():
    """Templates may write the name of the tool that a reply is of."""
    renderer = Renderer(tokenizer_of(HERMES.replace("<tool>", "<tool>{{ m['name'] }}")))
    tool = {"type": "function", "function": {"name": "f\u00fcr", "parameters": {"type": "object"}}}
    session = session_of(call("f\u00fcr"), "two", renderer=renderer)
    first = ask(session, USER, tools=(tool,))
    second = ask(session, USER, first.message, reply(first, "seen"), tools=(tool,))
    assert second.parent is first
    assert second.facts == (Reason.UNKNOWN_CHARACTERS,)


def test_tools_of_a_program_and_words_of_the_template_are_told_apart(caplog):
    plain, odd = Renderer(TOKENIZER), Renderer(tokenizer_of(HERMES.replace("<sys>", "\u00fc")))
    tool = {"type": "function", "function": {"name": "look", "description": "\u00fc"}}
    assert ask(session_of("one", renderer=plain), USER, tools=(tool,)).facts == (
        Reason.UNKNOWN_CHARACTERS,
    )
    assert ask(session_of("one", renderer=odd), USER, tools=(TOOL,)).facts == ()
    assert [each.getMessage().partition(" characters")[0] for each in caplog.records] == [
        "a program sent",
        "the model's chat template writes",
    ]


def test_a_word_that_the_tokenizer_lacks_is_its_senders():
    """Every letter is known to a tokenizer of words, and yet not every word."""
    words = ("<user>", "<bot>", "a", "ab", "b", "c")
    vocabulary = {word: i for i, word in enumerate(("<pad>", "<eos>", "<unk>", *words))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    found = UnknownText(tokenizer)
    sent = [Message("user", "a ab"), Message("assistant", "a ba"), Message("user", "c")]
    rendered = tokenizer.encode("a ab a ba c")
    assert found.find(rendered, sent, (), ()) == (Reason.UNKNOWN_CHARACTERS,)
    turns = [SimpleNamespace(message=Message("assistant", "", "b ba"))]
    assert found.find(rendered, sent, (), turns) == (Reason.UNKNOWN_TOKENS,)
    sent[0] = Message("user", "ba")
    assert found.find(rendered, sent, (), turns) == (
        Reason.UNKNOWN_CHARACTERS,
        Reason.UNKNOWN_TOKENS,
    )


def test_an_unknown_token_that_ends_turns_says_nothing():
    """As that of GPT-2, which knows every text."""
    tokenizer = tokenizer_of(HERMES)
    tokenizer.unk_token = tokenizer.eos_token
    assert ask(session_of("one", renderer=Renderer(tokenizer)), USER).facts == ()


def test_a_cut_turn_is_ended_before_it_is_continued():
    session = session_of("a long answer", "done", max_tokens=4)
    first = ask(session, USER)
    assert (first.finish, first.message.text) == ("length", "a lo")
    second = ask(session, USER, first.message, AGAIN)
    tail = second.path.tokens[first.length : second.start]
    assert second.parent is first
    assert tail[0] == TOKENIZER.eos_token_id
    (sample,) = samples_of(session)
    assert sample.response_length == 4 + 4


def test_a_stop_text_cuts_the_tokens_that_the_client_never_sees():
    session = session_of("one STOP two", "done", "well")
    first = ask(session, USER, stop=("never", "STOP"))
    assert (first.message.text, first.stop) == ("one", "STOP")
    assert TOKENIZER.decode(first.path.tokens[first.start :]) == "one STOP"
    second = ask(session, USER, first.message, AGAIN)
    assert second.parent is first
    (sample,) = samples_of(session)
    assert sample.response_length == len("one STOP") + len("done") + 1
    assert len(sample.routing) == len(sample.tokens) - 1
    assert bool(sample.routing.valid.all())
    last = ask(session, USER, first.message, AGAIN, second.message, AGAIN, stop=("l",))
    assert (last.finish, last.stop) == ("length", "l")
    assert [each.finish for each in samples_of(session)] == ["stop"]  # at no limit


@pytest.mark.parametrize(
    ("text", "stop", "message"),
    [
        ("<think>\nhm STOP so\n</think>\n\nyes", "STOP", Message("assistant", "", "hm")),
        (call("look", a=1), "</call>", Message("assistant", call("look", a=1)[:-7].strip())),
        (f"so {call('look', a=1)}", "<call>", Message("assistant", "so")),
    ],
)
def test_a_stop_text_is_found_in_thoughts_and_calls(text, stop, message):
    session = session_of(text, "done")
    turn = ask(session, USER, stop=(stop,), tools=(TOOL,))
    assert (turn.message, turn.stop) == (message, stop)
    assert TOKENIZER.decode(turn.path.tokens[turn.start :]).endswith(stop)
    assert ask(session, USER, turn.message, AGAIN, tools=(TOOL,)).parent is turn


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_call_with_a_number_that_json_lacks_is_text(number):
    """Clients cannot read it, and a reply with it would be no JSON."""
    written = call("look", a=0).replace("0", number)
    turn = ask(session_of(written), USER, tools=(TOOL,))
    assert (turn.message.calls, turn.message.text) == ((), written)
    assert Call("x", "look", f'{{"a": {number}}}').values() == f'{{"a": {number}}}'


def test_replies_name_calls_by_the_clients_ids():
    """Templates that write the name of the tool find it by the id in the client's own turn."""
    named = HERMES.replace("<tool>{{ m['content'] }}", "<tool>{{ m['name'] }}:{{ m['content'] }}")
    session = session_of(call("look"), "done", renderer=Renderer(tokenizer_of(named)))
    ask(session, USER, tools=(TOOL,))
    sent = Message("assistant", calls=(Call("mine <eos>", "look", "{}"),))
    answer = Message("tool", "seen", call_id="mine <eos>")
    second = ask(session, USER, sent, answer, tools=(TOOL,))
    assert second.parent is not None
    tail = second.path.tokens[second.parent.length : second.start]
    assert TOKENIZER.decode(tail) == "<tool>look:seen<eos><bot>"


def test_siblings_that_differ_in_their_thoughts_alone_are_told_apart():
    thoughts = [f"<think>\n{each}\n</think>\n\nyes" for each in ("one", "two")]
    session = session_of(*thoughts, "a", "b", "c", "d")
    one, two = ask(session, USER), ask(session, USER)
    assert [turn.message.thought for turn in (one, two)] == ["one", "two"]
    after_one = ask(session, USER, one.message, AGAIN)
    after_two = ask(session, USER, two.message, AGAIN)
    assert (after_one.parent, after_two.parent) == (one, two)
    assert ask(session, *after_one.conversation, USER).parent is after_one
    plain = dataclasses.replace(one.message, thought="")
    later = ask(session, USER, plain, AGAIN)
    assert later.parent is two  # the latest
    assert Reason.THOUGHTS_DROPPED in later.facts
    assert session.history.counts()["roots"] == 1


def breaks():
    """Yield (reason, texts served, requests, tools of each) of planted breaks."""
    thought = "<think>\nhm\n</think>\n\nserved answer"
    served = Message("assistant", "served answer", "hm")
    plain = dataclasses.replace(served, thought="")
    yield (
        Reason.SYSTEM_CHANGED,
        thought,
        [SYSTEM, USER],
        [*(Message("system", "be long"), USER, served, AGAIN)],
    )
    yield Reason.COMPACTION, thought, [USER], [Message("user", "Before: served answer. Go on")]
    yield Reason.COMPACTION, thought, [USER, Message("user", "more")], [USER, served, AGAIN]
    yield (
        Reason.TRUNCATED_TURN,
        thought,
        [USER],
        [*(USER, dataclasses.replace(served, text="served"), AGAIN)],
    )
    yield (
        Reason.UNKNOWN_ASSISTANT,
        thought,
        [USER],
        [*(USER, Message("assistant", "never said"), AGAIN)],
    )
    yield (
        Reason.UNKNOWN_ASSISTANT,
        thought,
        [USER],
        [*(USER, dataclasses.replace(served, thought="other"), AGAIN)],
    )
    yield Reason.THOUGHTS_DROPPED, thought, [USER], [USER, plain, AGAIN]


@pytest.mark.parametrize(("reason", "text", "first", "second"), list(breaks()))
def test_a_changed_history_begins_a_root(reason, text, first, second):
    session = session_of(text, "done", thoughts="as-sent")
    before, after = ask(session, *first), ask(session, *second)
    assert after.parent is None
    found = after.root.break_
    assert found.reason is reason
    ours, sent = before.path.tokens[: before.length], after.path.tokens
    assert ours[: found.token] == sent[: found.token]
    assert (found.ours, found.sent) == (ours[found.token], sent[found.token])
    assert found.ours != found.sent
    assert session.history.counts()[reason] == 1
    one, other = samples_of(session)
    assert (one.response_length, other.response_length) == (len(text) + 1, 5)
    third = ask(session, *second, after.message, AGAIN)  # the new root is continued
    assert third.parent is after


def test_a_history_without_its_middle_is_a_compaction():
    """A filter keeps the question and the last exchange, as agents do to stay short."""
    session = session_of("one", "two", "three")
    first = ask(session, USER)
    second = ask(session, USER, first.message, AGAIN)
    third = ask(session, USER, second.message, Message("user", "on"))
    assert reason_of(third) is Reason.COMPACTION


def test_a_question_that_has_a_short_answer_in_it_is_no_compaction():
    """A sub-agent is asked for 1+2, then for 3+4: conversations of their own."""
    session = session_of("3", "7")
    ask(session, Message("user", "1+2"), tools=(TOOL,))
    second = ask(session, Message("user", "3+4"), tools=(TOOL,))
    assert second.root.break_ is None


def test_changed_tools_begin_a_root():
    session = session_of("hello", "done")
    first = ask(session, USER, tools=(TOOL,))
    second = ask(session, USER, first.message, AGAIN, tools=(TOOL, TOOL))
    assert reason_of(second) is Reason.TOOLS_CHANGED


def test_a_first_request_with_a_turn_that_was_never_served():
    session = session_of("yes")
    turn = ask(session, USER, Message("assistant", "of another gateway"), AGAIN)
    tokens = turn.path.tokens[: turn.start]
    assert turn.root.break_ == Break(Reason.UNKNOWN_ASSISTANT, 0, None, tokens[0])


def test_the_same_text_in_other_ids_is_named():
    session = session_of("said " + call("look", a=1), "done")
    first = ask(session, USER, tools=(TOOL,))
    as_text = Message("assistant", "said " + call("look", a=1))
    second = ask(session, USER, as_text, AGAIN, tools=(TOOL,))
    assert first.message.calls
    assert reason_of(second) is Reason.RETOKENISED


def test_thoughts_that_a_client_drops_are_kept():
    session = session_of("<think>\nhm\n</think>\n\nyes", "done")
    first = ask(session, USER)
    assert first.message == Message("assistant", "yes", "hm")
    second = ask(session, USER, Message("assistant", "yes"), AGAIN)
    assert second.parent is first
    assert second.facts == (Reason.THOUGHTS_DROPPED,)


def test_facts_about_a_turn():
    def spoil(number, completion):
        if number == 0:
            return dataclasses.replace(completion, logp=completion.logp * float("nan"))
        if number == 1:
            return dataclasses.replace(completion, routing=None)
        return dataclasses.replace(completion, version=completion.version + 1)

    session = session_of("answer", after=spoil)
    turns = [ask(session, USER, sampling=(("temperature", 0), ("top_p", 0.9)), max_tokens=32000)]
    for _ in range(2):
        turns.append(ask(session, *turns[-1].conversation, AGAIN))
    assert [turn.facts for turn in turns] == [
        (Reason.SAMPLING_OVERRIDDEN, Reason.LENGTH_CAPPED, Reason.NO_VALUES),
        (Reason.NO_ROUTES,),
        (Reason.UNKNOWN_VERSION,),
    ]
    (sample,) = samples_of(session)
    assert sample.response_length == 2 * 7  # the first turn is observed
    assert session.history.counts()["no values"] == 1


@pytest.mark.parametrize("continued", [0, 1, None])
def test_of_retries_the_one_that_was_continued_is_trained_on(continued):
    session = session_of("first", "again", "third", "done")
    turns = [ask(session, USER)]
    begun = (*turns[0].conversation, AGAIN)
    siblings = [ask(session, *begun), ask(session, *begun)]
    assert siblings[1].facts == (Reason.RETRY_SIBLING,)
    kept = siblings[1]
    if continued is not None:
        kept = siblings[continued]
        turns.append(ask(session, *kept.conversation, AGAIN))
    abandoned = siblings[1 - siblings.index(kept)]
    assert [turn.is_abandoned for turn in siblings] == [turn is abandoned for turn in siblings]
    tokens = [t for s in samples_of(session) for t in s.tokens[1:][s.trainable].tolist()]
    expected = [turns[0], kept, *turns[1:]]
    assert sorted(tokens) == sorted(
        token for turn in expected for token in turn.path.tokens[turn.start : turn.length]
    )
    assert_own_routes(session)


def assert_own_routes(session):
    """Every sampled token has the experts of the forward that it was sampled from."""
    for last, sample in zip(session.history.last_turns(), samples_of(session), strict=True):
        for turn in last.chain:
            if turn.path is last.path:
                slots = slice(turn.start - 1, turn.length - 1)
                own = turn.completion.routing.ids[turn.start - turn.length :]
                assert torch.equal(sample.routing.ids[slots], own)


def test_a_turn_that_is_sampled_again_has_its_own_routes():
    session = session_of("first", "second", "third")
    ask(session, USER)
    root = ask(session, USER)
    assert_own_routes(session)
    for _ in range(2):  # both are continued, the first one before the second is sampled
        turn = ask(session, *root.conversation, AGAIN)
        ask(session, *turn.conversation, AGAIN)
    assert len(samples_of(session)) == 2
    assert_own_routes(session)


ORDERS = [
    TOOL | {"function": {"name": "look", "parameters": {"properties": each}}}
    for each in ({"a": {}, "b": {}}, {"b": {}, "a": {}})
]


@pytest.mark.parametrize(
    "requests",
    [
        [Request((Message("user", text),)) for text in ("hi ", "hi\n")],
        [Request((Message("user", text),)) for text in ("hi", " hi\n")],
        [Request((USER,), (tool,)) for tool in ORDERS],
    ],
)
def test_requests_that_differ_in_their_tokens_alone_are_no_retries(requests):
    session = session_of("one", "three")
    turns = [asyncio.run(session.answer(each)) for each in requests]
    assert len(session.history.roots) == 2
    assert [(turn.facts, turn.is_abandoned) for turn in turns] == [((), False)] * 2
    assert [sample.response_length for sample in samples_of(session)] == [4, 6]


@pytest.mark.parametrize("texts", [("hi", "hi\n"), ("hi ", "hi\n")])
def test_replies_that_differ_in_white_space_alone_are_no_retries(texts):
    session = session_of(call("look"), "one", "three")
    first = ask(session, USER, tools=(TOOL,))
    turns = [ask(session, *first.conversation, reply(first, text), tools=(TOOL,)) for text in texts]
    assert [(turn.parent, turn.facts) for turn in turns] == [(first, ())] * 2
    lengths = sorted(sample.response_length for sample in samples_of(session))
    assert lengths == [6, len(call("look")) + 1 + 4]
    prompts = [prompt for prompt, _, _ in session.engine.requests[1:]]
    assert [turn.path.tokens[: turn.start] for turn in turns] == prompts


def test_branches_train_their_common_beginning_once():
    session = session_of("root", "left", "right", "left 2")
    root = ask(session, USER)
    left = ask(session, *root.conversation, Message("user", "left"))
    right = ask(session, *root.conversation, Message("user", "right"))
    assert right.parent is root
    ask(session, *left.conversation, AGAIN)
    short, long = samples_of(session)
    assert long.response_length == sum(map(len, ("root", "left", "left 2"))) + 3
    assert short.response_length == len("right") + 1
    assert short.routing.valid.all()


STEPS = st.sampled_from(["go on", "again", "fork", "edit", "system", "cut", "new", "concurrent"])


def changed(kind, turn):
    """Return the next requests of a client that does this after a turn."""
    messages = turn.conversation
    if kind == "again":
        return [turn.request.messages]
    if kind == "edit":
        return [(Message("user", "edited"), *messages[1:], AGAIN)]
    if kind == "system":
        return [(Message("system", f"system {turn.number}"), *messages, AGAIN)]
    if kind == "cut":
        short = dataclasses.replace(turn.message, text=turn.message.text[:1])
        return [(*messages[:-1], short, AGAIN)]
    if kind == "new":
        return [(Message("user", f"new {turn.number}"),)]
    if kind == "concurrent":
        return [(*messages, Message("user", str(i % 2))) for i in range(3)]
    return [(*messages, AGAIN)]


@examples(30)
@given(st.lists(st.tuples(STEPS, st.integers(0, 50)), max_size=12))
def test_whatever_a_client_does_every_token_is_trained_on_once_where_it_was_sampled(steps):
    made = []
    session = session_of("one", "two", "six")

    def note(number, completion):
        made.append(completion)
        return completion

    async def play():
        session.engine.after = note
        await session.answer(Request((USER,)))
        for kind, place in steps:
            turns = session.history.turns
            turn = turns[-1] if kind == "go on" else turns[place % len(turns)]
            requests = [Request(messages) for messages in changed(kind, turn)]
            await asyncio.gather(*map(session.answer, requests))

    asyncio.run(play())
    trained = []
    for sample in samples_of(session):
        tokens, turn = sample.tokens.tolist(), sample.turn.tolist()
        for number in sorted(set(turn) - {-1}):
            slots = [slot for slot, each in enumerate(turn) if each == number]
            first, last = slots[0] + 1, slots[-1] + 2
            sampled = [
                i
                for i, (prompt, _, _) in enumerate(session.engine.requests)
                if prompt == tokens[:first]
                and made[i].token_ids.tolist() == tokens[first:last]
                and made[i].logp.tolist() == sample.logp_rollout[slots].tolist()
                and torch.equal(made[i].routing.ids[-len(slots) :], sample.routing.ids[slots])
            ]
            assert len(sampled) == 1
            trained += sampled
        assert sample.routing.valid.all()
    expected = sum(not turn.is_abandoned for turn in session.history.turns)
    assert len(trained) == len(set(trained)) == expected


def test_a_title_call_stands_apart_and_a_sub_agent_does_not():
    session = session_of("a title", "working", "helping", "final")
    title = ask(session, Message("system", "Name this"), USER)
    ask(session, SYSTEM, USER, tools=(TOOL,))
    helper = ask(session, Message("system", "You help"), Message("user", "part"), tools=(TOOL,))
    final = ask(session, USER, Message("assistant", "in our own words"), AGAIN)
    assert session.history.is_auxiliary(title.root)
    assert reason_of(helper) is None
    assert reason_of(final) is Reason.UNKNOWN_ASSISTANT  # no tools, but it has a history
    assert [s.response_length for s in samples_of(session)] == [8, 8, 6]
    assert session.history.counts()["auxiliary"] == 1


@pytest.mark.parametrize(("credit", "trained"), [("episode", "wncdf"), ("main", "wcdf")])
def test_credit_for_the_main_conversation_leaves_sub_agents_out(credit, trained):
    """It is trained on with what it was compacted to, twice, and what its client rewrote."""
    texts = [*"twncd", "f"]
    session = session_of(*texts)
    session.history.credit = credit
    ask(session, Message("system", "Name this"), USER)
    first = ask(session, SYSTEM, USER, tools=(TOOL,))
    helper = Message("system", "You help")
    ask(session, helper, Message("user", "part"), tools=(TOOL,))
    second = ask(session, SYSTEM, USER, first.message, AGAIN, tools=(TOOL,))
    third = ask(session, SYSTEM, USER, second.message, Message("user", "on"), tools=(TOOL,))
    ask(session, SYSTEM, USER, third.message, Message("user", "on and on"), tools=(TOOL,))
    assert session.history.counts()[str(Reason.COMPACTION)] == 2
    text = "".join(turn.message.text for turn in session.history.turns)
    assert text == "".join(texts)
    found = [turn.message.text for last in session.history.last_turns() for turn in last.chain]
    assert sorted(found) == sorted(trained)


def say(text):
    return Message("user", text)


HELPER = Message("system", "You help")


def sliding_window(ask):
    """The client drops its oldest messages after a helper answered last."""
    first = ask("main one", SYSTEM, USER)
    second = ask("main two", SYSTEM, USER, first.message, AGAIN)
    ask("-", HELPER, say("part"))
    ask("main three", SYSTEM, AGAIN, second.message, say("on"))


def the_same_question(ask):
    """A helper is asked what the agent was asked; then the agent drops its middle."""
    first = ask("main one", SYSTEM, USER)
    second = ask("main two", SYSTEM, USER, first.message, AGAIN)
    ask("-", HELPER, USER)
    ask("main three", SYSTEM, USER, second.message, say("on"))


def summariser_of_messages(ask):
    """Another agent, given the messages, sums up. What it sampled is of this conversation too."""
    first = ask("main one", SYSTEM, USER)
    shorter = ask("main was asked", HELPER, USER, first.message, say("Sum up"))
    ask("-", HELPER, say("part"))
    ask("main three", SYSTEM, say(f"So far: {shorter.message.text}. Go on"))


def summariser_of_a_text(ask):
    first = ask("main answered", SYSTEM, USER)
    shorter = ask("-summary of it", HELPER, say(f"Sum up: {first.message.text}"))
    ask("main three", SYSTEM, say(f"So far: {shorter.message.text}. Go on"))


def helper_with_examples(ask):
    ask("main one", SYSTEM, USER)
    ask("-", HELPER, say("example"), Message("assistant", "of an answer"), say("part"))


def helper_asked_twice(ask):
    """Its second question repeats what the agent said, which is no summary of the first."""
    first = ask("main answered", SYSTEM, USER)
    ask("-", HELPER, say("part"))
    ask("--", HELPER, say(f"Check: {first.message.text}"))


STORIES = (
    *(sliding_window, the_same_question, summariser_of_messages, summariser_of_a_text),
    *(helper_with_examples, helper_asked_twice),
)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_whose_conversation_a_request_goes_on_with(story):
    texts = []
    session = session_of(*("?" for _ in range(4)))
    session.history.credit = "main"

    def tell(text, *messages):
        texts.append(text)
        session.engine.texts[len(texts) - 1 :] = [text]
        return ask(session, *messages, tools=(TOOL,))

    story(tell)
    trained = {turn.message.text for last in session.history.last_turns() for turn in last.chain}
    assert trained == {text for text in texts if text.startswith("main")}


def test_the_main_conversation_is_the_one_asked_first_though_another_is_answered_before_it():
    session = session_of("main", "checked")
    session.history.credit = "main"
    generate, answered = session.engine.generate, asyncio.Event()

    async def late(prompt, sampling, *, seed):
        first = len(session.engine.requests) == 0
        done = await generate(prompt, sampling, seed=seed)
        if first:
            await answered.wait()
        else:
            answered.set()
        return done

    session.engine.generate = late

    async def both():
        asked = (Request((USER,)), Request((HELPER, say("part"))))
        return await asyncio.gather(*map(session.answer, asked))

    asyncio.run(both())
    assert [turn.message.text for turn in session.history.turns] == ["checked", "main"]
    assert [turn.message.text for turn in session.history.last_turns()] == ["main"]


def test_of_two_tries_in_flight_the_one_that_was_asked_last_is_trained_on():
    """The client reads its answer, though the other's comes later."""
    session = session_of("given up", "read")
    generate, answered = session.engine.generate, asyncio.Event()

    async def late(*args, **how):
        first = len(session.engine.requests) == 0
        done = await generate(*args, **how)
        if first:
            await answered.wait()
        answered.set()
        return done

    session.engine.generate = late

    async def both():
        return await asyncio.gather(*(session.answer(Request((USER,))) for _ in range(2)))

    given_up, read = asyncio.run(both())
    assert [turn.message.text for turn in session.history.turns] == ["read", "given up"]
    assert (given_up.is_abandoned, read.is_abandoned) == (True, False)
    assert [turn.message.text for turn in session.history.last_turns()] == ["read"]
    (sample,) = samples_of(session)
    assert sample.response_length == len("read") + 1


def test_the_last_sample_is_of_the_conversation_that_ended_the_episode():
    """A run reads off it whether an episode was cut."""
    session = session_of("main", "checked", "a long answer")
    first = ask(session, USER, tools=(TOOL,))
    ask(session, AGAIN, tools=(TOOL,))
    ask(session, USER, first.message, AGAIN, tools=(TOOL,), max_tokens=3)
    assert [each.finish for each in samples_of(session)] == ["stop", "length"]


def test_a_retry_is_answered_once():
    session = session_of("once", "twice")

    async def both():
        request = Request((USER,))
        tries = (session.answer(request, "key", repeated=later) for later in (False, True))
        return await asyncio.gather(*tries)

    one, other = asyncio.run(both())
    assert one is other
    assert (len(session.engine.requests), session.replayed) == (1, 1)
    assert ask(session, USER, key="other key", repeated=True) is not one
    assert ask(session, USER, key="key") is not one  # the same question again, not another try


def test_a_failed_request_is_sampled_again_by_its_retry():
    session = session_of("once")
    generate, failures = session.engine.generate, [RuntimeError("lost")]

    async def fail_once(*args, **how):
        if failures:
            raise failures.pop()
        return await generate(*args, **how)

    session.engine.generate = fail_once
    with pytest.raises(RuntimeError, match="lost"):
        ask(session, USER, key="key")
    assert ask(session, USER, key="key", repeated=True).message.text == "once"


def test_limits_and_what_cannot_be_served():
    session = session_of("12345", limits=Limits(turns=3, tokens=8), max_len=100)
    first = ask(session, USER)
    second = ask(session, *first.conversation, AGAIN)
    assert (second.finish, second.length - second.start) == ("length", 2)
    for messages, match in (
        ((USER,), "its 8 tokens"),
        ((SYSTEM,), "none to answer"),
        ((), "none to answer"),
        ((USER, first.message), "the last one is the assistant's"),
        ((Message("user", "x" * 100),), "and 100 fit"),
    ):
        with pytest.raises(RequestError, match=match):
            ask(session, *messages)
    assert session.count_tokens(Request((*first.conversation, AGAIN))) == second.start
    assert session.count_tokens(Request((USER,))) == first.start


def test_concurrent_turns_share_an_episodes_tokens():
    """Two run at once: the second gets what the first cannot use, the third waits for one."""
    session = session_of("12345678", limits=Limits(tokens=20), max_tokens=12)
    generate, begun, go_on = session.engine.generate, [], asyncio.Event()

    async def slow(prompt, sampling, *, seed):
        begun.append(sampling.max_tokens)
        await go_on.wait()
        return await generate(prompt, sampling, seed=seed)

    session.engine.generate = slow

    async def play():
        requests = [Request((Message("user", f"{i}"),)) for i in range(3)]
        work = [asyncio.ensure_future(session.answer(each)) for each in requests]
        while len(begun) < 2:
            await asyncio.sleep(0)
        assert (begun, session.running) == ([12, 8], 2)
        go_on.set()
        return await asyncio.gather(*work, return_exceptions=True)

    turns = asyncio.run(play())
    assert [turn.length - turn.start for turn in turns] == [9, 8, 3]
    assert begun == [12, 8, 3]
    assert session.running == 0
    with pytest.raises(RequestError, match="its 20 tokens"):
        ask(session, USER)


def test_templates_that_cannot_be_used():
    with pytest.raises(UsageError, match="has no chat template"):
        Renderer(tokenizer_of())
    plain = Renderer(tokenizer_of(TEMPLATE))
    assert "does not print tools" in plain.no_calls
    forgetful = Renderer(tokenizer_of(FORGETFUL))
    session = session_of("<think>\nhm\n</think>\n\nyes", "done", renderer=forgetful)
    first = ask(session, USER)
    second = ask(session, *first.conversation, AGAIN)
    assert second.parent is first  # our ids have the thought, whatever the template would write
    assert "hm" in TOKENIZER.decode(second.path.tokens[: first.length])


def test_a_template_that_leaves_out_a_message_is_refused():
    deaf = TEMPLATE.replace("{% for", "{% set messages = messages[:1] %}{% for", 1)
    session = session_of("yes", renderer=Renderer(tokenizer_of(deaf)))
    assert ask(session, USER).message.text == "yes"
    with pytest.raises(RequestError, match="template leaves out one of these messages"):
        ask(session, USER, AGAIN)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch):
    """Tokenising takes seconds a megabyte, in which nothing else is served."""
    session = session_of("never")
    history = session.history
    monkeypatch.setattr(history.renderer, "encode_prompt", None)
    long = Request((Message("user", "x" * (history.max_len * 32 + 1)),))
    many = Request((Message("user"),) * history.max_len)
    turn = Message("assistant", calls=(Call("x", "x", "{}"),) * history.max_len)
    called = Request((USER, turn, USER))
    checks = (history.plan, history.count_tokens)
    for ask, request in itertools.product(checks, (long, many, called)):
        with pytest.raises(RequestError, match="characters, and") as error:
            ask(request)
        assert error.value.code == "context_length_exceeded"


def test_a_turn_is_decoded_once_for_texts_that_it_has_not(monkeypatch):
    session, decode, decoded = session_of("one"), TOKENIZER.decode, []

    def count(*args, **how):
        decoded.append(1)
        return decode(*args, **how)

    monkeypatch.setattr(TOKENIZER, "decode", count)
    ask(session, USER, stop=tuple("234"))
    assert len(decoded) == 2  # for the message too


def test_a_closed_session_samples_nothing_more():
    session = session_of("never")

    async def after_the_end():
        await session.close()
        return await session.answer(Request((Message("user", "hi"),)))

    with pytest.raises(RequestError, match="has ended"):
        asyncio.run(after_the_end())
    assert not session.history.turns
