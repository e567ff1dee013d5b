"""How reading an answer may end without a value."""

from __future__ import annotations


class NoAnswer(Exception):
    """The text gives no answer; the message is the reason."""


class Rejected(Exception):
    """Over a cap; the message is the reason."""


class Unread(Exception):
    """Not of the forms that are read here, or of two readings: only the same text is equal to it."""


class Undefined(Exception):
    """It has no value: a division by zero, the logarithm of zero."""


class Undecided(Exception):
    """Read, but nothing here can tell whether the two are the same."""
