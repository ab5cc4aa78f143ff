"""Who may import whom, and how long a file may be (docs/structure.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("app", "chat", "engine", "model", "kernels", "cluster", "deployments", "autoscaling")

ALLOWED: dict[str, set[str]] = {
    "kernels": set(),
    "engine": set(),
    "chat": set(),
    "model": {"kernels", "engine.types", "engine.plan", "engine.config", "engine.errors"},
    "cluster": {
        "engine.types",
        "engine.errors",
        "engine.config",
        "engine.bundle",
        "engine.session",
        "model.config",
        "model.feed",
        "model.fingerprint",
        "model.released",
        "model.safetensors_header",
        "model.checkpoint_check",
        "model.weights",
    },
    "autoscaling": {"engine.types", "engine.stats", "engine.routing", "cluster.planner"},
    "deployments": {"engine", "cluster", "model.config", "model.feed"},
    "app": {
        "chat",
        "engine",
        "model.config",
        "model.released",
        "model.weights",
        "model.fingerprint",
        "cluster",
        "deployments",
        "autoscaling",
    },
}
FORBIDDEN: dict[str, set[str]] = {
    "kernels": {"ray", "fastapi", "starlette", "boto3", "transformers"},
    "engine": {"torch", "ray", "fastapi", "starlette", "boto3"},
    "chat": {"torch", "ray", "fastapi", "starlette", "transformers"},
    "model": {"ray", "boto3", "fastapi", "starlette", "transformers"},
    "cluster": {"fastapi", "starlette", "transformers"},
    "autoscaling": {"torch", "fastapi", "starlette"},
    "deployments": {"fastapi", "starlette", "transformers"},
    "app": {"torch", "transformers"},
}
# Wiring code may know two worlds (docs/structure.md); each entry says which.
WIRING = {
    "deployments/shard.py": {"model", "chat.matcher", "chat.tokenizer"},
    "deployments/lockstep.py": {"model.parallel"},  # imported by the shard only
    "deployments/load.py": {"model"},  # as well
    "app/default_model.py": {"model"},
    "app/score.py": {"model"},
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def within(name: str, allowed: set[str]) -> bool:
    return any(name == a or name.startswith(a + ".") for a in allowed)


@pytest.mark.parametrize("package", OURS)
def test_imports(package: str) -> None:
    for path in sources(package):
        allowed = ALLOWED[package] | {package} | WIRING.get(str(path.relative_to(ROOT)), set())
        for name in imports(path):
            top = name.split(".")[0]
            if top in OURS:
                assert within(name, allowed), f"{path.relative_to(ROOT)} imports {name}"
            assert top not in FORBIDDEN[package], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", [*OURS, "benchmarks"])
def test_file_length(package: str) -> None:
    limit = 450 if package == "kernels" else 400
    for path in sources(package):
        lines = len(path.read_text().splitlines())
        assert lines <= limit, f"{path.relative_to(ROOT)}: {lines} lines, limit {limit}"


def test_environment_is_not_configuration() -> None:
    """Behaviour comes from ServiceConfig; only Ray's own switches are read or set, in one place."""
    for package in OURS:
        for path in sources(package):
            if "os.environ" in path.read_text() or "getenv" in path.read_text():
                assert path.name == "serve_modes.py", f"{path.relative_to(ROOT)} reads the environment"


@pytest.mark.parametrize("package", [p for p in OURS if p != "autoscaling"])
def test_every_module_is_on_the_map(package: str) -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    section = page.partition(f"### {package}/")[2].partition("\n### ")[0]
    for path in sources(package):
        if path.name != "__init__.py":
            assert f"| `{path.stem}` |" in section, f"docs/structure.md does not name {path.relative_to(ROOT)}"
