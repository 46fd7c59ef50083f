from tests.support.untested import untested


def test_files_with_few_tested_lines_are_named_the_least_first():
    lines = {"a.py": (10, 2, "3, 9"), "b.py": (10, 3, "1-3"), "c.py": (0, 0, ""), "d.py": (4, 4, "1-4")}
    assert untested(lines) == ["  0 %  d.py: not run: 1-4", " 70 %  b.py: not run: 1-3"]
