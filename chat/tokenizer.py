"""Token ids ↔ text: K3's tiktoken-format vocabulary, with ordinary and control encoding kept apart.

Files read from a directory: `tiktoken.model` (one `base64 rank` line a token), `tokenizer_config.json` (names of the 256 special
slots that follow the ranks) and `generation_config.json` (`eos_token_id`). The base of the special slots is the number of ranks, so the
published vocabulary (163,584 + 256) and the tiny one shipped here (768 + 256) load the same way.
"""

from __future__ import annotations

import base64
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tiktoken

TINY_TOKENIZER_DIR = Path(__file__).parent / "tiny_tokenizer"
SPECIAL_SLOTS = 256
MAX_ENCODE_CHARS = 400_000
MAX_RUN_CHARS = 25_000

# Han runs · (lower- and upper-ish letter runs without Han, which split CamelCase) · 1–3 digits · punctuation · white space.
_LETTER_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LETTER_PREFIX}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LETTER_PREFIX}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_ROLES = {
    "eos": "[EOS]",
    "end_of_msg": "<|end_of_msg|>",
    "open": "<|open|>",
    "close": "<|close|>",
    "sep": "<|sep|>",
    "media_begin": "<|media_begin|>",
    "media_content": "<|media_content|>",
    "media_end": "<|media_end|>",
    "media_pad": "<|media_pad|>",
}
_RUN = re.compile(r"\s+|\S+")


class Tokenizer:
    """Vocabulary and the ids of the special tokens by role.

    `encode` never gives a special id, whatever the text spells; only `encode_control` does, and only the renderer calls it.
    """

    def __init__(self, ranks: Sequence[bytes], named_specials: dict[str, int], stop_ids: Sequence[int]) -> None:
        self.base = len(ranks)
        self.vocab_size = self.base + SPECIAL_SLOTS
        names = {token_id: name for name, token_id in named_specials.items()}
        self.special_ids: dict[str, int] = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(self.base, self.vocab_size)}
        missing = [name for name in _ROLES.values() if name not in self.special_ids]
        if missing:
            raise ValueError(f"tokenizer_config.json: added_tokens_decoder lacks {', '.join(missing)}")
        self.eos, self.end_of_msg, self.open, self.close, self.sep, *media = (self.special_ids[name] for name in _ROLES.values())
        self.media_begin, self.media_content, self.media_end, self.media_pad = media
        self.stop_ids = tuple(dict.fromkeys((*stop_ids, self.end_of_msg, self.eos)))
        self._bytes = [*ranks, *(name.encode() for name in self.special_ids)]
        self.encoding = tiktoken.Encoding(
            name=f"k3-{self.vocab_size}",
            pat_str=PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
            special_tokens=self.special_ids,
        )

    @classmethod
    def from_dir(cls, directory: str | Path) -> Tokenizer:
        """Raises FileNotFoundError for a missing file, ValueError (with the file's name) for a malformed one."""
        directory = Path(directory)
        ranks = _read_ranks(directory / "tiktoken.model")
        config = _read_json(directory / "tokenizer_config.json")
        generation = _read_json(directory / "generation_config.json")
        named: dict[str, int] = {}
        for token_id, entry in config.get("added_tokens_decoder", {}).items():
            if not len(ranks) <= int(token_id) < len(ranks) + SPECIAL_SLOTS:
                raise ValueError(
                    f"{directory / 'tokenizer_config.json'}: special token id {token_id} is outside the {SPECIAL_SLOTS} slots "
                    f"after the {len(ranks)} ranks of tiktoken.model"
                )
            named[entry["content"]] = int(token_id)
        eos = generation.get("eos_token_id", ())
        return cls(ranks, named, (eos,) if isinstance(eos, int) else tuple(eos))

    @classmethod
    def tiny(cls) -> Tokenizer:
        """The synthetic vocabulary of 1,024 ids that ships with the package, for tests and the laptop model."""
        return cls.from_dir(TINY_TOKENIZER_DIR)

    def encode(self, text: str) -> list[int]:
        """Ordinary ids of `text`: control spellings stay text."""
        if len(text) <= MAX_RUN_CHARS:
            return self.encoding.encode_ordinary(text)
        return [i for piece in cut(text) for i in self.encoding.encode_ordinary(piece)]

    def encode_control(self, text: str) -> list[int]:
        """Ids of the format's own text, in which special spellings are special tokens. Never call it on a client's text."""
        known = self.special_ids.get(text)
        return [known] if known is not None else self.encoding.encode(text, allowed_special="all")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an ordinary token, or the spelling of a special one."""
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id >= self.base

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens spelled out; bytes that are not UTF-8 become U+FFFD."""
        return b"".join([self._bytes[i] for i in ids]).decode("utf-8", "replace")


class IncrementalDecoder:
    """Text of a growing sequence of ids. A character that spans tokens is held until its last byte; invalid bytes become U+FFFD."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join([self._tokenizer.token_bytes(i) for i in ids]))

    def finish(self) -> None:
        """Forgets an unfinished character (never shown, not even as U+FFFD); the decoder is fresh afterwards."""
        self._utf8.reset()


def cut(text: str, max_chars: int = MAX_ENCODE_CHARS, max_run: int = MAX_RUN_CHARS) -> Iterator[str]:
    """The pieces that are encoded apart: at most `max_chars` each, and no more than `max_run` (non-)space characters in a row.

    Cutting changes ids, so it is part of the format. `\\s` is `str.isspace`, as in the reference tokenizer.
    """
    for begin in range(0, len(text), max_chars):
        chunk = text[begin : begin + max_chars]
        start = 0
        for run in _RUN.finditer(chunk):
            for position in range(run.start() + max_run, run.end(), max_run):
                yield chunk[start:position]
                start = position
        yield chunk[start:]


def _read_ranks(path: Path) -> list[bytes]:
    ranks: list[bytes] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks.append(base64.b64decode(token, validate=True))
            in_order = int(rank) == number - 1
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected `<base64> <rank>`") from error
        if not in_order:
            raise ValueError(f"{path}, line {number}: expected rank {number - 1}")
    return ranks


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value
