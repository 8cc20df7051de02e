"""A lead that adds up numbers by asking a helper, who has a tool; and a title for the log.

An agent of openai-agents as its documentation has it: a tool, an agent as a tool, a filter that
keeps the history short, a call for a title. No line is about training.
"""

import sys

from agents import (
    Agent,
    RunConfig,
    Runner,
    function_tool,
    set_default_openai_api,
)
from agents.run import ModelInputData

set_default_openai_api("chat_completions")


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def compact(data):
    """Keep the question and the last exchange."""
    items = data.model_data.input
    if len(items) > 4:
        items = [items[0], *items[-2:]]
    return ModelInputData(input=items, instructions=data.model_data.instructions)


helper = Agent(name="helper", instructions="help", tools=[add])
lead = Agent(name="lead", instructions="lead", tools=[helper.as_tool("ask", "Ask the helper.")])
title = Agent(name="title", instructions="title")
question = sys.argv[1]
Runner.run_sync(title, question)
short = RunConfig(call_model_input_filter=compact)
print(Runner.run_sync(lead, question, run_config=short).final_output)
