"""A parser of command lines that names the command or the option that was meant."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from .errors import nearest

_CHOICE = re.compile(r"invalid choice: (['\"])(?P<word>.*?)\1 \(choose from (?P<known>.*)\)")


class Parser(argparse.ArgumentParser):
    """A parser of a command line, whose errors name the command or the option that was meant.

    >>> parser = Parser(prog="zerofn")
    >>> _ = parser.add_argument("--world")
    >>> parser._meant("argument command: invalid choice: 'pln' (choose from 'plan', 'report')")
    "argument command: 'pln' is not known; did you mean 'plan'?"
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `ArgumentParser`'s. An unknown option that is nearly one of this command's is an error that names it."""
        found, unknown = super().parse_known_args(args, namespace)
        options = re.findall(r"(?<!\S)--[\w-]+", self.format_help()) if unknown else []
        for word in unknown:
            near = nearest(word.partition("=")[0], options, 1) if word.startswith("--") else []
            if near:
                self.error(f"{word}: not known to {self.prog}; did you mean {near[0]}?")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print a message, with the nearest choice for one that is not known, and exit with 2."""
        super().error(self._meant(message))

    def _meant(self, message: str) -> str:
        found = _CHOICE.search(message)
        near = nearest(found["word"], re.split(r"[', ]+", found["known"].strip("'")), 1, 0.6) if found else []
        if found is None or not near:
            return message
        return f"{message[: found.start()]}{found['word']!r} is not known; did you mean {near[0]!r}?"
