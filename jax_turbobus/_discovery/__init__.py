"""What this machine's links are, from NVML and sysfs.

`nvml` and `sysfs` only read; `visible` applies ``CUDA_VISIBLE_DEVICES``;
`build` turns what they found into the graph of a topology file. None of them
imports JAX or touches CUDA, so discovery starts no GPU context.
"""
