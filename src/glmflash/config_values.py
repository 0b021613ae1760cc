"""Checked access to the values of a config.json.

Knows types, ranges, and how to name a wrong value; knows no key of any model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from glmflash.errors import ConfigError

LARGEST = 2**31 - 1


def shorten(value: object, limit: int = 80) -> str:
    """`repr` on one line, cut to `limit` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of more than 4,300 digits
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class Section:
    """One JSON object of a config file; every method raises ConfigError with key and file named.

    where: the file, for messages. prefix: path of this object inside the file ("text_config.").
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values, self.where, self.prefix = values, where, prefix

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def wrong(self, key: str, expected: str) -> ConfigError:
        """The error for a value that is missing or not as expected."""
        found = (
            f"is {shorten(self.values[key])}" if key in self.values else "is missing from the file"
        )
        return ConfigError(f"{self.where}: {self.prefix}{key} {found}; expected {expected}")

    def contradiction(self, found: str, expected: str) -> ConfigError:
        """The error for a value inside `found`, which names its own key."""
        return ConfigError(f"{self.where}: {self.prefix}{found}; {expected}")

    def require(self, condition: bool, key: str, expected: str) -> None:
        """Raise ConfigError unless the condition on the value of `key` holds."""
        if not condition:
            raise self.wrong(key, expected)

    def integer(self, key: str, low: int = 1, high: int = LARGEST) -> int:
        """A whole number in low..high (not a bool, not 4.0)."""
        value = self.values.get(key)
        if not _is_integer(value) or not low <= value <= high:
            limit = f"{low}..{high}" if high != LARGEST else f">= {low}"
            raise self.wrong(key, f"an integer {limit}" if low != high else str(low))
        return value

    def number(self, key: str, expected: str = "a finite number > 0", sign: int = 1) -> float:
        """A finite number of the given sign (1 or -1)."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, expected)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number * sign <= 0:
            raise self.wrong(key, expected)
        return number

    def flag(self, key: str) -> bool:
        """true or false."""
        value = self.values.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        """One of the allowed strings."""
        value = self.values.get(key)
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(key, " or ".join(repr(a) for a in allowed))
        return value

    def constant(self, key: str, expected: object) -> None:
        """A value that the implementation has built in: may be left out, may not differ."""
        value = self.values.get(key)
        if value is not None and (type(value) is not type(expected) or value != expected):
            raise self.wrong(key, f"{expected!r} (nothing else is implemented)")

    def kinds(self, key: str, count: int, allowed: Mapping[str, str]) -> tuple[str, ...]:
        """One name per layer, each a key of `allowed`, replaced by its value there."""
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, f"a list of {count} names")
        if len(value) != count:
            raise self.contradiction(
                f"{key} has {len(value)} entries", f"expected {count}, one per layer"
            )
        for i, name in enumerate(value):
            if not isinstance(name, str) or name not in allowed:
                raise self.contradiction(
                    f"{key}[{i}] is {shorten(name)}",
                    f"expected {' or '.join(repr(a) for a in allowed)}",
                )
        return tuple(allowed[name] for name in value)

    def ids(self, key: str, vocabulary: int) -> tuple[int, ...]:
        """Token ids inside the vocabulary: one, a list, or null for none."""
        if key not in self.values:
            raise self.wrong(key, "a token id or a list of token ids")
        value = self.values[key]
        found = value if isinstance(value, list) else [] if value is None else [value]
        for number in found:
            if not _is_integer(number) or not 0 <= number < vocabulary:
                raise self.wrong(key, f"token ids 0..{vocabulary - 1}")
        return tuple(found)

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings; absent or null is empty."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return tuple(value)

    def section(self, key: str) -> Section:
        """The object under `key`."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Section(value, self.where, f"{self.prefix}{key}.")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
