"""What a group refuses before any work, how many tokens it may generate, and what an admission counts for."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import ContextExceeded, InvalidRequest
from engine.generation import Generation
from engine.prefix import Match, Miss
from engine.stats import Counters
from engine.types import Admission, GenerateRequest


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


def account(g: Generation, match: Match, counters: Counters, *, enabled: bool) -> None:
    """Counts an admitted request as a hit or a miss, once: coming back after a preemption or a move is neither."""
    assert g.lease is not None
    start = g.lease.start
    if g.admitted is not None:
        counters.tokens_resumed += start
        counters.tokens_recomputed += g.known - start
        return
    if start:
        g.admitted = Admission(cached_tokens=min(start, g.prompt_len), resume_source=g.lease.source)
        counters.tokens_cached += g.admitted.cached_tokens
        counters.hits += 1
        return
    if not enabled or g.prompt_logprobs is not None:
        why = Miss.DISABLED
    elif match.checkpoint is not None or match.evicted:
        why = Miss.EVICTED
    else:
        why = Miss.NO_STATE if g.seen_before else Miss.NEVER_SEEN
    reason = g.miss_reason or why.value
    g.admitted = Admission(cached_tokens=0, miss_reason=reason)
    counters.misses[reason] += 1
