"""An agent as people write them: OpenAI's SDK, a tool, no line about onepolicy."""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
client = OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    answer = client.chat.completions.create(model="any", messages=messages, tools=[TOOL])
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        print(message.content)
        break
    for call in message.tool_calls:
        seen = json.loads(call.function.arguments)["q"].upper()
        messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
