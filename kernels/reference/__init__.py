"""Every operation in plain torch on the CPU, float32: the truth the other kernels are compared with.

Plain torch is not row-invariant by itself. What this folder relies on instead was measured (MKL 2024.2,
AVX-512) and is proven again on each machine when a layer is packed (``row_tiles.py``):

- A matrix product gives a row the same bits at most row counts, but not always at all of them: MKL sends one
  row to a matrix-vector kernel, and some shapes switch their blocking. So rows go through tiles of proven counts.
- ``exp`` gives the same bits at every offset of a tensor; ``silu`` and ``sigmoid`` do not (their scalar tails
  use another exponential). So SiLU is spelt with ``exp``.
- Row-wise reductions (sum, max, mean, log_softmax) depend on the row's length alone.
"""
