"""Finds the fastest plan of the Triton kernels on this machine's GPU: `int8moe tune`."""
