"""What a session knows of a conversation, what of it a request goes on from, and what a turn leaves behind. Pure.

The server's own tokens are the truth: where a request begins with messages of the session, however it came by them, the session's tokens
stand for them, also when rendering the messages again would spell them with other tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from app.openai_chat import chat_message
from app.transcript import Transcript
from chat.messages import is_prefill, read_calls, read_parts, read_reasoning, read_text
from chat.render import render
from chat.tokenizer import Tokenizer
from chat.types import Conversation, Prompt
from engine.session import SessionRecord, TurnEnd

RAW = "raw"  # `rendering` of a session of plain prompts: it has tokens and no messages


@dataclass(frozen=True, slots=True)
class Past:
    """A session's record, read."""

    record: SessionRecord
    messages: list[dict[str, Any]]

    @classmethod
    def of(cls, record: SessionRecord) -> Past:
        return cls(record, orjson.loads(record.messages))

    @property
    def replies(self) -> list[dict[str, Any]]:
        return [m for m in self.messages if m.get("role") == "assistant"]

    def tokens(self, count: int | None = None) -> tuple[int, ...]:
        return unpack_tokens(self.record.tokens, count)

    def shared(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """How many of the session's messages these begin with."""
        count = 0
        for mine, theirs in zip(self.messages, messages, strict=False):
            if not _same(mine, theirs):
                break
            count += 1
        return count

    def resume(self, count: int, rendering: str) -> TurnEnd | None:
        """The last turn within the first `count` messages whose tokens a prompt of that rendering can begin with."""
        if rendering != self.record.rendering:
            return None
        return next((end for end in reversed(self.record.ends) if end.tokens and end.messages <= count), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """What a chat turn will leave behind but for its reply."""

    past: Past
    messages: Sequence[Mapping[str, Any]]  # the conversation; a last message that is to be continued included
    head: tuple[int, ...]  # tokens of all messages before the reply, without what vanishes from the next prompt
    opening: tuple[int, ...]  # tokens that open the reply
    ends: tuple[TurnEnd, ...]  # of earlier turns
    rendering: str
    thinking: bool  # replies have a think channel


@dataclass(frozen=True, slots=True)
class Outcome:
    """A record's content after a turn."""

    tokens: bytes
    messages: bytes
    ends: tuple[TurnEnd, ...]
    rendering: str


def rendering_of(conversation: Conversation, lead: int) -> str:
    """Digest of what shapes a prompt's lasting part beside the session's messages: tools, thinking, effort, `lead` messages in front."""
    shape = [conversation.tools, conversation.thinking, conversation.effort, conversation.messages[:lead]]
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:32]


def continued(prompt: Prompt, message: int, own: tuple[int, ...]) -> Prompt:
    """The prompt with `own` in place of everything before `messages[message]`. Of `starts` those before it lose their meaning."""
    begin = min(prompt.starts[message:])  # results of tools may be rendered in another order than they came
    shift = len(own) - begin
    return replace(
        prompt,
        ids=own + prompt.ids[begin:],
        starts=tuple(start + shift for start in prompt.starts),
        boundaries=tuple(at + shift for at in prompt.boundaries),
        images=tuple(replace(image, start=image.start + shift) for image in prompt.images),
    )


def split(prompt: Prompt, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(tokens of the messages, tokens that open the reply): the prompt without what vanishes from the next one."""
    ids = prompt.ids
    opening = next((i + 1 for i in range(len(ids) - 1, -1, -1) if ids[i] == tokenizer.end_of_msg), 0)
    return ids[: prompt.starts[-1]], ids[opening:]


def outcome(turned: Turned, transcript: Transcript, response: str, tokenizer: Tokenizer, *, thought: bool) -> Outcome:
    """After a reply. One that ended itself stands as it was sampled; one that was cut off is closed as the next prompt would show it.

    `thought`: the reply began in the think channel.
    """
    messages = list(turned.messages)
    reply = chat_message(transcript, thinking=thought)
    if is_prefill(Conversation(messages=messages)):
        reply = _joined(messages.pop(), reply, thinking=turned.thinking)
    messages.append(reply)
    sampled = tuple(transcript.token_ids)
    if sampled and sampled[-1] == tokenizer.end_of_msg:
        tokens = turned.head + turned.opening + sampled
    else:
        alone = Conversation(messages=[reply], thinking=turned.thinking, effort=None, generation_prompt=False)
        tokens = turned.head + render(alone, tokenizer).ids
    end = TurnEnd(tokens=len(tokens), messages=len(messages), response=response)
    return Outcome(pack_tokens(tokens), orjson.dumps(messages), (*turned.ends, end), turned.rendering)


def raw_outcome(tokens: Sequence[int], past: Past, kept: int, response: str) -> Outcome:
    """After a plain completion: tokens only. `kept`: how many of the session's tokens the prompt began with."""
    ends = tuple(end for end in past.record.ends if end.tokens <= kept)
    return Outcome(pack_tokens(tokens), b"[]", (*ends, TurnEnd(tokens=len(tokens), messages=0, response=response)), RAW)


def kept_ends(past: Past, shared: int, resumed: TurnEnd | None) -> tuple[TurnEnd, ...]:
    """The earlier turns that are still part of the conversation; without tokens when the prompt had to be rendered anew."""
    ends = tuple(end for end in past.record.ends if end.messages <= shared)
    return ends if resumed is not None else tuple(replace(end, tokens=0) for end in ends)


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def pack_tokens(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, "<u4").tobytes()


def unpack_tokens(raw: bytes, count: int | None = None) -> tuple[int, ...]:
    return tuple(np.frombuffer(raw, "<u4")[:count].tolist())


def _same(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Would they be rendered alike? A reply is compared by what it says, since clients leave out and respell the rest."""
    if mine.get("role") != theirs.get("role") or theirs.get("partial"):
        return False
    if mine.get("role") == "assistant":
        return _spoken(mine) == _spoken(theirs)
    extras = [{key: value for key, value in m.items() if key != "content" and value is not None} for m in (mine, theirs)]
    return extras[0] == extras[1] and list(read_parts(mine, "")) == list(read_parts(theirs, ""))


def _spoken(message: Mapping[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, json.dumps(call.arguments)) for call in read_calls(message, "")]
    return read_reasoning(message, ""), read_text(message, ""), calls


def _joined(begun: Mapping[str, Any], reply: dict[str, Any], *, thinking: bool) -> dict[str, Any]:
    """A message that was begun by the client and ended by the model."""
    joined = {**reply, "content": read_text(begun, "") + (reply["content"] or "")}
    if thinking:
        joined["reasoning_content"] = read_reasoning(begun, "") + reply.get("reasoning_content", "")
    return joined
