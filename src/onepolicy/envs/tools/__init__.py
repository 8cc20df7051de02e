"""Tools that the policy may call during an episode.

Every input gets a text in reply, a wrong input the text of an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from onepolicy.config import CalculatorTool, PythonTool, SearchTool, ToolConfig
from onepolicy.envs.tools.calculator import Calculator
from onepolicy.envs.tools.sandbox import PythonSandbox
from onepolicy.envs.tools.search import Search


class ToolSpec(Protocol):
    """The description of a tool for the policy."""

    name: str
    argument: str  # name of its one argument, a string
    description: str


class Tool(ToolSpec, Protocol):
    """A tool that the policy can call."""

    async def call(self, text: str) -> str:
        """Return the reply for the policy. Raises EpisodeError if the tool fails, not the input."""
        ...

    def reply_texts(self) -> Iterable[str]:
        """Return the texts that replies quote. All other text in a reply is ASCII."""
        ...


def build_tools(configs: Sequence[ToolConfig]) -> dict[str, Tool]:
    """Build the tools, by name. Raises UsageError if a tool cannot run here."""
    tools: dict[str, Tool] = {}
    for config in configs:
        tool: Tool
        match config:
            case CalculatorTool():
                tool = Calculator(config)
            case PythonTool():
                tool = PythonSandbox(config)
            case SearchTool():
                tool = Search(config)
        tools[tool.name] = tool
    return tools


def function_schema(tool: ToolSpec) -> dict[str, object]:
    """Return the tool as an OpenAI function with one string argument, for chat templates."""
    properties = {tool.argument: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [tool.argument]}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


__all__ = [
    "Calculator",
    "PythonSandbox",
    "Search",
    "Tool",
    "ToolSpec",
    "build_tools",
    "function_schema",
]
