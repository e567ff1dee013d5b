"""Lines of comma-separated values."""

from fields.lines import split

__all__ = ["split"]
