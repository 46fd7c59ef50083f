"""Names of attributes by which objects say what a step's guards need not watch.

`WRITTEN`: a set of names, of attributes that a step changes alone. `FOLLOWED`: of those that it reads and changes.
`INERT`: True of hooks that do nothing.
"""

WRITTEN, FOLLOWED, INERT = "_zerofn_written", "_zerofn_followed", "_zerofn_inert"
