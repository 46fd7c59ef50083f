"""Which code is the user's: a package is not, in whichever of an interpreter's several places it is installed."""

from __future__ import annotations

import importlib
import json
import os

import pytest
import torch

from tests.support import models
from zerofn.runtime.user_code import is_users, of_user


@pytest.mark.parametrize("folder", ["lib/python3/dist-packages", "home/.local/lib/python3/site-packages", "project"])
def test_packages_of_any_folder(tmp_path, monkeypatch, folder):
    name = f"package_in_{folder.rpartition('/')[2].replace('-', '_')}"
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / f"{name}.py").write_text("def f(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path / folder)
    package = importlib.import_module(name)
    assert of_user(package) == is_users(package.f.__code__.co_filename) == (folder == "project")


@pytest.mark.parametrize("module", [json, os, torch, pytest])
def test_libraries(module):
    assert not of_user(module)


def test_tests_are_the_users():
    assert of_user(models)
