"""What a step writes down of values by `zerofn::expect`, for checks of its graph: words before and behind names."""

GRADIENT_OF = "gradient of "  # before a leaf's name: its gradient is the same along the axis
OWN_OF = "own "  # before the name of a plan's module that is to sum the value, or to get it
BETWEEN_SLICES = " (replicated_with_grad_allreduce)"  # behind a module's name, in what its parameters are slices of
