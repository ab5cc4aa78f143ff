"""`k3 render` and `k3 parse` without the files: a JSON object in, a JSON object out.

To render: a chat request as a client sends it, or a case that says in `options` what the encoder is told (`thinking`,
`thinking_effort`, `tool_choice`, `response_format`, `add_generation_prompt`, `image_prompts`).

To parse: the ids of a reply and, in `request`, where it began (`generation_prefix`), whether tools were there (`tools_enabled`,
`tool_choice`) and how it ended (`engine_finish`: eos, length or stop_string).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from chat.options import read_options
from chat.parse import OutputParser
from chat.render import render
from chat.reply import collect
from chat.tokenizer import Tokenizer
from chat.types import ChatError, Conversation, ImageSize

_IMAGE = re.compile(r"<\|media_begin\|>image (\d+)x(\d+)<\|media_content\|>((?:<\|media_pad\|>)*)<\|media_end\|>")
_PUBLISHED_VOCABULARY = 163_840


def read_cases(text: str) -> list[Mapping[str, Any]]:
    """The objects of a file's text: one object, a list of them, or JSON lines. Raises `ChatError` naming the line."""
    try:
        value = json.loads(text)
        cases = value if isinstance(value, list) else [value]
    except json.JSONDecodeError:
        cases = [_line(line, number) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not cases:
        raise ChatError("no cases: expected a JSON object, a list of them, or one on each line")
    for number, case in enumerate(cases, start=1):
        if not isinstance(case, Mapping):
            raise ChatError(f"case {number}: expected a JSON object, got {type(case).__name__}")
    return cases


def read_conversation(case: Mapping[str, Any]) -> Conversation:
    """The conversation of a request or of a case with `options`."""
    asked = case.get("options", case)
    if "options" in case:
        thinking, effort = asked.get("thinking", True), asked.get("thinking_effort")
    else:
        options = read_options(case)
        thinking, effort = options.thinking, options.effort
    return Conversation(
        messages=case.get("messages") or (),
        tools=case.get("tools") or (),
        tool_choice=asked.get("tool_choice") or "auto",
        response_format=asked.get("response_format"),
        thinking=thinking,
        effort=effort,
        images=_images(case.get("messages") or (), asked.get("image_prompts") or ()),
        generation_prompt=asked.get("add_generation_prompt", True),
    )


def render_case(case: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """What the model sees. Raises `ChatError` for a conversation that cannot be rendered."""
    prompt = render(read_conversation(case), tokenizer)
    return {
        "text": "".join(segment.text for segment in prompt.segments),
        "ids": list(prompt.ids),
        "segments": [[segment.control, segment.text] for segment in prompt.segments],
        "opened": prompt.opened,
        "boundaries": list(prompt.boundaries),
    }


def parse_case(case: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """What the client gets. The ids are in `ids`, or in `ids_real` / `ids_tiny` by vocabulary."""
    request = case.get("request") or {}
    opened = request.get("generation_prefix", "think")
    if opened not in ("think", "response"):
        raise ChatError(f"unknown channel {opened!r}, expected think or response", "request.generation_prefix")
    parser = OutputParser(tokenizer, opened=opened, tools=request.get("tools_enabled", True) and request.get("tool_choice") != "none")
    reply = collect([*parser.push(_ids(case, tokenizer)), *parser.finish()])
    finish = request.get("engine_finish", "eos")
    return {
        "reasoning": reply.reasoning or None,
        "content": reply.content or None,
        "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in reply.tool_calls],
        "finish_reason": "length" if finish == "length" else "tool_calls" if parser.calls and finish == "eos" else "stop",
        "reasoning_tokens": parser.reasoning_tokens,
    }


def _line(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ChatError(f"line {number}: not JSON: {error}") from error


def _ids(case: Mapping[str, Any], tokenizer: Tokenizer) -> Sequence[int]:
    key = "ids" if "ids" in case else "ids_real" if tokenizer.vocab_size == _PUBLISHED_VOCABULARY else "ids_tiny"
    ids = case.get(key)
    if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < tokenizer.vocab_size for i in ids):
        raise ChatError(f"expected a list of token ids below {tokenizer.vocab_size}", key)
    return ids


def _images(messages: Any, prompts: Sequence[str]) -> dict[tuple[int, int], ImageSize]:
    """Sizes by place: `image_prompts` lists the images' own prompts in the order of the messages."""
    sizes = []
    for i, prompt in enumerate(prompts):
        match = _IMAGE.fullmatch(prompt)
        if match is None:
            raise ChatError("expected <|media_begin|>image WxH<|media_content|>, pads, <|media_end|>", f"options.image_prompts[{i}]")
        width, height, pads = match.groups()
        sizes.append(ImageSize(int(width), int(height), pads.count("<|media_pad|>")))
    places = (
        (i, part)
        for i, message in enumerate(messages)
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part, value in enumerate(message["content"])
        if isinstance(value, Mapping) and value.get("type") == "image_url"
    )
    return dict(zip(places, sizes, strict=False))
