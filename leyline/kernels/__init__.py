"""One module an op: contract, reference, example inputs, Triton kernel, launcher.

Kernels import nothing of Leyline but its errors, so that each can be read, tested and timed alone.
"""
