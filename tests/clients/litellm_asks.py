"""Runs under litellm's own Python: asks the server at argv[1] by three of its providers and prints what it understood as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def understood(response: Any) -> dict[str, Any]:
    choice = response.choices[0]
    return {
        "reasoning": choice.message.reasoning_content,
        "content": choice.message.content,
        "calls": [[call.function.name, json.loads(call.function.arguments)] for call in choice.message.tool_calls or ()],
        "finish": choice.finish_reason,
        "tokens": [response.usage.prompt_tokens, response.usage.completion_tokens],
    }


def main(url: str) -> None:
    found = {}
    for provider, base in (("openai", f"{url}/v1"), ("moonshot", f"{url}/v1"), ("anthropic", url)):
        messages = [{"role": "user", "content": "Weather in Rome?"}]
        ask = {"model": f"{provider}/kimi-k3", "api_base": base, "api_key": "none", "messages": messages, "tools": [TOOL]}
        ask["max_tokens"] = 200
        found[f"{provider} whole"] = understood(litellm.completion(**ask))
        chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
        found[f"{provider} stream"] = understood(litellm.stream_chunk_builder(chunks, messages=messages))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
