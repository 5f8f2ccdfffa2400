"""Fields of request bodies: each is honoured, refused or ignored aloud; none is lost silently.

A field that some project documents and that would change the result is honoured, or refused unless
its value is neutral. A name that nobody documents is ignored and reported in a header.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from seawall.core.errors import RequestError
from seawall.core.params import brief


class Fields:
    """A body's fields; null is the same as not given."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = {name: value for name, value in body.items() if value is not None}

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value, not checked."""
        return self._body.get(name, default)

    def check(
        self,
        honoured: AbstractSet[str],
        neutral: Mapping[str, tuple[object, ...]],
        harmless: AbstractSet[str],
    ) -> list[str]:
        """Sort all names; returns those that nobody documents.

        Args:
            honoured: names that are read somewhere else.
            neutral: names of features that are not built, and values that ask for nothing.
            harmless: names that change no result.

        Raises:
            RequestError: a feature that is not built was asked for.
        """
        ignored = []
        for name, value in self._body.items():
            if name in honoured or name in harmless:
                continue
            if name not in neutral:
                ignored.append(name)
            elif value not in ([], {}, "") and not _is_one_of(value, neutral[name]):
                raise RequestError(f"{name}: got {brief(value)}, not built; leave it out")
        return ignored


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    # True is 1 for Python, but not for anybody who writes JSON.
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed
    )


def flag(value: object, name: str, default: bool = False) -> bool:
    """A boolean field.

    Raises:
        RequestError: it is something else.
    """
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name}: got {brief(value)}, true or false is needed")
    return value


def whole(value: object, name: str, *, least: int = 0, most: int | None = None) -> int | None:
    """A whole number within limits, or None.

    Raises:
        RequestError: it is something else.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}: got {brief(value)}, a whole number is needed")
    if value < least:
        raise RequestError(f"{name}: got {brief(value)}, the least is {least}; raise it")
    if most is not None and value > most:
        raise RequestError(f"{name}: got {brief(value)}, the most is {most}; lower it")
    return value
