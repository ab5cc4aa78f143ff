"""Where a prefill leaves checkpoints.

A checkpoint costs a slot and, inside a chunk, one more piece of the KDA scan; it pays when somebody resumes there. Kept are

* the prompt's end, one token early: a state that has consumed the last token cannot give its logits (n choices, regenerate, next turn);
* the prompt's end itself when it fills a page: the next turn resumes there and copies no page;
* the boundaries that the renderer asks for: segments after them vanish from the next turn's prompt;
* the end of a prefix that all tenants share;
* the junction: a block boundary shared with a different prompt, at its second sighting (Marconi, MLSys 2025);
* one an interval, so that a long prefill can be taken up again: evicted first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.lineage import Lineage
from engine.types import GenerateRequest


@dataclass(slots=True)
class Mark:
    """A checkpoint to be taken. `key` is its lineage where that is known before the step."""

    position: int
    interval: bool
    key: bytes | None = None


def marks(
    lineage: Lineage, request: GenerateRequest, *, start: int, stop: int, interval: int, junction: int, has: Callable[[bytes], bool]
) -> list[Mark]:
    """The marks in (start, stop] that the cache does not have, and the first interval after them; the next one to pass is last."""
    prompt_len = len(request.prompt)
    wanted = {prompt_len - 1, junction, lineage.shared, *(b for b in request.boundaries if b <= prompt_len)}
    if prompt_len % lineage.block_size == 0:
        wanted.add(prompt_len)
    found = [Mark((stop // interval + 1) * interval, True)]
    spaced = set(range((start // interval + 1) * interval, stop + 1, interval))
    for position in sorted(wanted | spaced, reverse=True):
        if start < position <= stop and not has(key := lineage.at(position)):
            found.append(Mark(position, position not in wanted, key))
    return found


def next_interval(position: int, interval: int) -> Mark:
    """The interval mark behind one that was passed."""
    return Mark(position + interval, True)
