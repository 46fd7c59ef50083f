"""ZeroFn under other frameworks: transformers' and TRL's trainers, and Lightning. The code uses only public names.

Each integration needs its framework. The framework keeps its loop, data, callbacks and reports; ZeroFn runs the step.

How a framework's step is captured: a trainer's `compute_loss`, or a module's `training_step`, runs once under
capture. `recording.py` notes what it reads and does. Its changes of its own object (appends, counts, assignments)
become a list of effects, which is run on the host after every step (`effects.py`). Values that depend on the step are
expressions until it has run (`deferred_values.py`). Between steps, the module's parameters and buffers are read and
written as usual (`live_module.py`). A torch optimizer that the user made becomes a transformation of `zerofn.optim`
(`torch_optimizers.py`, `param_groups.py`).

Start reading: `recording.py`, then `effects.py`; then `transformers/trainer.py` or `lightning/strategy.py`.
"""
