"""Imports point one way, and the library needs neither JAX nor the trainer; read from the source, not at run time.

Importing grain pulls in JAX by itself, so only the source can tell what is ours.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from pathlib import Path

import grain
import pytest

import bcl_grain
from tests.pipelines import pipeline

PACKAGE = Path(bcl_grain.__file__).parent
FOREIGN = {"jax", "jaxlib", "flax", "optax", "orbax", "train", "tests", "benchmarks", "configs"}

# The core: what each module may import of the package. No other module is imported by these, so that whatever stands
# on the core (simulation of jobs, reports, the command line) can't creep into it.
CORE: dict[str, set[str]] = {
    "checks": set(),
    "costs": {"checks"},
    "partition": set(),
    "metrics": set(),
    "chunks": set(),
    "rows": set(),
    "mffd": set(),
    "caps": {"checks"},
    "capacity": {"rows"},
    "shapes": {"checks", "layouts", "partition", "rows"},
    "layouts": {"checks", "chunks", "rows"},
    "baselines": {"mffd", "partition"},
    "cost_prior": {"checks", "costs"},
    "json_files": set(),
    "cost_table": {"costs", "json_files"},
    "streaming": {"cost_prior", "partition"},
    "planner_config": {"capacity", "checks", "cost_prior"},
    "pool_state": {"checks", "planner_config"},
    "planner": {"capacity", "cost_prior", "partition", "planner_config", "pool_state", "streaming"},
    "saved_state": {"planner_config", "pool_state"},
    "telemetry": {"planner"},
    "simulate": {"baselines", "costs", "layouts", "metrics", "planner"},
    "pack_iterator": {"capacity", "costs", "planner", "saved_state", "telemetry"},
    "dataset": {"capacity", "checks", "cost_prior", "costs", "pack_iterator", "planner", "planner_config", "telemetry"},
    "lanes": {"checks", "planner_config"},
    "lane_files": {"lanes"},
}
USES_GRAIN = {"caps", "dataset", "lanes", "pack_iterator"}  # of the core; all else there is standard library and NumPy
PUBLIC = {
    "caps",
    "cost_prior",
    "cost_table",
    "costs",
    "dataset",
    "lane_files",
    "lanes",
    "layouts",
    "planner",
    "shapes",
    "telemetry",
}


@functools.cache
def imported(source: str) -> frozenset[str]:
    """Returns the full names of all that `source` imports, wherever the statement stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "bcl_grain" if node.level else node.module or ""
            if node.level and node.module:
                module += f".{node.module}"
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def siblings(source: str, modules: set[str]) -> set[str]:
    """Returns the modules of the package that `source` imports; "__init__" stands for the package itself."""
    ours = [name.split(".") for name in imported(source) if name.split(".")[0] == "bcl_grain"]
    return {name[1] if len(name) > 1 and name[1] in modules else "__init__" for name in ours}


def top_level(source: str) -> set[str]:
    return {name.split(".")[0] for name in imported(source)}


def read_package() -> dict[str, str]:
    return {path.stem: path.read_text("utf-8") for path in sorted(PACKAGE.glob("*.py"))}


def forbidden(sources: dict[str, str]) -> list[str]:
    """Returns what is wrong with a package of these sources, one line each."""
    modules = set(sources) - {"__init__"}
    faults = []
    for name, source in sources.items():
        tops = top_level(source)
        faults += [f"{name} imports {top}" for top in sorted(tops & FOREIGN)]
        ours = siblings(source, modules)
        if name in CORE:
            faults += [f"{name} imports {other}" for other in sorted(ours - CORE[name])]
            others = tops - set(sys.stdlib_module_names) - {"numpy", "bcl_grain"}
            if name not in USES_GRAIN:
                faults += [f"{name} imports {top}" for top in sorted(others)]
        elif name == "__init__":
            faults += [f"the package imports {other}" for other in sorted(ours - PUBLIC)]
        else:
            faults += [f"{name} imports the package as a whole"] if "__init__" in ours else []
    return faults + cycles({name: siblings(source, modules) for name, source in sources.items()})


def cycles(edges: dict[str, set[str]]) -> list[str]:
    """Takes away modules that import nothing that is left; what stays imports itself in a circle."""
    left = dict(edges)
    while ready := [name for name, others in left.items() if not others & left.keys()]:
        for name in ready:
            del left[name]
    return [f"modules import each other in a circle: {sorted(left)}"] if left else []


def test_imports_point_one_way() -> None:
    assert forbidden(read_package()) == []


def test_the_core_is_all_there() -> None:
    assert CORE.keys() <= read_package().keys()


@pytest.mark.parametrize(
    ("name", "line", "fault"),
    [
        ("costs", "import jax.numpy as jnp", "costs imports jax"),
        ("plots", "from flax import nnx", "plots imports flax"),
        ("metrics", "def f():\n    from train.loop import run", "metrics imports train"),
        ("partition", "from bcl_grain.costs import TransformerCost", "partition imports costs"),
        ("partition", "from bcl_grain import costs", "partition imports costs"),
        ("partition", "from . import costs", "partition imports costs"),
        ("partition", "from .costs import CostFn", "partition imports costs"),
        ("planner", "import bcl_grain", "planner imports __init__"),
        ("planner", "import bcl_grain.dataset", "planner imports dataset"),
        ("planner", "import grain", "planner imports grain"),
        ("simulate", "from absl import logging", "simulate imports absl"),
        ("layouts", "if True:\n    import scipy", "layouts imports scipy"),
        ("cli", "import bcl_grain as bcl", "cli imports the package as a whole"),
        ("__init__", "from bcl_grain.simulate import simulate", "the package imports simulate"),
    ],
)
def test_the_check_can_fail(name: str, line: str, fault: str) -> None:
    sources = read_package()
    sources[name] = f"{sources[name]}\n{line}\n"
    assert fault in forbidden(sources)


def test_the_check_finds_circles() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == [
        "modules import each other in a circle: ['a', 'b', 'c', 'd']"
    ]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_grain_still_has_the_hooks_that_the_transformation_stands_on() -> None:
    """They are Grain's own, spelled with an underscore: a new release may move them."""
    iterator = iter(pipeline(8))
    self_time = inspect.signature(iterator._stats.record_self_time).parameters
    assert self_time["offset_ns"].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert list(inspect.signature(iterator._stats.record_output_spec).parameters) == ["element"]
    with iterator._stats.record_self_time(offset_ns=1):
        assert iterator._stats.record_output_spec("element") == "element"
    assert list(inspect.signature(grain.DatasetIterator._assert_not_closed).parameters) == ["self"]
    assert list(inspect.signature(grain.DatasetIterator._get_next_index).parameters) == ["self"]
    assert list(inspect.signature(grain.DatasetIterator._set_next_index).parameters) == ["self", "index"]
    assert list(inspect.signature(grain.experimental.get_next_index).parameters) == ["ds_iter"]
    assert list(inspect.signature(grain.experimental.set_next_index).parameters) == ["ds_iter", "index"]
    assert isinstance(inspect.getattr_static(grain.IterDataset, "_element_spec"), property)
    assert callable(grain.IterDataset.pipe)
