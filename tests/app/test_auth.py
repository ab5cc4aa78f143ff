from __future__ import annotations

from pathlib import Path

import pytest

from app.auth import ApiKeys
from app.errors import Unauthorized
from engine.errors import ConfigError


def test_keys_come_from_files_by_reference(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# team a\nkey-a\n\n  key-b  \n")
    keys = ApiKeys.from_config([f"file:{path}", "key-c"])
    tenants = {keys.tenant({"authorization": f"Bearer {key}"}) for key in ("key-a", "key-b", "key-c")}
    assert len(tenants) == 3
    with pytest.raises(Unauthorized, match="unknown"):
        keys.tenant({"authorization": "Bearer # team a"})


@pytest.mark.parametrize("content", [None, "", "# nothing\n"])
def test_a_file_that_gives_no_key_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="api_keys"):
        ApiKeys.from_config([f"file:{path}"])


def test_without_keys_everybody_is_one_tenant() -> None:
    assert ApiKeys(()).tenant({"authorization": "Bearer anything"}) == ""


def test_a_tenant_is_the_same_in_every_process() -> None:
    assert ApiKeys(["k"]).tenant({"x-api-key": "k"}) == ApiKeys(["k", "other"]).tenant({"authorization": "bearer k"})
    assert ApiKeys(["k"]).tenant({"x-api-key": "k"}) == "8254c329a92850f6"
