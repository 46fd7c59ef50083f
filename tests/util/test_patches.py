"""Replacing functions of other libraries for a while."""

import contextlib
from types import SimpleNamespace

import pytest

from zerofn.util.patches import Patches


def doubled(function):
    return lambda: 2 * function()


@pytest.fixture
def owner():
    return SimpleNamespace(one=lambda: 1)


@pytest.fixture
def patches(owner):
    return Patches(lambda: [(owner, "one", doubled)])


def test_the_first_to_enter_replaces_and_the_last_to_leave_restores(owner, patches):
    before = owner.one
    with patches, patches:
        assert owner.one() == 2
    assert owner.one is before


def test_where_they_are_lifted_the_original_is_there(owner, patches):
    before = owner.one
    with patches:
        with contextlib.suppress(ZeroDivisionError), patches.lifted():
            with patches.lifted(), patches:
                assert owner.one is before
            assert owner.one is before
            raise ZeroDivisionError
        assert owner.one() == 2
    assert owner.one is before


def test_what_ends_while_they_are_lifted_stays_ended(owner, patches):
    before = owner.one
    with contextlib.ExitStack() as inside:
        inside.enter_context(patches)
        with patches.lifted():
            inside.close()
        assert owner.one is before
        with patches.lifted():
            inside.enter_context(patches)
            assert owner.one is before
        assert owner.one() == 2
    assert owner.one is before
