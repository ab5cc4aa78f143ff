"""A constraint at work: which ids may come next. Runs at the rank that samples; no torch, no engine.

factory = MatcherFactory(tokenizer)          # once a process: seconds for the published vocabulary
matcher = factory.create(request.constraint)  # once a stream: milliseconds the first time, then a copy
mask = matcher.mask()                         # bit set of the allowed ids, or None = anything goes
matcher.consume(token_id)                     # every id that was sampled; `rollback` takes ids back
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from llguidance import LLMatcher
from llguidance.tiktoken import lltokenizer_from_encoding
from numpy.typing import NDArray

from chat.constraint import Constraint
from chat.tokenizer import Tokenizer

Mask = NDArray[np.int32]  # [ceil(vocab / 32)]; bit i % 32 of word i // 32 is id i

REMEMBERED_GRAMMARS = 128


class MatcherFactory:
    """Turns constraints into matchers. `vocab_size` is the width of the logits when it is not the tokenizer's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        self._size = vocab_size or tokenizer.vocab_size
        self._tokenizer = tokenizer
        self._lltokenizer = lltokenizer_from_encoding(tokenizer.encoding, n_vocab=self._size, eos_token=tokenizer.end_of_msg)
        self._leave = frozenset((tokenizer.open, tokenizer.close))
        self._thinking = self._mask_of([*range(tokenizer.base), *self._leave])
        self._end = self._mask_of([tokenizer.end_of_msg])
        self._compiled = lru_cache(REMEMBERED_GRAMMARS)(self._compile)

    def create(self, constraint: str) -> Matcher:
        """A matcher at the start of the reply. `constraint` is `Constraint.to_json()`; a grammar that fails shows in `Matcher.error`."""
        rule = Constraint.from_json(constraint)
        inner = self._compiled(rule.grammar).deep_copy()
        prefix = self._tokenizer.encode(rule.prefix)
        if prefix:
            inner.consume_tokens(prefix)
        leave = self._leave if rule.trigger == "think_left" else frozenset()
        return Matcher(inner, leave=leave, thinking=self._thinking, end=self._end, end_id=self._tokenizer.end_of_msg)

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._lltokenizer, grammar, log_level=0)

    def _mask_of(self, ids: list[int]) -> Mask:
        bits = np.zeros((self._size + 31) // 32 * 32, dtype=np.uint8)
        bits[ids] = 1
        mask = np.packbits(bits, bitorder="little").view(np.int32)
        mask.flags.writeable = False
        return mask


class Matcher:
    """One reply's position in its grammar.

    While the think channel is open any text is allowed, but neither the end of the turn nor a control token that leaves no channel.
    A limit of llguidance sets `error`, and from then on the only thing allowed is to end the turn: one bad grammar stops no other row.
    """

    def __init__(self, inner: LLMatcher, *, leave: frozenset[int], thinking: Mask, end: Mask, end_id: int) -> None:
        self._inner = inner
        self._leave = leave  # ids that leave the think channel; none = the grammar holds from the start
        self._thinking = thinking
        self._end = end
        self._end_id = end_id
        self._row = np.empty_like(end)
        self._free = 0  # ids consumed before the grammar began
        self._matched = 0  # ids consumed by the grammar
        self._after = 0  # ids consumed since the end of the turn, which is the first of them

    @property
    def error(self) -> str | None:
        """Why the grammar no longer holds; None = it holds."""
        return self._inner.get_error() or None

    def mask(self) -> Mask | None:
        """The ids that may come next; None = any, the turn is over. Valid until the next call; not to be written to."""
        if self._after:
            return None
        if self._leave and not self._matched:
            return self._thinking
        self._inner.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        return self._end if self._inner.is_error() else self._row

    def consume(self, token_id: int) -> bool:
        """Goes on by one id. False = it is not allowed here and nothing changed."""
        if self._after:
            self._after += 1
            return True
        if self._leave and not self._matched and token_id not in self._leave:
            allowed = bool(self._thinking[token_id >> 5] >> (token_id & 31) & 1)
            self._free += allowed
        elif token_id == self._end_id:
            allowed = self._inner.is_error() or self._inner.is_accepting()
            self._after += allowed
        else:
            allowed = self._inner.try_consume_tokens([token_id]) == 1
            self._matched += allowed
        return allowed

    def rollback(self, count: int) -> None:
        """Takes the last `count` consumed ids back (rejected drafts)."""
        if count > self._free + self._matched + self._after:
            raise ValueError(f"cannot take back {count} ids, only {self._free + self._matched + self._after} were consumed")
        after = min(count, self._after)
        matched = min(count - after, self._matched)
        self._after -= after
        if matched:
            self._inner.rollback(matched)
            self._matched -= matched
        self._free -= count - after - matched
