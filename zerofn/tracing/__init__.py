"""Recording operations on fake tensors in some microseconds each: what capture and initialisation share."""
