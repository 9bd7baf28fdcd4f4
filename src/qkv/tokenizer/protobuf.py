"""The wire format of protocol buffers, as far as reading the fields of a message goes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

Value = int | float | bytes

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class WireError(Exception):
    """Bytes that are no message; says what is wrong and at which byte of the message."""


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """(number, value) of each field, in order: an int, a float for fixed widths, or bytes (a message, a text).

    Nothing is copied or allocated beyond the message's own length. Raises WireError.
    """
    place = 0
    while place < len(message):
        start = place
        key, place = _varint(message, place)
        number, wire = key >> 3, key & 7
        value: Value
        if number == 0:
            raise WireError(f"a field without a number at byte {start}")
        if wire == _VARINT:
            value, place = _varint(message, place)
        elif wire == _BYTES:
            length, place = _varint(message, place)
            value = message[place : place + length]
            if len(value) < length:
                raise WireError(f"a field of {length} bytes at byte {start}, where {len(value)} are left")
            place += length
        elif wire in (_FIXED32, _FIXED64):
            form = "<f" if wire == _FIXED32 else "<d"
            if place + struct.calcsize(form) > len(message):
                raise WireError(f"a number that is cut off at byte {start}")
            (value,) = struct.unpack_from(form, message, place)
            place += struct.calcsize(form)
        else:
            raise WireError(f"a field of the unknown wire type {wire} at byte {start}")
        yield number, value


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """A whole number of 7 bits a byte, lowest first, and the place after it."""
    number = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            raise WireError(f"a number that is cut off at byte {place}")
        byte = message[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place
    raise WireError(f"a number of more than ten bytes at byte {place}")
