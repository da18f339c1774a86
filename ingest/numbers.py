"""Numbers of spreadsheets and charts with what their format says: dates, durations, percentages, units.

A format decides what a number means, not how many of its digits are read: 25 %, 9 kg, 37:30 hours. Dates are ISO.
"""

from __future__ import annotations

import re
from datetime import date, timedelta
from decimal import Decimal
from functools import lru_cache
from math import isfinite

_DAY = 86_400
_DAY_ZERO = date(1899, 12, 30)
_DAYS_TO_1904 = 1462
_BUILT_IN = {  # numFmtId, ECMA-376 part 1, 18.8.30; 27 to 36 and 50 to 58 are dates of East Asian editions
    **dict.fromkeys(("14", "15", "16", "17", *map(str, (*range(27, 37), *range(50, 59)))), "yyyy-mm-dd"),
    **dict.fromkeys(("18", "19", "20", "21", "45"), "h:mm"),
    "9": "0%",
    "10": "0.00%",
    "22": "yyyy-mm-dd h:mm",
    "46": "[h]:mm:ss",
    "47": "mm:ss.0",
}
_QUOTED = re.compile(r'"[^"]*"?|\\.|[_*].|\[(?!h+\]|m+\]|s+\])[^\]]*\]')
_TOKEN = re.compile(
    r'"([^"]*)"?|\\(.)|\[\$([^\]-]*)[^\]]*\]|\[[^\]]*\]|[_*].|([0#?.,]+)|([ $%]|[^\x00-\x7f])|([/Ee])|.', re.DOTALL
)


def format_code(number: str, own: dict[str, str]) -> str:
    """The format of a numFmtId, which may be one of the workbook's own."""
    return own.get(number, _BUILT_IN.get(number, ""))


def formatted(value: str, code: str, *, days: int = 0) -> str:
    """A stored number under its format; `days` is added to dates (`from_1904`). What is no number is as it is."""
    try:
        number = float(value)
    except ValueError:
        return value
    if not isfinite(number):
        return value
    kind, detail = _meaning(code) if 0 < len(code) < 256 else ("", "")
    if kind == "duration":
        return _duration(number, detail)
    if kind == "moment" and 0 <= number < 10_000_000:
        return _moment(number, detail, days)
    return _measured(number, code) if kind == "measure" else digits(value)


def from_1904(flag: str) -> int:
    """The days to add to a workbook's dates, by its `date1904`."""
    return _DAYS_TO_1904 if flag in ("1", "true", "on") else 0


def digits(value: str) -> str:
    """A stored number with the 15 digits that spreadsheets count with: 0.07, not 0.07000000000000001."""
    if re.fullmatch(r"-?\d+", value):
        return value
    number = float(value)
    short = f"{number:.15g}"
    return format(Decimal(short), "f") if number == 0 or 1e-9 < abs(number) < 1e21 else short


@lru_cache(1000)
def _meaning(code: str) -> tuple[str, str]:
    """("duration", "moment", "measure" or "", the format without its literals)."""
    bare = _QUOTED.sub("", code.lower()).split(";")[0].replace("general", "#")
    if re.search(r"\[[hms]", bare):
        return "duration", bare
    if re.search(r"[ymdhs]", bare):
        return "moment", bare
    return ("measure" if re.search(r"[0#?]", bare) else ""), bare


def _duration(number: float, bare: str) -> str:
    whole, _, fraction = f"{abs(number) * _DAY:.{3 if '.0' in bare else 0}f}".partition(".")
    minutes, seconds = divmod(int(whole), 60)
    fraction = f".{fraction}".rstrip(".0")
    ending = f":{seconds:02}{fraction}" if seconds or fraction or bare.count("s") else ""
    if "[h" in bare:
        text = f"{minutes // 60}:{minutes % 60:02}{ending}"
    else:
        text = f"{minutes}{ending}" if "[m" in bare else f"{whole}{fraction}"
    return "-" * (number < 0) + text


def _moment(number: float, bare: str, days: int) -> str:
    """A date, a time or both; times are rounded to the second, as they are shown."""
    whole, _, fraction = f"{number * _DAY:.{3 if '.0' in bare else 0}f}".partition(".")
    day, seconds = divmod(int(whole), _DAY)
    fraction = f".{fraction}".rstrip(".0")
    time = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{fraction}"
    timed = re.search(r"[hs]", bare)
    if not (day or days) or (timed and day < 366 and not re.search(r"[yd]", bare)):
        return time
    if not days and 0 < day < 60:
        day += 1  # day 60 is 29 February 1900, which never was
    try:
        text = str(_DAY_ZERO + timedelta(days=day + days))
    except OverflowError:
        return digits(repr(number))
    return f"{text} {time}" if seconds or fraction else text


def _measured(number: float, code: str) -> str:
    """A number with the percent sign, the currency, the unit and the leading zeros of its format."""
    sections = re.split(r';(?=(?:[^"]*"[^"]*")*[^"]*$)', code)
    section = sections[1] if number < 0 and len(sections) > 1 else sections[0]
    mask, before, after = "", "", ""
    plain = digits(repr(number))
    for token in _TOKEN.finditer(re.sub("general", "#", section, flags=re.IGNORECASE)):
        literal = (token[1] or token[2] or token[3] or token[5] or "").strip("-+()")
        if token[6] or token[0].startswith(("[<", "[>", "[=")) or (token[4] and mask):
            return plain  # a fraction, an exponent, a condition, digits with something between them
        mask += token[4] or ""
        before, after = (before, after + literal) if mask else (before + literal, after)
    whole, _, _ = mask.partition(".")
    thousands = max(len(part) - len(part.rstrip(",")) for part in (whole, mask))
    scale = 1000**thousands / (100 if "%" in _QUOTED.sub("", section) else 1)
    head, point, tail = digits(repr(abs(number) / scale)).partition(".")
    head = head.zfill(whole.count("0")) if "," not in whole else head
    return f"{'-' * (number < 0)}{before.lstrip()}{head}{point}{tail}{after}" if mask else plain
