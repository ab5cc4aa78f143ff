"""Stop strings over a stream of text: what may already be shown, and where the text ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back only the tail that could still become a stop string. The match itself is never shown.

    With several strings the one that completes first wins, as if the text had come letter by letter: how the stream was cut into
    pieces never changes the result.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that became safe to show. Once `matched` is set nothing more comes out."""
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The held tail: the stream ended, so it can no longer become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
