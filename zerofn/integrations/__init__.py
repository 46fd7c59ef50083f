"""ZeroFn under other frameworks. Public names only; each needs its framework."""
