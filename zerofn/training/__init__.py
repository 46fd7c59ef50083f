"""The parts of a training step: gradients, microbatches, loss scales, recomputation and `TrainState`."""
