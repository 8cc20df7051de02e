"""How many examples hypothesis draws for a property."""

from hypothesis import settings


def examples(number: int) -> settings:
    """Return a decorator: draw so many examples, in `make test` a third of them."""
    if settings.get_current_profile_name() == "gate":
        number = -(-number // 3)
    return settings(max_examples=number)
