"""What has to be done before what."""

from order.sorting import Cycle, sort

__all__ = ["Cycle", "sort"]
