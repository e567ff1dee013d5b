UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
"""Seconds in each, the largest first."""
