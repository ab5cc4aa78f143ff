"""Updates → /v1/completions: the frames of a stream, or the one body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.adapter import CompletionJob
from app.choice import Finish, Update
from app.logprobs import CompletionLogprobs
from app.openai import CompletionRequest, StreamOptions
from app.openai_chat import Head, final_usage
from app.transcript import Transcript
from app.usage import Bill, Meter, openai_usage
from chat.tokenizer import Tokenizer
from chat.types import ContentDelta
from engine.types import TokenLogprob


class CompletionWriter:
    """Frames and body of one request. With `echo` a choice begins with its prompt's text, ids and log-probabilities."""

    ping_every_s: float | None = None

    def __init__(
        self, head: Head, request: CompletionRequest, job: CompletionJob, tokenizer: Tokenizer | None, meter: Meter, bill: Bill
    ) -> None:
        self._head = {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model}
        self._request = request
        self._options = request.stream_options or StreamOptions()
        self._job = job
        self._tokenizer = tokenizer
        self._meter = meter
        self._bill = bill
        spelled = None if request.return_tokens_as_token_ids else tokenizer
        self._logprobs = [CompletionLogprobs(spelled) for _ in job.requests]
        self._begun: set[int] = set()

    def begin(self) -> list[dict[str, Any]]:
        return []

    def ping(self) -> list[dict[str, Any]]:
        return []

    def frames(self, update: Update) -> list[dict[str, Any]]:
        self._meter.count(update)
        frames = []
        first = update.choice not in self._begun
        if first and self._request.echo:
            if self._request.logprobs is not None and update.prompt_logprobs is None and not update.completion_tokens:
                return []  # admitted, but the prompt's log-probabilities are still to come
            frames.append(self._frame(update.choice, self._echo(update.choice), [], self._echo_logprobs(update.choice, update)))
        for piece in update.pieces:
            assert isinstance(piece.delta, ContentDelta), "plain text has one kind of piece"
            if piece.delta.text or self._request.return_token_ids or piece.logprobs:
                frames.append(self._frame(update.choice, piece.delta.text, piece.token_ids, piece.logprobs))
        if update.finish is not None:
            frames.append(self._frame(update.choice, "", (), (), update.finish))
        if first and frames:
            self._begun.add(update.choice)
            if self._request.return_token_ids:
                frames[0]["choices"][0]["prompt_token_ids"] = self._prompt(update.choice)
        return frames

    def end(self) -> list[dict[str, Any]]:
        if not self._options.include_usage:
            return []
        return [{**self._head, "choices": [], "usage": final_usage(self._meter.total(), self._bill)}]

    def body(self, transcripts: Sequence[Transcript]) -> dict[str, Any]:
        choices = []
        for index, transcript in enumerate(transcripts):
            assert transcript.finish is not None, "read to its end"
            text = transcript.reply.content
            logprobs: list[TokenLogprob | int] = list(transcript.logprobs)
            if self._request.echo:
                text = self._echo(index) + text
                logprobs = [self._prompt(index)[0], *(transcript.prompt_logprobs or ()), *logprobs]
            choice = self._choice(index, text, logprobs, transcript.finish)
            if self._request.return_token_ids:
                choice["token_ids"] = transcript.token_ids
                choice["prompt_token_ids"] = self._prompt(index)
            choices.append(choice)
        return {**self._head, "choices": choices, "usage": final_usage(self._meter.total(), self._bill)}

    def _frame(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob | int],
        finish: Finish | None = None,
    ) -> dict[str, Any]:
        choice = self._choice(index, text, logprobs, finish)
        if self._request.return_token_ids:
            choice["token_ids"] = token_ids
        frame = {**self._head, "choices": [choice]}
        if self._options.continuous_usage_stats:
            frame["usage"] = openai_usage(self._meter.total())
        return frame

    def _choice(self, index: int, text: str, logprobs: Sequence[TokenLogprob | int], finish: Finish | None) -> dict[str, Any]:
        asked = self._request.logprobs is not None
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].lists(logprobs) if asked and logprobs else None,
            "finish_reason": finish.reason if finish else None,
            "stop_reason": finish.stop_string if finish else None,
        }

    def _prompt(self, index: int) -> tuple[int, ...]:
        return self._job.prompts[index // self._job.choices]

    def _echo(self, index: int) -> str:
        return self._tokenizer.decode(self._prompt(index)) if self._tokenizer else ""

    def _echo_logprobs(self, index: int, update: Update) -> list[TokenLogprob | int]:
        return [self._prompt(index)[0], *(update.prompt_logprobs or ())]
