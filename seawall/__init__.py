"""Seawall: LLM inference and scoring inside a planned, proven memory budget.

Public names are loaded when they are first used, so that importing the package is quick and a
front end that needs no tensors never loads torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seawall.core.errors import (
        BudgetError,
        ConfigError,
        EngineError,
        ModelError,
        QueueFullError,
        RequestError,
        SeawallError,
    )
    from seawall.core.params import SamplingParams
    from seawall.offline.engine import Engine
    from seawall.offline.score import ScoreResult

__version__ = "0.1.0"

_WHERE = {
    "Engine": "seawall.offline.engine",
    "ScoreResult": "seawall.offline.score",
    "SamplingParams": "seawall.core.params",
    "SeawallError": "seawall.core.errors",
    "ConfigError": "seawall.core.errors",
    "BudgetError": "seawall.core.errors",
    "ModelError": "seawall.core.errors",
    "RequestError": "seawall.core.errors",
    "QueueFullError": "seawall.core.errors",
    "EngineError": "seawall.core.errors",
}

__all__ = [
    "BudgetError",
    "ConfigError",
    "Engine",
    "EngineError",
    "ModelError",
    "QueueFullError",
    "RequestError",
    "SamplingParams",
    "ScoreResult",
    "SeawallError",
]


def __getattr__(name: str) -> object:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'seawall' has no attribute {name!r}")
    return vars(importlib.import_module(where))[name]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
