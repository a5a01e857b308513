"""Numbers as people write them: `1.299,00 €`, `$1,299.00`, `₽ 349`, `1 299,00`, `1'299.-`.

The text must have exactly one number. Which sign is the decimal one:

- With both `.` and `,` it is the one that comes last: `1.299,00`, `1,299.00`.
- A sign that is there twice separates thousands: `1.299.000`.
- One sign with exactly three digits behind it, and one to three before it that are not `0`,
  separates thousands: `1.299` and `1,299` are 1299. Prices have two decimals, not three.
- Any other single sign is the decimal one: `49,9`, `0.299`, `1234.567`.
- Spaces and apostrophes separate thousands, in groups of three: `1 299`, `1'299`.

Groups of two before the last three are taken too (`1,29,999`). `.-`, `,-` and `,--` stand for no
decimals. A minus counts in front of the number or of its currency; brackets mean nothing: shops
write `(12)` for twelve reviews. `1.2k` and `3 Mio.` are not read: most likely they are rounded.
"""

import math
import re
import unicodedata

TEXT_CHARS_MAX = 200  # a longer text is no number, whatever is in it

_SIGNS = str.maketrans(
    dict.fromkeys("‐‑‒–—−", "-") | {"’": "'", "ʼ": "'", "`": "'", "٫": ".", "٬": "'"}
)
# Digits with single signs between them; a space counts if three digits follow.
_NUMBER = re.compile(r"\d+(?:(?:[.,']| (?=\d{3}(?!\d)))\d+)*")
_ROUNDED = re.compile(r" ?(?:[kKMB]|(?i:mio|mrd|tsd|mn|bn|тыс|млн|млрд))(?!\w)")
# A minus at the end of a text, perhaps with a currency behind it.
_SIGNED = re.compile(r"-(?P<gap> ?)(?:[$€£¥₽₴₸₺₹₩₪₫₱฿₦] ?)?$")
_GROUPS = r"\d{{1,3}}(?:{0}\d{{2,3}})*{0}\d{{3}}"


def parse_number(value: object) -> float | None:
    """Return the one number of a text, or a number as it is; None if there is none, or several."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if not isinstance(value, str):
        return _finite(value)
    if len(value) > TEXT_CHARS_MAX:
        return None
    if any(each.isdigit() and not each.isdecimal() for each in value):  # `49⁹⁹` is not 4999
        return None
    text = unicodedata.normalize("NFKC", value).translate(_SIGNS)
    text = re.sub(r"\s+", " ", text)
    found = list(_NUMBER.finditer(text))
    if len(found) != 1 or _ROUNDED.match(text, found[0].end()):
        return None
    digits, before = found[0][0], text[: found[0].start()]
    if before.endswith(".") and not before[-2:-1].isalnum():  # `$.99`; not `Rs.500`
        digits, before = f"0.{digits}", before[:-1]
    number = _read(digits)
    return None if number is None else _finite(-number if _is_negative(before) else number)


def _read(digits: str) -> float | None:
    """Return the value of digits with signs between them; None if they are no number."""
    decimal = _decimal_sign(digits)
    whole, _, fraction = digits.rpartition(decimal) if decimal else (digits, "", "")
    signs = {each for each in whole if not each.isdecimal()}
    if fraction and not fraction.isdecimal():
        return None
    if len(signs) > 1 or (signs and not re.fullmatch(_GROUPS.format(re.escape(*signs)), whole)):
        return None
    whole = "".join(each for each in whole if each.isdecimal())
    return float(f"{whole}.{fraction or 0}")


def _decimal_sign(digits: str) -> str:
    """Return the sign before the decimals, "" if there are none."""
    last = max(".,", key=digits.rfind)
    if digits.count(last) != 1:
        return ""
    before, _, after = digits.rpartition(last)
    if not before.isdecimal():  # other signs separate its thousands
        return last
    thousands = len(after) == 3 and len(before) <= 3 and before != "0"
    return "" if thousands else last


def _is_negative(before: str) -> bool:
    """Return whether a minus belongs to the number; `A - 5` and `A-5` have a dash."""
    found = _SIGNED.search(before)
    if found is None:
        return False
    ahead, touches = before[: found.start()], not found["gap"]
    return not ahead.strip() or (touches and not ahead[-1].isalnum())


def _finite(number: float) -> float | None:
    try:
        number = float(number)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
