"""Record operations on fake tensors quickly, for capture and initialisation, and notice where fake results are wrong.

How an operation is recorded: torch takes half a millisecond per operation, mostly for proxies and for metadata that it
hashes field by field. A step repeats few kinds of operations. So `shortcut.py` asks torch once for each kind (an
operation on tensors of these shapes, strides and dtypes), and makes later results itself. Views are taken of tensors
on "meta", and a detach becomes no node. All other operations go to torch: writes, operations whose result depends on
data, higher-order operations, other modes. For torch, tensors that were made without it look like its own. Tests
compare the graphs of both ways.

Why strides are tried (`strides.py`): some fake kernels forget the memory order of their result (`elu`, `batch_norm`).
So an operation on tensors that are not in row-major order runs once more on small zeros, real beside fake, and the
capture takes the real order. Only operations that torch defines element by element are tried. A kernel that takes a
workspace, or trusts a count, would read foreign memory if it ran on values that nobody computed
(`invented_values.py`).

Other files: `fake_kernels.py` has fake kernels that torch lacks. `grad_mode.py` notes on each node whether grad mode
was on, because oneDNN's LSTM asks for it.

Start reading: `shortcut.py`.
"""
