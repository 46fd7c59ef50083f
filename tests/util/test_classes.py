"""What classes hold, also those whose metaclass answers every name."""

from dataclasses import dataclass

from zerofn.util.classes import bases_of, held_by, is_dataclass, made_by, named, of_class


class Answers(type):
    def __getattribute__(cls, name):
        return 7


class Base(metaclass=Answers):
    a = 1.0


class Derived(Base):
    def f(self):
        return 2


@dataclass
class Fields:
    x: int = 0


class More(Fields):
    pass


def test_no_metaclass_is_asked():
    assert bases_of(Derived) == (Derived, Base, object) and named(Derived) == "Derived"
    assert bases_of(int) == int.__mro__ and named(int) == "int"


def test_what_a_class_or_a_base_holds():
    assert Derived.a == Derived.some == 7 and of_class(Derived, "a") == 1.0
    assert of_class(Derived, "f")(None) == 2 and of_class(Derived, "some") is None
    assert "f" in held_by(Derived) and "a" not in held_by(Derived)


def test_dataclasses():
    assert is_dataclass(Fields) and is_dataclass(More)
    assert not is_dataclass(Derived) and not is_dataclass(int)


def test_what_makes_an_instance_whatever_new_its_class_has():
    class Bag(dict):
        def __new__(cls):
            return 7

    assert made_by(Bag) is dict.__new__ and made_by(Derived) is object.__new__
