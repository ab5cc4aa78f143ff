"""The chat format's own types. No I/O, no torch, nothing of the engine.

Messages stay plain OpenAI-shaped mappings (`{"role": …, "content": …}`): the format renders unknown keys of tools as they are, so a
typed model must not add or drop fields. `render` validates what it reads and raises `ChatError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Channel = Literal["think", "response"]


class ChatError(ValueError):
    """The client's fault. `param` is the path of the offending field, e.g. `messages[3].tool_calls[0].function.arguments`."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class ImageSize:
    """What a prompt says about an image: its size before resizing, and the pads that its features take (`image_grid(…).pads`)."""

    width: int
    height: int
    pads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Everything that determines a prompt. `messages` stay as the client sent them; nothing here is changed in place."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"  # auto | none | required | {"type": "function", "function": {"name": …}}
    response_format: Mapping[str, Any] | None = None
    thinking: bool = True
    effort: str | None = "max"  # low | high | max; None = no effort message (a server always says one)
    images: Mapping[tuple[int, int], ImageSize] = field(default_factory=dict)  # (message, part) of each `image_url` part → its size
    generation_prompt: bool = True  # open the assistant's turn at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of a prompt, encoded by itself. Only `control` segments may become special tokens."""

    text: str
    control: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSlot:
    """Where the image pads of one image start in the prompt's ids, and how many there are."""

    message: int
    part: int
    start: int
    pads: int
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    opened: Channel  # the channel that the prompt leaves open: where parsing starts
    starts: tuple[int, ...] = ()  # starts[i] = where messages[i] begins; one more entry: where all that follows the messages begins
    boundaries: tuple[int, ...] = ()  # positions after which segments vanish from the next turn's prompt
    images: tuple[ImageSlot, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int  # 0, 1, … in order of appearance
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the call's arguments. All pieces of one call joined are one strict JSON object."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    index: int


ChatDelta = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd
