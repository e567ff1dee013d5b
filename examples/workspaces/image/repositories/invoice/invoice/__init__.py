"""Sums of invoices."""

from invoice.sums import tax, total

__all__ = ["tax", "total"]
