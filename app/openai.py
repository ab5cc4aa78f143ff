"""Wire models of the OpenAI dialect: what a client may send to /v1/chat/completions, /v1/completions, /tokenize and /detokenize.

Types are strict (a number in quotes is a mistake worth an answer), unknown fields are ignored, null means "not given". Messages and
tools stay plain mappings: the chat format renders unknown keys as they are, and `chat` validates what it reads.
Sampling extras (top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos, return_token_ids, priority) are vLLM's names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

MAX_CHOICES = 128  # streams of one request
MAX_TOP_LOGPROBS = 20
INT64 = 2**63


def _strings(value: Any) -> Any:
    """Unions are checked by hand: pydantic would answer with one complaint a branch."""
    if value is None or isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    raise ValueError("expected a string or a list of strings")


def _prompt(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value) or _token_ids(value):
            return value
        if all(isinstance(item, list) and _token_ids(item) for item in value):
            return value
    raise ValueError("expected a non-empty string, list of strings, list of token ids, or list of lists of token ids")


def _token_ids(value: list[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in value)


def _name_or_mapping(value: Any) -> Any:
    if value is None or isinstance(value, str | dict):
        return value
    raise ValueError("expected a string or an object")


Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
SessionMode = Literal["full", "append"]  # what a session's request carries: the whole conversation, or only what is new
TokenId = Annotated[int, Field(ge=0)]
Stop = Annotated[Any, AfterValidator(_strings)]
PromptInput = Annotated[Any, AfterValidator(_prompt)]
ToolChoice = Annotated[Any, AfterValidator(_name_or_mapping)]


class Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=(), hide_input_in_errors=True)


class StreamOptions(Wire):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_internal_content: bool = False


class Sampled(Wire):
    """What every generating request of this dialect shares."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-INT64, lt=2 * INT64)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=INT64)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=10, allow_inf_nan=False)
    logit_bias: dict[str, Bias] | None = None
    max_tokens: int | None = Field(None, ge=1, lt=INT64)
    stop: Stop = None  # str | list[str]
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-INT64, lt=INT64)
    user: str | None = None
    session_id: str | None = None
    session_mode: SessionMode | None = None

    @field_validator("logit_bias")
    @classmethod
    def _token_ids_as_keys(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key in bias or ():
            if not (key.isascii() and key.isdecimal()):
                raise ValueError(f"keys are token ids as strings, {key[:40]!r} is none")
        return bias

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Rendered(Wire):
    """Fields that shape the prompt. Their inside is read by `chat`."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = None  # str | mapping
    response_format: dict[str, Any] | None = None
    thinking: Any = None
    reasoning_effort: Any = None
    chat_template_kwargs: Any = None


class ChatRequest(Rendered, Sampled):
    """/v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @field_validator("top_logprobs")
    @classmethod
    def _only_with_logprobs(cls, top: int | None, info: Any) -> int | None:
        if top and "logprobs" in info.data and not info.data["logprobs"]:
            raise ValueError("needs logprobs to be true")
        return top

    @property
    def budget(self) -> int | None:
        """`max_completion_tokens` is the newer name and wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(Sampled):
    """/v1/completions. `prompt` is a text, token ids, or a list of either."""

    prompt: PromptInput  # str | list[int] | list[str] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    skip_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if single else self.prompt


class TokenizeRequest(Rendered):
    """/tokenize, vLLM's shape: either `prompt`, or `messages` as a chat request has them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: list[TokenId]
