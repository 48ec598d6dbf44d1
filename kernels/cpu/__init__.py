"""Native kernels for CPUs (C++ with SIMD)."""
