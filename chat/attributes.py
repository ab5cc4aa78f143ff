"""Attributes of a tag: ` key="value"`, with `&` and `"` of the value escaped and nothing else."""

from __future__ import annotations

import re

_ATTRIBUTE = re.compile(r'\s([^\s="]+)="([^"]*)"')


def escape(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def read_attributes(tag: str) -> dict[str, str]:
    """The attributes of a tag's text, in any order; what does not look like one is left out."""
    return {key: unescape(value) for key, value in _ATTRIBUTE.findall(tag)}
