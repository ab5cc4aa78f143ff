"""What a group refuses before any work, and how many tokens it may generate."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import ContextExceeded, InvalidRequest
from engine.types import GenerateRequest


def budget(request: GenerateRequest, config: EngineConfig) -> int:
    """Generated tokens at most: `max_tokens`, clipped to what the context and the page pool leave after the prompt.

    Raises ContextExceeded when they leave nothing, InvalidRequest when there is nothing to continue.
    """
    prompt = len(request.prompt)
    if prompt == 0:
        raise InvalidRequest("the prompt is empty: at least one token is needed", param="prompt")
    if request.max_tokens < 0:
        raise InvalidRequest(f"max_tokens is {request.max_tokens}: 0 or more is needed", param="max_tokens")
    pool = config.num_pages * config.page_size
    if prompt >= config.max_model_len:
        raise ContextExceeded(
            f"the prompt has {prompt} tokens; the context of {config.max_model_len} tokens must hold it and at least one generated token"
        )
    if prompt >= pool:
        raise ContextExceeded(
            f"the prompt has {prompt} tokens; the cache of this engine holds {pool} tokens ({config.num_pages} pages of {config.page_size})"
        )
    return min(request.max_tokens, min(config.max_model_len, pool) - prompt)
