"""The conversations of agent.py by the standard library alone, which starts in a tenth of the time.

For benchmarks/zero/study.py. No title is asked for.
"""

import json
import os
import sys
import urllib.request


def ask(system, messages, tool):
    """Return the answer to a conversation, as it is sent back: without thoughts."""
    offered = {"name": tool, "parameters": {"type": "object"}}
    body = {
        "model": "any",
        "messages": [{"role": "system", "content": system}, *messages],
        "tools": [{"type": "function", "function": offered}],
    }
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as answer:
        message = json.load(answer)["choices"][0]["message"]
    names = ("role", "content", "tool_calls")
    return {name: message[name] for name in names if message.get(name)}


def converse(system, question, tool, use):
    """Ask until an answer calls no tool, and return it. A history keeps its last exchange."""
    items = [{"role": "user", "content": question}]
    while True:
        shown = items if len(items) <= 3 else [items[0], *items[-2:]]
        answer = ask(system, shown, tool)
        if "tool_calls" not in answer:
            return answer.get("content", "")
        items.append(answer)
        for call in answer["tool_calls"]:
            reply = use(json.loads(call["function"]["arguments"]))
            items.append({"role": "tool", "tool_call_id": call["id"], "content": reply})


def add(given):
    return str(given["a"] + given["b"])


def help_with(given):
    return converse("help", given["input"], "add", add)


print(converse("lead", sys.argv[1], "ask", help_with))
