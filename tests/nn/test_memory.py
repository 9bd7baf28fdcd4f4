"""How the memory of attention grows, as bench/attention_memory.py measures it in fresh processes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "attention_memory.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("attention_memory", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "least", "most"), [("math", 1.8, 2.2), ("tiled", 0.0, 1.2), ("sdpa", 0.0, 1.2)])
def test_memory_grows_with_the_square_of_the_length_only_where_scores_are_held(
    bench: Any, kernel: str, least: float, most: float
) -> None:
    assert least < bench.growth(kernel, (1024, 2048, 4096)) < most
