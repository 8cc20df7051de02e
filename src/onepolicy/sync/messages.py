"""Validation of JSON that another process sent."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from onepolicy.config import TrainingError, printable

MAX_PROBLEM_CHARS = 200
MAX_QUOTED_CHARS = 2000


def validate_message(kind: Any, value: Any, name: str) -> Any:
    """Return decoded JSON as the given type: a TypedDict, a tuple or a dataclass.

    Only lists are converted, to tuples. name: the value's name in the error.
    Raises TrainingError if the value is not of this type.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(value), strict=True)
    except RecursionError:
        raise TrainingError(f"{name} is malformed: too deep") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        problem = f"{field}: {first['msg']}"
        raise TrainingError(
            f"{name} is malformed: {printable(problem[:MAX_PROBLEM_CHARS])}"
        ) from None


def quote_error(text: object) -> str:
    """Return another process's error text, shortened and with unprintable characters escaped."""
    return printable(str(text)[:MAX_QUOTED_CHARS])


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
