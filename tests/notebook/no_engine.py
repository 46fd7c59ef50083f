"""An engine that cannot start."""

raise SystemExit("no room for an engine")
