"""What a training step is written with: gradients, accumulation, loss scales, recomputation, `TrainState`."""
