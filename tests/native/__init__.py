"""The device sources of the package on the CPU: what the compiled GPU code would compute, without a GPU."""
