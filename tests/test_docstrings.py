"""The examples in the library's docstrings give what they say."""

import doctest
import importlib

import pytest

from tests.support.library import FILES


@pytest.mark.parametrize("module", [name for name, path in FILES.items() if ">>>" in path.read_text()])
def test_examples(module):
    failed, tried = doctest.testmod(importlib.import_module(module))  # what differs is printed
    assert tried and not failed
