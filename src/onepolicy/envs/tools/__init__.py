"""What a policy may call in the middle of an episode. Every input gets a text back, a wrong one an error's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from onepolicy.config import CalculatorTool, PythonTool, SearchTool, ToolConfig
from onepolicy.envs.tools.calculator import Calculator
from onepolicy.envs.tools.sandbox import PythonSandbox
from onepolicy.envs.tools.search import Search


class ToolSpec(Protocol):
    """What the policy is told of a tool."""

    name: str
    argument: str  # name of its one argument, a string
    description: str


class Tool(ToolSpec, Protocol):
    async def call(self, text: str) -> str:
        """The reply, as the policy will read it. EpisodeError if the tool itself failed (not the input)."""
        ...

    def sources(self) -> Iterable[str]:
        """Texts that replies are cut from, beside what the tool itself may say (ASCII)."""
        ...


def build_tools(configs: Sequence[ToolConfig]) -> dict[str, Tool]:
    """By name. UsageError if one cannot run here."""
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


def schema(tool: ToolSpec) -> dict[str, object]:
    """What a chat template prints of it: an OpenAI function with one string argument."""
    properties = {tool.argument: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [tool.argument]}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


__all__ = ["Calculator", "PythonSandbox", "Search", "Tool", "ToolSpec", "build_tools", "schema"]
