"""JSON that another process sent, as what it must be."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from onepolicy.config import TrainingError, printable

SHOWN = 200  # characters of what is wrong
QUOTED = 2000  # characters of another process's own error


def read_as(kind: Any, value: Any, what: str) -> Any:
    """The value, decoded from JSON, as this type: a TypedDict, a tuple, a dataclass. TrainingError if it is none.

    what: the value's name in the error. Nothing is converted but lists to tuples.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(value), strict=True)
    except RecursionError:
        raise TrainingError(f"{what} is malformed: too deep") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = f"{where}: {first['msg']}"
        raise TrainingError(f"{what} is malformed: {printable(problem[:SHOWN])}") from None


def quoted(text: object) -> str:
    """Return what another process says, short and printable."""
    return printable(str(text)[:QUOTED])


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
