"""The writer of a prompt: segments and their ids grow together, each segment encoded by itself.

Joining the text and encoding it once would give other ids and would let a client's text become control tokens.
"""

from __future__ import annotations

from chat.attributes import escape
from chat.tokenizer import Tokenizer
from chat.types import ImageSize, Segment


class SegmentWriter:
    """Appends tags, text and images. Only this class marks segments as control."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: dict[str, list[int]] = {}  # ids of tag words and attribute names, which repeat in every message
        self.ids: list[int] = []
        self.segments: list[Segment] = []

    def text(self, text: str) -> None:
        """A body, byte for byte. An empty one gives no segment."""
        if text:
            self.segments.append(Segment(text=text))
            self.ids += self._tokenizer.encode(text)

    def open(self, tag: str, **attributes: str) -> None:
        self._control("<|open|>", self._tokenizer.open)
        self._word(tag)
        for key, value in attributes.items():
            self._word(f" {key}")
            self._word('="')
            self.text(escape(value))
            self._word('"')
        self._control("<|sep|>", self._tokenizer.sep)

    def close(self, tag: str) -> None:
        self._control("<|close|>", self._tokenizer.close)
        self._word(tag)
        self._control("<|sep|>", self._tokenizer.sep)

    def end_message(self) -> None:
        self.close("message")
        self._control("<|end_of_msg|>", self._tokenizer.end_of_msg)

    def image(self, image: ImageSize) -> int:
        """Writes the image's prompt; the position of its first pad."""
        head = f"<|media_begin|>image {image.width}x{image.height}<|media_content|>"
        self.segments.append(Segment(text=f"{head}{'<|media_pad|>' * image.pads}<|media_end|>", control=True))
        self.ids += self._tokenizer.encode_control(head)
        start = len(self.ids)
        self.ids += [self._tokenizer.media_pad] * image.pads
        self.ids.append(self._tokenizer.media_end)
        return start

    def _control(self, text: str, token_id: int) -> None:
        self.segments.append(Segment(text=text, control=True))
        self.ids.append(token_id)

    def _word(self, text: str) -> None:
        if text not in self._words:
            self._words[text] = self._tokenizer.encode(text)
        self.segments.append(Segment(text=text))
        self.ids += self._words[text]
