"""Small helpers that every room uses: checks of arguments, errors, constants, sizes in words, patches.

This is the lowest room: it imports nothing of ZeroFn but `_torch_compat`, and nothing of torch.fx.

Where to find what:

- `arguments.py`: `checked` compares the arguments of a public function with its annotations, before the function
  runs.
- `errors.py`: notes on errors, the nearest known name for a misspelt one, lists that are cut short.
- `user_line.py`: the line of the user's code that an error is about.
- `process.py`: `the(Class)` returns the one object of a class that lives as long as the process, such as the arenas
  of all steps.
- `constants.py`: values that cannot change, so that a captured step may contain them.
- `sizes.py`, `html.py`: bytes, rates and tables in words, for terminals and notebooks.
- `patches.py`: contexts that replace functions of other libraries for a while.

Invariant: whatever outlives a step is reached through `the`, so `grep -rn "the(" zerofn` lists it and a test can
replace it. `tests/test_house.py` lists the few exceptions, such as measured rates.

Start reading: `process.py`, then `arguments.py`.
"""
