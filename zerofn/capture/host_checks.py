"""Checks of libraries that read data only to raise an error: a captured step leaves them out.

`if torch.any(var < 0): raise ValueError(...)` asks for a value that no traced tensor has. A check has one answer with
which the step goes on, so that answer is given, and the log names the line. Checks of the user's own are not skipped:
there the capture raises, and says so.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import sys
import textwrap
from collections.abc import Iterator
from types import CodeType, FrameType

from ..util.user_line import OURS, is_users

log = logging.getLogger("zerofn")

_ASKING = (ast.BoolOp, ast.Not, ast.IfExp, ast.comprehension)  # ask for the truth of what is in them
# Between a line that asks and us: modes, which pass the question on.
_MODES = ("__torch_function__", "__torch_dispatch__")
_BETWEEN = ("torch/_ops.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py")


def passing_answer() -> bool | None:
    """Return what the check that a library makes right now has to hear so that it raises nothing; None if the
    innermost line of Python is not such a check.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame.f_code):
        frame = frame.f_back
    if frame is None or is_users(frame.f_code.co_filename):
        return None
    found = _answer_at(frame.f_code, frame.f_lineno)
    if found is not None:
        _tell(frame.f_code.co_filename, frame.f_lineno)
    return found


def _is_between(code: CodeType) -> bool:
    return code.co_filename.startswith(OURS) or code.co_name in _MODES or code.co_filename.endswith(_BETWEEN)


@functools.lru_cache(maxsize=4096)
def _tell(file: str, line: int) -> None:
    log.info("%s:%d: this check depends on data, so the captured step does not run it", file, line)


@functools.lru_cache(maxsize=4096)
def _answer_at(code: CodeType, line: int) -> bool | None:
    """Return the answer that passes the check on a line of a function."""
    try:
        lines, first = inspect.getsourcelines(code)
        function = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):  # no source
        return None
    for test, passes in _checks(function):
        if test.lineno <= line - first + 1 <= (test.end_lineno or test.lineno):
            signs = set(_signs(test, True))
            return passes is signs.pop() if len(signs) == 1 and None not in signs else None
    return None


def _checks(tree: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Yield (condition, the value with which nothing is raised) of what does nothing but raise."""
    if isinstance(tree, ast.Try) and tree.handlers:
        return  # an error is a branch there
    if isinstance(tree, ast.Assert):
        yield tree.test, True
    elif isinstance(tree, ast.If) and isinstance(tree.body[-1], ast.Raise):
        if all(isinstance(x, ast.Assign | ast.Expr) for x in tree.body[:-1]):
            yield tree.test, False
    for part in ast.iter_child_nodes(tree):
        yield from _checks(part)


def _signs(test: ast.expr, positive: bool) -> Iterator[bool | None]:
    """Yield for each part that a condition asks the truth of: whether the condition wants it true; None if the part
    may ask for the truth of others.
    """
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _signs(part, positive)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _signs(test.operand, not positive)
    else:
        asks = any(isinstance(x, _ASKING) or isinstance(x, ast.Compare) and len(x.ops) > 1 for x in ast.walk(test))
        yield None if asks else positive
