"""Tenants share by tokens served: whoever got least goes first.

Virtual counters (VTC, "Fairness in Serving Large Language Models", OSDI 2024): a tenant that comes back from idleness starts
level with the least served of those at work. So idleness earns no credit to flood the others with, and is not punished either.
"""

from __future__ import annotations


class ServedTokens:
    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._open: dict[str, int] = {}  # requests of a tenant at work

    def __getitem__(self, tenant: str) -> int:
        return self._served[tenant]

    def enter(self, tenant: str) -> None:
        """A request of the tenant was accepted."""
        if tenant not in self._open:
            level = min((self._served[t] for t in self._open), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), level)
        self._open[tenant] = self._open.get(tenant, 0) + 1

    def charge(self, tenant: str, tokens: int) -> None:
        self._served[tenant] += tokens

    def leave(self, tenant: str) -> None:
        """A request of the tenant ended. Forgets tenants that owe nothing, so that the table stays as small as the recent past."""
        self._open[tenant] -= 1
        if self._open[tenant]:
            return
        del self._open[tenant]
        level = min((self._served[t] for t in self._open), default=None)
        for idle in [t for t in self._served if t not in self._open]:
            if level is None or self._served[idle] <= level:
                del self._served[idle]
