"""Update rules, reductions and copies on flat buffers, each an operation `zerofn::name`: one node of a graph."""
