"""What is between the products of a layer, and behind the last, as kernels in Triton for GPUs."""
