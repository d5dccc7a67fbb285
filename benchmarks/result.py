"""Writes a benchmark's figures with what is needed to get them again: commit, command, machine, versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"


def provenance() -> dict[str, Any]:
    """Returns commit (with `+` if the tree has uncommitted changes), command, machine and versions."""
    packages = ("numpy", "grain", "jax", "flax")
    return {
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else ""),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {_cpu_model()}",
        "python": platform.python_version(),
        "versions": {name: version for name in packages if (version := _version(name))},
    }


def write_result(name: str, figures: dict[str, Any], directory: pathlib.Path = RESULTS) -> pathlib.Path:
    """Writes NAME.json, by default in benchmarks/results, and returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps({"provenance": provenance(), **figures}, indent=2) + "\n")
    root = RESULTS.parent.parent
    print(f"wrote {path.relative_to(root) if path.is_relative_to(root) else path}")
    return path


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    try:
        run = subprocess.run(
            ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.strip()


def _module() -> str:
    return f"benchmarks.{pathlib.Path(sys.argv[0]).stem}"


def _cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
