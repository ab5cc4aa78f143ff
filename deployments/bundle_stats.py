"""Figures of states that left and came: one frozen snapshot, joined to the replica's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleStats:
    """Counters since the replica's start. Units in the names."""

    exports: int = 0
    exported_bytes: int = 0  # of whole bundles; segments that were in the store already count again
    export_seconds: float = 0.0
    exports_failed: Mapping[str, int] = field(default_factory=dict)  # by reason
    exports_superseded: int = 0  # a newer one of the same request came before their turn
    imports: Mapping[str, int] = field(default_factory=dict)  # by source: store, durable
    imported_bytes: int = 0
    imported_tokens: int = 0
    import_seconds: float = 0.0
    import_misses: Mapping[str, int] = field(default_factory=dict)  # by reason
    recoveries: int = 0  # times that the shard group was formed again
    recovery_seconds: float = 0.0
    recoveries_failed: int = 0
    shards_replaced: int = 0
    weights_reread_bytes: int = 0  # in recoveries
    requests_moved: Mapping[str, int] = field(default_factory=dict)  # that went on after a recovery, by what they were doing
    bundles_lost: int = 0  # known to have died with the node's holder
    exports_running: int = 0  # now
    imports_running: int = 0  # now


@dataclass(slots=True, kw_only=True)
class BundleCounters:
    """The mutable side."""

    exports: int = 0
    exported_bytes: int = 0
    export_seconds: float = 0.0
    exports_failed: Counter[str] = field(default_factory=Counter)
    exports_superseded: int = 0
    imports: Counter[str] = field(default_factory=Counter)
    imported_bytes: int = 0
    imported_tokens: int = 0
    import_seconds: float = 0.0
    import_misses: Counter[str] = field(default_factory=Counter)
    recoveries: int = 0
    recovery_seconds: float = 0.0
    recoveries_failed: int = 0
    shards_replaced: int = 0
    weights_reread_bytes: int = 0
    requests_moved: Counter[str] = field(default_factory=Counter)
    bundles_lost: int = 0
    exports_running: int = 0
    imports_running: int = 0

    def snapshot(self) -> BundleStats:
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        counts: dict[str, Any] = {name: dict(value) for name, value in values.items() if isinstance(value, Counter)}
        return BundleStats(**values | counts)
