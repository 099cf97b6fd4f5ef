"""Moving experts to the places of a new plan while steps run: all ranks together, batch by batch, wholly or not at all."""
