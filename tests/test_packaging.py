"""`pip wheel .`: what the packages need at run time is in the wheel, and nothing else of the clone."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = [pattern.removesuffix("*") for pattern in SETUPTOOLS["packages"]["find"]["include"]]
DATA = SETUPTOOLS["package-data"]["*"]


def test_each_file_of_a_package_is_a_module_or_its_data():
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    left_out = [
        str(path.relative_to(ROOT))
        for path in paths
        if path.suffix not in (".py", ".pyc") and not any(fnmatch(path.name, pattern) for pattern in DATA)
    ]
    assert left_out == []


def test_each_folder_with_code_is_packaged():
    with_code = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert with_code - {"tests"} <= set(FOLDERS)


def test_every_kind_of_data_is_still_there():
    found = {path.suffix for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert {pattern.removeprefix("*") for pattern in DATA} <= found
