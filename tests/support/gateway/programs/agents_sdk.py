"""An agent of openai-agents, as its documentation has it."""

import sys

from agents import Agent, Runner, function_tool


@function_tool
def look(q: str) -> str:
    """Look."""
    return q.upper()


print(Runner.run_sync(Agent(name="Helper", tools=[look]), sys.argv[1]).final_output)
