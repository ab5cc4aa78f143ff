"""Random replies under a constraint: what a model with random weights would say."""

from __future__ import annotations

import random

import numpy as np

from chat.matcher import Mask, Matcher, MatcherFactory
from chat.tokenizer import Tokenizer

TINY = Tokenizer.tiny()
FACTORY = MatcherFactory(TINY)
# Tokens that end something. A random model would write strings and lists for very long.
ENDINGS = [TINY.close, *(i for i in range(TINY.base) if TINY.token_bytes(i) in (b'"', b"}", b"]", b'"}', b'"]', b'}"'))]


def ids_of(mask: Mask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def random_reply(matcher: Matcher, seed: int, *, thinking: int = 8, limit: int = 5000) -> list[int]:
    """Ids drawn from the masks until the turn is over; after `thinking` ids every other draw prefers to end something."""
    rng = random.Random(seed)
    reply: list[int] = []
    while (mask := matcher.mask()) is not None:
        assert matcher.error is None
        allowed = ids_of(mask)
        assert allowed, f"nothing may follow {TINY.decode(reply)!r}"
        endings = [i for i in ENDINGS if i in allowed] if len(reply) > thinking and rng.random() < 0.5 else []
        token_id = rng.choice(endings or allowed)
        assert matcher.consume(token_id)
        reply.append(token_id)
        assert len(reply) < limit, f"no end of {TINY.decode(reply)!r}"
    return reply
