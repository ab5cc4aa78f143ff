"""Token ids of a reply → deltas. A pure state machine over ids: only special ids are structure, whatever the text spells.

Canonical reply (`‹x›` an opening tag, `‹/x›` a closing one):

    reasoning ‹/think› ‹response› content ‹/response› [‹tools› ‹call› ‹argument› value ‹/argument› … ‹/call› … ‹/tools›] ‹/message› ⏹

It starts inside the channel that the prompt left open. What models really emit deviates, so every tag that can only mean one thing is
taken as meaning it: a channel that opens closes the one before, a missing separator before the next marker is supplied, and whatever
stands between or after channels is ignored. Nothing is trimmed, and any grouping of the ids gives the same deltas joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto

from chat.arguments import ArgumentsWriter
from chat.attributes import read_attributes
from chat.tokenizer import IncrementalDecoder, Tokenizer
from chat.types import (
    Channel,
    ChatDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


class _At(Enum):
    THINK = auto()
    RESPONSE = auto()
    TOOLS = auto()  # inside the tools channel or a call, outside of a value
    VALUE = auto()  # inside ‹argument› or ‹json›
    BETWEEN = auto()  # text is ignored
    END = auto()  # everything is ignored


class OutputParser:
    """One reply. `opened` is the channel that the prompt left open; without `tools` calls are swallowed, never shown.

    `reasoning_tokens` counts the ids of the think channel's text so far (tags not counted); `calls` the complete tool calls.
    """

    def __init__(self, tokenizer: Tokenizer, *, opened: Channel, tools: bool = True) -> None:
        self.reasoning_tokens = 0
        self.calls = 0
        self._tokenizer = tokenizer
        self._tools = tools
        self._at = _At.THINK if opened == "think" else _At.RESPONSE
        self._decoder = IncrementalDecoder(tokenizer)
        self._marker: int | None = None  # the open or close token whose tag is being read
        self._tag: list[int] = []  # ids of that tag so far
        self._answered = False  # content or a call was seen: thinking is over
        self._started = 0  # calls with a name so far
        self._arguments: ArgumentsWriter | None = None  # of the open call; None = no call, or one without a name
        self._deltas: list[ChatDelta] = []

    def push(self, ids: Iterable[int]) -> list[ChatDelta]:
        """The deltas of the next ids, adjacent pieces of one kind joined. Never raises, whatever the model wrote."""
        body: list[int] = []
        for i in ids:
            if i < self._tokenizer.base:
                (body if self._marker is None else self._tag).append(i)
                continue
            self._body(body)
            body = []
            self._special(i)
        self._body(body)
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[ChatDelta]:
        """No more ids come. An unfinished tag, character or call is dropped, so nothing is left to say; pushes are ignored from now on."""
        self._end()
        return []

    # -- ids ---------------------------------------------------------------------------------------------------------

    def _special(self, token_id: int) -> None:
        vocabulary = self._tokenizer
        if token_id in vocabulary.stop_ids:
            self._end()
        elif token_id in (vocabulary.open, vocabulary.close):
            self._apply_tag()  # its separator was left out
            self._marker = token_id
        elif token_id == vocabulary.sep:
            self._apply_tag()

    def _body(self, ids: Sequence[int]) -> None:
        if not ids or self._at in (_At.TOOLS, _At.BETWEEN, _At.END):
            return
        text = self._decoder.push(ids)
        if self._at is _At.THINK:
            self.reasoning_tokens += len(ids)
            self._emit_text(ReasoningDelta, text)
        elif self._at is _At.RESPONSE:
            self._answered = True
            self._emit_text(ContentDelta, text)
        elif self._arguments is not None:
            self._emit_arguments(self._arguments.text(text))

    # -- tags --------------------------------------------------------------------------------------------------------

    def _apply_tag(self) -> None:
        marker, ids = self._marker, self._tag
        self._marker, self._tag = None, []
        if marker is None or self._at is _At.END:
            return
        text = self._tokenizer.decode(ids)
        tag = text.split(maxsplit=1)[0] if text.strip() else ""
        if marker == self._tokenizer.open:
            self._open(tag, read_attributes(text))
        else:
            self._close(tag)

    def _open(self, tag: str, attributes: dict[str, str]) -> None:
        in_tools = self._at in (_At.TOOLS, _At.VALUE)
        match tag:
            case "think" if not in_tools and self._at is not _At.THINK:
                self._enter(_At.BETWEEN if self._answered else _At.THINK)
            case "response" if not in_tools:
                self._enter(_At.RESPONSE)
            case "tools" if not in_tools:
                self._enter(_At.TOOLS if self._tools else _At.END)
            case "call" if in_tools:
                self._close_call()
                self._open_call(attributes.get("tool", ""))
            case "call" | "argument" | "json" if not in_tools:
                self._enter(_At.BETWEEN)
            case "argument" | "json" if self._arguments is not None:
                self._close_value()
                self._enter(_At.VALUE)
                self._emit_arguments(
                    self._arguments.whole()
                    if tag == "json"
                    else self._arguments.open(attributes.get("key"), attributes.get("type", "string"))
                )
            case "message":
                self._end()

    def _close(self, tag: str) -> None:
        match tag, self._at:
            case "think", _At.THINK:
                self._enter(_At.BETWEEN)
            case "response", _At.THINK | _At.RESPONSE:
                self._enter(_At.BETWEEN)
            case "argument" | "json", _At.VALUE:
                self._close_value()
            case "call", _At.TOOLS | _At.VALUE:
                self._close_call()
            case "tools", _At.TOOLS | _At.VALUE:
                self._close_call()
                self._end()
            case "message", _:
                self._end()

    def _enter(self, at: _At) -> None:
        self._decoder.finish()
        self._at = at

    def _end(self) -> None:
        self._marker, self._tag, self._arguments = None, [], None
        self._enter(_At.END)

    # -- calls -------------------------------------------------------------------------------------------------------

    def _open_call(self, name: str) -> None:
        self._answered = True
        if name:
            self._arguments = ArgumentsWriter()
            self._deltas.append(ToolCallStart(self._started, name))
            self._started += 1

    def _close_value(self) -> None:
        if self._at is _At.VALUE and self._arguments is not None:
            self._emit_arguments(self._arguments.close())
            self._enter(_At.TOOLS)

    def _close_call(self) -> None:
        self._close_value()
        if self._arguments is not None:
            self._emit_arguments(self._arguments.end())
            self._deltas.append(ToolCallEnd(self._started - 1))
            self._arguments = None
            self.calls += 1

    # -- deltas ------------------------------------------------------------------------------------------------------

    def _emit_text(self, kind: type[ReasoningDelta] | type[ContentDelta], text: str) -> None:
        if not text:
            return
        if self._deltas and isinstance(self._deltas[-1], kind):
            text = self._deltas.pop().text + text  # type: ignore[union-attr]
        self._deltas.append(kind(text))

    def _emit_arguments(self, fragment: str) -> None:
        if not fragment:
            return
        if self._deltas and isinstance(last := self._deltas[-1], ToolCallArguments):
            fragment = last.fragment + fragment
            self._deltas.pop()
        self._deltas.append(ToolCallArguments(self._started - 1, fragment))
