"""The public surface: the names of the package, loaded on first use, and what was promised."""

import re
import subprocess
import sys
import tomllib

import pytest
from source_tree import PACKAGE, REPO
from test_layers import INSTALLED

import seawall

# What users may import from the package itself; docs and README name nothing else.
PUBLIC = [
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


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_all_is_the_documented_list() -> None:
    assert sorted(seawall.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_name_is_importable(name: str) -> None:
    done = run_python(f"from seawall import {name} as found; assert found is not None")
    assert done.returncode == 0, done.stderr


def test_unknown_name_is_an_attribute_error() -> None:
    done = run_python("import seawall; seawall.no_such_name")
    assert "AttributeError" in done.stderr
    assert "no_such_name" in done.stderr


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import seawall, sys; dir(seawall); assert not {'torch', 'numpy'} & set(sys.modules)"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_version_is_that_of_the_project_file() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert seawall.__version__ == project["version"]
    changes = (REPO / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {project['version']}" in changes


def test_constraints_pin_the_versions_that_the_project_allows() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = (REPO / "constraints-cpu.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower() for line in pins if line and not line.startswith("#")}
    extras = project["optional-dependencies"]
    tested = project["dependencies"] + extras["hf"] + extras["test"] + extras["dev"]
    needed = {re.split(r"[<>=\[; ]", line)[0] for line in tested} - {"seawall"}
    assert needed <= pinned, needed - pinned


def test_package_data_ships_the_demo_model_and_the_type_marker() -> None:
    files = {path.name for path in (PACKAGE / "demo_model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    assert (PACKAGE / "py.typed").is_file()
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = project["tool"]["setuptools"]["package-data"]["seawall"]
    assert {"py.typed", "demo_model/*"} <= set(shipped)


def test_every_installed_library_is_a_dependency() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[<>=\[; ]", line)[0] for line in project["dependencies"]}
    assert declared == INSTALLED
