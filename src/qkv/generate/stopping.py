"""Where a text ends: stop strings, cut out of text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence, Set

from qkv.config.errors import UsageError


class StopStrings:
    """Lets text through up to the stop string that begins first, wherever pieces are split.

    What may turn out to be the beginning of a stop string is held back until it is clear. A stop string inside the
    beginning of another is not final before the other is ruled out, so that the text is the same as if all of it had
    been searched at once. Raises UsageError for an empty stop string, and for what is no text.
    """

    def __init__(self, stops: str | Sequence[str] = ()) -> None:
        if not isinstance(stops, str | Sequence | Set) or isinstance(stops, bytes | bytearray):
            raise UsageError(f"`stop` is a stop string or several, not {stops!r}", hint="leaving `stop` out")
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if not all(isinstance(stop, str) and stop for stop in self.stops):
            raise UsageError("a stop string is a text of at least one character", hint="leaving `stop` out")
        self.found = False
        """A stop string was met, and the text has ended before it."""
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is now certain to be shown; nothing after `found`."""
        if self.found:
            return ""
        self._held += text
        stop, open_ = self._first_stop(), self._first_open()
        if stop is not None and stop <= open_:
            self.found = True
            return self._release(stop)
        return self._release(open_)

    def finish(self) -> str:
        """The last of the text: what was held back, up to a stop string in it."""
        if self.found:
            return ""
        stop = self._first_stop()
        self.found = stop is not None
        return self._release(len(self._held) if stop is None else stop)

    def _release(self, end: int) -> str:
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def _first_stop(self) -> int | None:
        """Where the first complete stop string begins in the held text."""
        return min((at for stop in self.stops if (at := self._held.find(stop)) >= 0), default=None)

    def _first_open(self) -> int:
        """Where the longest end of the held text begins that more text could make a stop string."""
        held = self._held
        longest = max(map(len, self.stops), default=1) - 1
        for start in range(max(0, len(held) - longest), len(held)):
            rest = held[start:]
            if any(len(stop) > len(rest) and stop.startswith(rest) for stop in self.stops):
                return start
        return len(held)
