"""Library files of which tests run too few lines: python -m tests.support.untested, behind `coverage run -m pytest`."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAST = 80  # per cent


def untested(lines: dict[str, tuple[int, int, str]]) -> list[str]:
    """What to print, the least first. `lines`: of each file (how many there are, how many were not run, which)."""
    shares = {path: 100 - 100 * missing / there for path, (there, missing, _) in lines.items() if there}
    few = sorted((share, path) for path, share in shares.items() if share < LEAST)
    return [f"{share:3.0f} %  {path}: not run: {lines[path][2]}" for share, path in few]


def main() -> None:
    from coverage import Coverage

    counted = Coverage(config_file=str(ROOT / "pyproject.toml"))
    counted.combine()
    lines = {}
    for path in counted.get_data().measured_files():
        _, statements, _, missing, which = counted.analysis2(path)
        lines[str(Path(path).relative_to(ROOT))] = len(statements), len(missing), which
    few = untested(lines)
    print(f"{len(lines)} library files; tests run under {LEAST} % of the lines of {len(few)}:", *few, sep="\n")


if __name__ == "__main__":
    main()
