"""Check the ratio in a benchmark's row with rounded figures."""

from typing import Any


def fits(row: dict[str, Any], *, digits: int) -> bool:
    """Whether numbers that round to `value` and `baseline_value` have a ratio that rounds to `ratio`."""
    half = 0.5 * 10**-digits + 1e-9
    low, high = max(0.0, row["value"] - half), row["value"] + half
    least = max(0.0, row["baseline_value"] - half) / high
    most = (row["baseline_value"] + half) / low if low else float("inf")
    return bool(least - 0.005 - 1e-9 <= row["ratio"] <= most + 0.005 + 1e-9)
