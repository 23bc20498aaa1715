"""One packed forward of any number of sequences: the model's attention, our kernels."""
