"""Text from tokens that arrive one by one."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Turns ids into text as they come; the pieces, joined, equal decoding all ids at once.

    A character spread over several tokens waits for its last byte; a byte that can never become one is U+FFFD at once.
    Made by `Tokenizer.stream`. `piece` gives the bytes of an id (and is told if nothing was said yet), None to skip it.
    """

    def __init__(self, piece: Callable[[int, bool], bytes | None]) -> None:
        self._piece = piece
        self._first = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly none. Raises UsageError for an id outside the vocabulary."""
        data = self._piece(token_id, self._first)
        if data is None:
            return ""
        self._first = False
        text = self._decoder.decode(data)
        waiting = self._decoder.getstate()[0]
        if waiting[:1] == b"\xed" and waiting[1:] >= b"\xa0":  # half a surrogate pair: Python waits one byte too long
            text += self._decoder.decode(b"", final=True)
        return text

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed. The decoder starts afresh."""
        self._first = True
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
