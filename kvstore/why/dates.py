"""Dates and times of day in a text, as templates and programs print them."""

import re

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|"
    r"sep(?:t(?:ember)?)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_WEEKDAY = (
    r"(?:mon(?:day)?|tue(?:s(?:day)?)?|wed(?:nesday)?|thu(?:rs(?:day)?)?|fri(?:day)?|"
    r"sat(?:urday)?|sun(?:day)?)"
)
_DAY, _YEAR = r"[0-3]?\d(?:st|nd|rd|th)?", r"(?:19|20)\d\d"
_TIME = r"[0-2]?\d:[0-5]\d(?::[0-5]\d(?:[.,]\d+)?)?(?: ?[ap]m)?(?: ?Z|[+-]\d\d:?\d\d)?"
_DATE = "|".join(
    (
        rf"{_YEAR}[-/.][01]?\d[-/.][0-3]?\d",
        r"[0-3]?\d[-/.][0-3]?\d[-/.](?:19|20)?\d\d",
        rf"{_DAY} (?:of )?{_MONTH},?(?: {_YEAR})?",
        rf"{_MONTH} {_DAY},?(?: {_YEAR})?",
    )
)
_MOMENT = re.compile(
    rf"\b(?:{_WEEKDAY},? )?(?:(?:{_DATE})(?:[T,]? ?(?:at )?{_TIME})?|{_TIME})(?!\w)|"
    rf"\b{_WEEKDAY}\b",
    re.IGNORECASE,
)


def find_dates(text: str) -> list[tuple[int, int]]:
    """Start and end of each, in order."""
    return [found.span() for found in _MOMENT.finditer(text)]
