"""Typed msgpack of what crosses processes on the hot path: plans, results, token chunks. No pickle."""

from __future__ import annotations

import msgspec

from engine.plan import StepPlan, StepResult

_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_result_decoder = msgspec.msgpack.Decoder(StepResult)


def encode_plan(plan: StepPlan) -> bytes:
    return _encoder.encode(plan)


def decode_plan(payload: bytes) -> StepPlan:
    return _plan_decoder.decode(payload)


def encode_result(result: StepResult) -> bytes:
    return _encoder.encode(result)


def decode_result(payload: bytes) -> StepResult:
    return _result_decoder.decode(payload)
