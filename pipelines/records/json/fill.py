"""Turn spans into Arrow buffers: one compiled loop for each type, a block at a time.

    span i ─┬─ MISSING, NULL ──► bit `at` + i cleared in `valid`, which begins as all ones
            └─ PLAIN, ODD ─┬─ the type holds the text ─────────────► item `at` + i of the buffer
                           ├─ binaries, integers, decimals, times ─► `bad_item`, `bad_code`; the item has no meaning
                           └─ floats not certain to be the nearest ► `later`; Python parses the text

    texts, binaries       bytes and int32 ends       times           int64 in the unit of the type
    integers, decimals    int64 words                truths          a bit each
    floats                float64 where exact        read_unscaled   int64 words
    find_numbers          spans of numbers

`columns.loops` has the loops that parse nothing, and `state`, which counts nulls, bad items and later ones. Promise,
for any texts that `scan` accepted: nothing is read or written outside of the arrays. Buffers have `spans.size` items
from `at` on, `bad_item` and `later` as many.
"""

from __future__ import annotations

import numpy as np

from sluice.pipelines.records.columns.loops import BADS, FIRST_DAY, LAST_DAY, LATER, NULLS, OUT_OF_RANGE
from sluice.pipelines.records.columns.spans import NULL, ODD, PLAIN, get_kind, get_size, get_start, pack
from sluice.pipelines.records.compiled.jit import (
    BYTES,
    ENDS,
    F64,
    I8,
    I32,
    I64,
    INTEGER,
    U8,
    UNSIGNED,
    Array,
    byte,
    clear,
    compiled,
    copy,
    inner,
    int64,
    uint64,
    word,
)
from sluice.pipelines.records.json.scan import unescape

INEXACT, NO_TIME, NO_BASE64, NO_NUMBER = 31, 32, 33, 34
MOST_TIME_TEXT = 64
"""Bytes of a longest text that may be a time."""
TIME_SCRATCH = 6 * MOST_TIME_TEXT
"""Bytes of such a text with each character escaped."""

_FAR = 1 << 40
_U64 = UNSIGNED
_POWERS = np.array([10**i for i in range(20)], np.uint64)
_EXACT = np.array([10.0**i for i in range(23)], np.float64)
_DAYS = np.array([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], np.int64)
_BASE64 = np.full(256, 64, np.int64)
for _i, _c in enumerate(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"):
    _BASE64[_c] = _i

_DAY_SECONDS = 86400


@inner
def _bad(state: Array, bad_item: Array, bad_code: Array, item: int, code: int) -> None:
    n = state[BADS]
    bad_item[n] = item
    bad_code[n] = code
    state[BADS] = n + 1


# --- texts -------------------------------------------------------------------------------------------------------


@compiled(BYTES, I64, INTEGER, U8, I32, U8, I64)
def texts(values: Array, spans: Array, at: int, data: Array, ends: Array, valid: Array, state: Array) -> None:
    """Strings, escapes resolved. `data` has room for all that the spans say."""
    to = int64(ends[at])
    for i in range(spans.size):
        span = spans[i]
        kind = get_kind(span)
        if kind > NULL:
            start, size = get_start(span), get_size(span)
            if kind == ODD:
                to = unescape(data, to, values, start, start + size)
            else:
                copy(data, to, values, start, size)
                to += size
        else:
            clear(valid, at + i)
            state[NULLS] += 1
        ends[at + i + 1] = to


@inner
def _sextets(values: Array, at: int) -> int:
    """Four characters of Base64 as 24 bits; negative when one is none."""
    a: int = _BASE64[byte(values, at)]
    b: int = _BASE64[byte(values, at + 1)]
    c: int = _BASE64[byte(values, at + 2)]
    d: int = _BASE64[byte(values, at + 3)]
    if (a | b | c | d) > 63:
        return int64(-1)
    return (a << 18) | (b << 12) | (c << 6) | d


@inner
def _base64(values: Array, at: int, end: int, data: Array, to: int) -> int:
    """Decode into `data` from `to` on (also in place): the next byte; −1 when it is not canonical (RFC 4648 §3.5)."""
    if (end - at) & 3:
        return int64(-1)
    # Four letters are three bytes. The last four may have padding, which only they may.
    while end - at > 4:
        bits = _sextets(values, at)
        if bits < 0:
            return int64(-1)
        data[to] = bits >> 16
        data[to + 1] = (bits >> 8) & 0xFF
        data[to + 2] = bits & 0xFF
        at += 4
        to += 3
    if at == end:
        return to
    last, third = byte(values, at + 3), byte(values, at + 2)
    # 0x3D is `=`.
    if last != 0x3D:
        bits = _sextets(values, at)
        if bits < 0:
            return int64(-1)
        data[to] = bits >> 16
        data[to + 1] = (bits >> 8) & 0xFF
        data[to + 2] = bits & 0xFF
        return to + 3
    a, b = _BASE64[byte(values, at)], _BASE64[byte(values, at + 1)]
    if (a | b) > 63:
        return int64(-1)
    if third == 0x3D:
        # Bits of the last letter that belong to no byte must be 0: else two texts would stand for one value.
        if b & 15:
            return int64(-1)
        data[to] = (a << 2) | (b >> 4)
        return to + 1
    c = _BASE64[third]
    if c > 63 or c & 3:
        return int64(-1)
    data[to] = (a << 2) | (b >> 4)
    data[to + 1] = ((b & 15) << 4) | (c >> 2)
    return to + 2


@compiled(BYTES, I64, INTEGER, U8, I32, U8, I64, I32, I8)
def binaries(
    values: Array,
    spans: Array,
    at: int,
    data: Array,
    ends: Array,
    valid: Array,
    state: Array,
    bad_item: Array,
    bad_code: Array,
) -> None:
    """Base64 → bytes. `data` has room for all that the spans say."""
    to = int64(ends[at])
    for i in range(spans.size):
        span = spans[i]
        kind = get_kind(span)
        if kind > NULL:
            start, stop = get_start(span), get_start(span) + get_size(span)
            if kind == ODD:  # PHP and others write a slash as `\/`
                stop = unescape(data, to, values, start, stop)
                after = _base64(data, to, stop, data, to)
            else:
                after = _base64(values, start, stop, data, to)
            if after < 0:
                _bad(state, bad_item, bad_code, at + i, NO_BASE64)
            else:
                to = after
        else:
            clear(valid, at + i)
            state[NULLS] += 1
        ends[at + i + 1] = to


# --- numbers -----------------------------------------------------------------------------------------------------


@inner
def _eight_digits(x: int) -> int:
    """Their value."""
    x = (x & uint64(0x0F0F0F0F0F0F0F0F)) * uint64(2561) >> uint64(8)
    x = (x & uint64(0x00FF00FF00FF00FF)) * uint64(6553601) >> uint64(16)
    return (x & uint64(0x0000FFFF0000FFFF)) * uint64(42949672960001) >> uint64(32)


@inner
def _whole(values: Array, at: int, end: int) -> int:
    """Up to 19 digits."""
    m = uint64(0)
    while end - at >= 8:
        m = m * uint64(100000000) + _eight_digits(word(values, at))
        at += 8
    while at < end:
        m = m * uint64(10) + uint64(byte(values, at) - 0x30)
        at += 1
    return m


@inner
def _times_ten(high: int, low: int, digit: int) -> tuple[int, int]:
    """128 bits times ten, plus a digit; the caller knows that it fits."""
    a = (low & uint64(0xFFFFFFFF)) * uint64(10) + uint64(digit)
    b = (low >> uint64(32)) * uint64(10) + (a >> uint64(32))
    return high * uint64(10) + (b >> uint64(32)), (b << uint64(32)) | (a & uint64(0xFFFFFFFF))


@inner
def _exact(values: Array, at: int, end: int, digits: int, scale: int) -> tuple[int, int, int]:
    """A number times 10^scale as 128 bits without sign: (high, low, 0).

    The third is a code instead if the result is not whole or has more than `digits` (≤ 38) digits. `values[at:end]` was
    scanned.
    """
    high = low = uint64(0)
    count = int64(0)  # digits from the first that is not 0 to the last that is not
    zeros = int64(0)  # seen since
    power = int64(0)  # of ten, that the last digit stands for
    point = False
    exponent = int64(0)
    p = at
    if byte(values, p) == 0x2D:
        p += 1
    # Zeros wait in `zeros` until a digit follows: those at the end only raise the power of ten, so 1.50000 has two
    # digits. Digits beyond 38 are counted, no longer added: the number is too large then, or not whole.
    while p < end:
        b = byte(values, p)
        if b == 0x2E:
            point = True
        elif b | 0x20 == 0x65:
            exponent = _parse_exponent(values, p + 1, end)
            break
        else:
            if point:
                power -= 1
            if b == 0x30:
                if count > 0:
                    zeros += 1
            else:
                count += zeros + 1
                if count <= 38:
                    for _ in range(zeros):
                        high, low = _times_ten(high, low, 0)
                    high, low = _times_ten(high, low, b - 0x30)
                zeros = int64(0)
        p += 1
    if count == 0:
        return uint64(0), uint64(0), int64(0)
    power += zeros + exponent
    if count + power > digits - scale:
        return high, low, int64(OUT_OF_RANGE)
    if power + scale < 0:
        return high, low, int64(INEXACT)
    for _ in range(power + scale):
        high, low = _times_ten(high, low, 0)
    return high, low, int64(0)


@inner
def _parse_exponent(values: Array, at: int, end: int) -> int:
    """Returns the number after an `e`; extreme numbers are clamped."""
    negative = byte(values, at) == 0x2D
    if negative or byte(values, at) == 0x2B:
        at += 1
    n = int64(0)
    while at < end:
        n = min(n * 10 + byte(values, at) - 0x30, _FAR)
        at += 1
    return -n if negative else n


@compiled(BYTES, I64, INTEGER, I64, U8, I64, I32, I8, _U64, _U64, INTEGER)
def integers(
    values: Array,
    spans: Array,
    at: int,
    out: Array,
    valid: Array,
    state: Array,
    bad_item: Array,
    bad_code: Array,
    maximum: int,
    minimum: int,
    times: int,
) -> None:
    """Whole numbers up to `maximum` and, without their sign, down to `minimum`, each multiplied by `times`.

    A uint64 keeps its bits in `out`.
    """
    for i in range(spans.size):
        span = spans[i]
        kind = get_kind(span)
        if kind <= NULL:
            clear(valid, at + i)
            state[NULLS] += 1
            out[at + i] = 0
            continue
        start, end = get_start(span), get_start(span) + get_size(span)
        negative = byte(values, start) == 0x2D
        code = int64(0)
        # 19 digits fit in 64 bits, and are read eight at a time. Others, such as 1.5e3, go through 128 bits.
        if kind != ODD and end - start <= 19:
            m = _whole(values, start + 1 if negative else start, end)
        else:
            high, m, code = _exact(values, start, end, 20, 0)
            if code == 0 and high != uint64(0):
                code = int64(OUT_OF_RANGE)
        if code == 0 and m > (minimum if negative else maximum):
            code = int64(OUT_OF_RANGE)
        if code != 0:
            _bad(state, bad_item, bad_code, at + i, code)
            m = uint64(0)
        number = int64(m)
        out[at + i] = (-number if negative else number) * times


@inner
def _short_decimal(values: Array, at: int, end: int, precision: int, scale: int) -> tuple[int, bool]:
    """The fast path of most decimals: digits, a point, no more digits than the scale, 18 in all."""
    if end - at > 19 or precision > 18:
        return uint64(0), False
    m = uint64(0)
    after = int64(-1)
    for p in range(at, end):
        b = byte(values, p)
        if b == 0x2E:
            after = int64(0)
        else:
            d = uint64(b - 0x30)
            if d > uint64(9):
                return uint64(0), False
            m = m * uint64(10) + d
            if after >= 0:
                after += 1
    if after < 0:
        after = int64(0)
    missing = scale - after
    if missing < 0 or m >= _POWERS[precision - missing if precision > missing else 0]:
        return uint64(0), m == uint64(0)
    return m * _POWERS[missing], True


@compiled(BYTES, I64, INTEGER, I64, U8, I64, I32, I8, INTEGER, INTEGER)
def decimals(
    values: Array,
    spans: Array,
    at: int,
    out: Array,
    valid: Array,
    state: Array,
    bad_item: Array,
    bad_code: Array,
    precision: int,
    scale: int,
) -> None:
    """Decimals of 128 bits: two items of `out` each, the low one first."""
    for i in range(spans.size):
        span = spans[i]
        kind = get_kind(span)
        to = 2 * (at + i)
        if kind <= NULL:
            clear(valid, at + i)
            state[NULLS] += 1
            out[to] = 0
            out[to + 1] = 0
            continue
        start, end = get_start(span), get_start(span) + get_size(span)
        negative = byte(values, start) == 0x2D
        high = uint64(0)
        low, done = _short_decimal(values, start + 1 if negative else start, end, precision, scale)
        if not done:
            high, low, code = _exact(values, start, end, precision, scale)
            if code != 0:
                _bad(state, bad_item, bad_code, at + i, code)
                high = low = uint64(0)
        if negative:  # two's complement: all bits inverted, plus one, whose carry reaches `high` if `low` becomes 0
            low = ~low + uint64(1)
            high = ~high
            if low == uint64(0):
                high += uint64(1)
        out[to] = int64(low)
        out[to + 1] = int64(high)


@compiled(BYTES, I64, I64)
def find_numbers(values: Array, spans: Array, numbers: Array) -> None:
    """Spans of texts without escapes → spans of the numbers that they are: as in JSON, or with a plus sign, leading
    zeros, or no digits on one side of the point. 0 for other texts; spans without a text stay."""
    for i in range(spans.size):
        span = spans[i]
        numbers[i] = span
        if get_kind(span) <= NULL:
            continue
        start, end = get_start(span), get_start(span) + get_size(span)
        if end > values.size:
            raise IndexError("texts outside of their buffer")
        if start < end and byte(values, start) == 0x2B:
            start += 1
        at, digits, kind = start, int64(0), PLAIN
        if at < end and byte(values, at) == 0x2D and start == get_start(span):
            at += 1
        while at < end:
            b = byte(values, at)
            if uint64(b - 0x30) < uint64(10):
                digits += 1
            elif b == 0x2E and kind == PLAIN:
                kind = ODD
            else:
                break
            at += 1
        if digits > 0 and at < end and byte(values, at) | 0x20 == 0x65:
            kind = ODD
            at += 1
            if at < end and (byte(values, at) == 0x2B or byte(values, at) == 0x2D):
                at += 1
            digits = int64(0)
            while at < end and uint64(byte(values, at) - 0x30) < uint64(10):
                digits += 1
                at += 1
        numbers[i] = pack(start, end, kind) if digits > 0 and at == end else int64(0)


@compiled(BYTES, ENDS, INTEGER, I64, I8, UNSIGNED, UNSIGNED)
def read_unscaled(data: Array, ends: Array, to: int, out: Array, codes: Array, most_high: int, most_low: int) -> None:
    """Big-endian numbers in two's complement → two items of `out` each, from number `to` on, the low one first.

    `codes` becomes 0, or the code of a number that is empty or beyond `most` (128 bits) on either side of 0.
    """
    for i in range(codes.size):
        at, end = int64(ends[i]), int64(ends[i + 1])
        if at < 0 or at > end or end > data.size:
            raise IndexError("numbers outside of their buffer")
        codes[i] = NO_NUMBER if at == end else 0
        negative = at < end and byte(data, at) >= 0x80
        high = low = uint64(0)
        if negative:
            high = low = ~uint64(0)
        sign = int64(0xFF) if negative else int64(0)
        while end - at > 16:
            if byte(data, at) != sign:
                codes[i] = OUT_OF_RANGE
            at += 1
        while at < end:
            high = (high << uint64(8)) | (low >> uint64(56))
            low = (low << uint64(8)) | uint64(byte(data, at))
            at += 1
        out[2 * (to + i)] = int64(low)
        out[2 * (to + i) + 1] = int64(high)
        if (high >> uint64(63) != uint64(0)) != negative:
            codes[i] = OUT_OF_RANGE
        if negative:
            low = ~low + uint64(1)
            high = ~high
            if low == uint64(0):
                high += uint64(1)
        if high > most_high or (high == most_high and low > most_low):
            codes[i] = OUT_OF_RANGE


@inner
def _single_is_sure(x: float) -> bool:
    """Returns whether rounding a rounded float64 gives the nearest float32: the float64 is not halfway between two of
    them, and in their normal range."""
    bits = np.float64(x).view(np.uint64)
    return bits & uint64(0x1FFFFFFF) != uint64(0x10000000) and 1.1754944e-38 < x < 3.4e38


@inner
def _parts(values: Array, at: int, end: int) -> tuple[int, int, bool]:
    """A number without its sign: (up to 19 digits, their power of ten, whether that is all of it)."""
    m = uint64(0)
    count = int64(0)
    power = int64(0)
    point = False
    exact = True
    exponent = int64(0)
    while at < end:
        b = byte(values, at)
        d = uint64(b - 0x30)
        if d < uint64(10):
            if count < 19:
                m = m * uint64(10) + d
                if m != uint64(0):
                    count += 1
                if point:
                    power -= 1
            else:
                exact = exact and d == uint64(0)
                if not point:
                    power += 1
        elif b == 0x2E:
            point = True
        else:
            exponent = _parse_exponent(values, at + 1, end)
            break
        at += 1
    return m, power + exponent, exact


@compiled(BYTES, I64, INTEGER, F64, U8, I64, I32, INTEGER)
def floats(
    values: Array, spans: Array, at: int, out: Array, valid: Array, state: Array, later: Array, single: int
) -> None:
    """The nearest float64, or with `single` the nearest float32 as one, by Clinger's fast path.

    Texts that this path does not decide go by their index in `spans` into `later`.
    """
    for i in range(spans.size):
        span = spans[i]
        kind = get_kind(span)
        if kind <= NULL:
            clear(valid, at + i)
            state[NULLS] += 1
            out[at + i] = 0.0
            continue
        start, end = get_start(span), get_start(span) + get_size(span)
        negative = byte(values, start) == 0x2D
        m, power, sure = _parts(values, start + 1 if negative else start, end)
        number = 0.0
        if m != uint64(0):
            # Both are exact in a float64 then, so one rounding gives the nearest number.
            if sure and m <= uint64(1 << 53) and -22 <= power <= 22:
                number = np.float64(m)
                number = number / _EXACT[-power] if power < 0 else number * _EXACT[power]
                if single:
                    sure = _single_is_sure(number)
                    number = np.float64(np.float32(number))
            else:
                sure = False
            if not sure:
                later[state[LATER]] = i
                state[LATER] += 1
        out[at + i] = -number if negative else number


@compiled(BYTES, I64, INTEGER, U8, U8, I64)
def truths(values: Array, spans: Array, at: int, out: Array, valid: Array, state: Array) -> None:
    """Booleans, a bit each; `out` begins as all ones."""
    for i in range(spans.size):
        span = spans[i]
        if get_kind(span) <= NULL:
            clear(valid, at + i)
            state[NULLS] += 1
        elif byte(values, get_start(span)) == 0x66:
            clear(out, at + i)


# --- times -------------------------------------------------------------------------------------------------------


@inner
def _two(buf: Array, at: int) -> int:
    """Two digits; a large number when they are none. The caller has checked that two bytes are there."""
    a: int = byte(buf, at) - 0x30
    b: int = byte(buf, at + 1) - 0x30
    if uint64(a) > uint64(9) or uint64(b) > uint64(9):
        return int64(1000)
    return 10 * a + b


@inner
def _day(buf: Array, at: int) -> int:
    """Days since the epoch of the ten bytes `YYYY-MM-DD`; a number below FIRST_DAY when they say no day."""
    century, years, month, day = _two(buf, at), _two(buf, at + 2), _two(buf, at + 5), _two(buf, at + 8)
    if byte(buf, at + 4) != 0x2D or byte(buf, at + 7) != 0x2D or century > 99 or years > 99:
        return int64(FIRST_DAY - 1)
    year = 100 * century + years
    if year < 1 or month < 1 or month > 12 or day < 1:
        return int64(FIRST_DAY - 1)
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    if day > _DAYS[month] + (1 if leap and month == 2 else 0):
        return int64(FIRST_DAY - 1)
    # Howard Hinnant's days_from_civil: years begin in March, eras have 400 of them.
    if month <= 2:
        year -= 1
    era = year // 400
    of_era = year - 400 * era
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return 146097 * era + 365 * of_era + of_era // 4 - of_era // 100 + of_year - 719468


@inner
def _parse_offset(buf: Array, at: int, end: int) -> int:
    """Seconds east of UTC of `Z`, `+hh`, `+hhmm`, `+hh:mm` or nothing (0); a large number for anything else."""
    if at == end:
        return int64(0)
    sign = byte(buf, at)
    if sign | 0x20 == 0x7A:
        return int64(0) if at + 1 == end else int64(_FAR)
    if sign != 0x2B and sign != 0x2D:
        return int64(_FAR)
    size = end - at
    if size != 3 and size != 5 and (size != 6 or byte(buf, at + 3) != 0x3A):
        return int64(_FAR)
    hours = _two(buf, at + 1)
    minutes = int64(0) if size == 3 else _two(buf, end - 2)
    if hours > 23 or minutes > 59:
        return int64(_FAR)
    seconds = 3600 * hours + 60 * minutes
    return -seconds if sign == 0x2D else seconds


@inner
def _minute(buf: Array, at: int) -> int:
    """Seconds since the epoch of the sixteen bytes `YYYY-MM-DDThh:mm`; _FAR when they say none."""
    day = _day(buf, at)
    hour, minute = _two(buf, at + 11), _two(buf, at + 14)
    if day < FIRST_DAY or hour > 23 or minute > 59 or byte(buf, at + 13) != 0x3A:
        return int64(_FAR)
    if byte(buf, at + 10) | 0x20 != 0x74 and byte(buf, at + 10) != 0x20:
        return int64(_FAR)
    return day * _DAY_SECONDS + 3600 * hour + 60 * minute


@inner
def _instant(minute: int, buf: Array, at: int, end: int, digits: int) -> tuple[int, int]:
    """Parses a time after its minute: (units of 10^−digits seconds since the epoch, OK or a code)."""
    if end - at == 8 and 3 <= digits <= 6 and minute != _FAR:
        # `:ss.mmmZ`, the most frequent. Less these characters, its marks are 0 and its digits at most 9.
        text = word(buf, at) - uint64(0x5A3030302E30303A)
        above = (text + uint64(0x7676767676767676)) | text
        second = int64((text >> uint64(8)) & uint64(15)) * 10 + int64((text >> uint64(16)) & uint64(15))
        if (text & uint64(0xFF000000FF0000FF)) | (above & uint64(0x8080808080808080)) == uint64(0) and second <= 59:
            # Three digits are the last of eight: the others are 0, as characters less a zero are.
            fraction = _eight_digits((text & uint64(0x00FFFFFF00000000)) << uint64(8))
            return (minute + second) * int64(_POWERS[digits]) + int64(fraction * _POWERS[digits - 3]), int64(0)
    second = fraction = int64(0)
    if end - at >= 3 and byte(buf, at) == 0x3A:
        second = _two(buf, at + 1)
        at += 3
        if at < end and byte(buf, at) == 0x2E:
            at += 1
            fraction_digits = int64(0)
            while at < end and uint64(byte(buf, at) - 0x30) < uint64(10):
                if fraction_digits < digits:
                    fraction = fraction * 10 + byte(buf, at) - 0x30
                fraction_digits += 1
                at += 1
            if fraction_digits == 0:
                return int64(0), int64(NO_TIME)
            while fraction_digits < digits:
                fraction *= 10
                fraction_digits += 1
    east = _parse_offset(buf, at, end)
    if minute == _FAR or second > 59 or east == _FAR:
        return int64(0), int64(NO_TIME)
    seconds = minute + second - east
    if seconds < FIRST_DAY * _DAY_SECONDS or seconds >= (LAST_DAY + 1) * _DAY_SECONDS:
        return int64(0), int64(OUT_OF_RANGE)
    if digits == 9 and _beyond_64_bits(seconds, fraction):
        return int64(0), int64(OUT_OF_RANGE)
    return seconds * int64(_POWERS[digits]) + fraction, int64(0)


@inner
def _beyond_64_bits(seconds: int, nanoseconds: int) -> bool:
    """Returns whether a time in nanoseconds since the epoch exceeds 64 bits, which begin and end within a second."""
    if seconds < 0:
        return seconds < -9223372037 or (seconds == -9223372037 and nanoseconds < 145224192)
    return seconds > 9223372036 or (seconds == 9223372036 and nanoseconds > 854775807)


@inner
def _time(buf: Array, at: int, end: int, digits: int) -> tuple[int, int]:
    if end - at == 10:
        day = _day(buf, at)
        if day < FIRST_DAY:
            return int64(0), int64(NO_TIME)
        if digits < 0:
            return day, int64(0)
        return _instant(day * _DAY_SECONDS, buf, end, end, digits)
    if digits < 0 or end - at < 16 or end - at > MOST_TIME_TEXT:
        return int64(0), int64(NO_TIME)
    return _instant(_minute(buf, at), buf, at + 16, end, digits)


@compiled(BYTES, I64, INTEGER, I64, U8, I64, I32, I8, U8, INTEGER)
def times(
    values: Array,
    spans: Array,
    at: int,
    out: Array,
    valid: Array,
    state: Array,
    bad_item: Array,
    bad_code: Array,
    scratch: Array,
    digits: int,
) -> None:
    """ISO 8601 texts → units of 10^−digits seconds since the epoch; digits −1: days. `scratch`: TIME_SCRATCH bytes.

    Digits of the fraction beyond the unit are cut off. Times often share their minute with the one before, which is
    not worked out again then.
    """
    first = second = uint64(0)
    minute = int64(_FAR)
    for i in range(spans.size):
        span = spans[i]
        kind = get_kind(span)
        if kind <= NULL:
            clear(valid, at + i)
            state[NULLS] += 1
            out[at + i] = 0
            continue
        start, end = get_start(span), get_start(span) + get_size(span)
        if kind == ODD:
            if end - start > TIME_SCRATCH:
                code = int64(NO_TIME)
                number = int64(0)
            else:
                end = unescape(scratch, 0, values, start, end)
                number, code = _time(scratch, int64(0), end, digits)
        elif 16 <= end - start <= MOST_TIME_TEXT and digits >= 0:
            # Sixteen bytes are all up to the minute. Where they are those of the time before, so is the minute.
            if word(values, start) != first or word(values, start + 8) != second:
                first, second = word(values, start), word(values, start + 8)
                minute = _minute(values, start)
            number, code = _instant(minute, values, start + 16, end, digits)
        else:
            number, code = _time(values, start, end, digits)
        if code != 0:
            _bad(state, bad_item, bad_code, at + i, code)
        out[at + i] = number
