"""Which code is the user's: a package is not, in whichever of an interpreter's several places it is installed."""

from __future__ import annotations

import importlib
import json
import os

import pytest
import torch

from tests.support import models
from zerofn.guards.user_code import is_users, of_user


@pytest.mark.parametrize("folder", ["lib/python3/dist-packages", "home/.local/lib/python3/site-packages", "project"])
def test_packages_of_any_folder(tmp_path, monkeypatch, folder):
    name = f"package_in_{folder.rpartition('/')[2].replace('-', '_')}"
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / f"{name}.py").write_text("def f(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path / folder)
    package = importlib.import_module(name)
    assert of_user(package) == is_users(package.f.__code__.co_filename) == (folder == "project")


def test_packages_that_were_installed_into_any_folder_on_the_path(tmp_path, monkeypatch):
    """As `pip install --target` and archives of environments do: beside a package lies the record of it."""
    for name in ("a_library", "a_script_beside_it"):
        (tmp_path / f"{name}.py").write_text("def f(x):\n    return x\n")
    info = tmp_path / "a_library-1.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("a_library.py,sha256=0,1\na_library-1.0.dist-info/RECORD,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not of_user(importlib.import_module("a_library"))
    assert of_user(importlib.import_module("a_script_beside_it"))


@pytest.mark.parametrize("module", [json, os, torch, pytest])
def test_libraries(module):
    assert not of_user(module)


def test_tests_are_the_users():
    assert of_user(models)
