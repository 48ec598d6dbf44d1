"""Native kernels for CPUs: C++17 with SIMD, as fast as memory allows and the same bits on every machine.

``operations.py`` is the ``Operations`` of this folder, ``weight_formats.py`` decides in which form a weight is kept,
``availability.py`` says whether the module is built and what it may use. ``native/`` is the C++:

=========================  ================================================================================
``simd.h``, ``simd_*.h``   sixteen lanes, spelt for each instruction set
``panels.h``, ``rows.h``   how weights and activations lie in memory
``linear.h``               rows times panels
``row_kernels.h``          norm, rotary, gate, quantise
``choice_kernels.h``       argmax, top-k, the candidates of a random race
``attention*.h``,          paged attention, its plan, the cache's layout
``kv_*.h``
``kernels.h``,             the table of functions that each ``isa_*.cpp`` fills once
``kernel_table.h``
``thread_pool.*``          phases, chunks, and no waiting for a thread that lost its core
``decoder.*``              all layers in one call
``draft_chain.*``          a draft's chain of tokens in one call
``bind*.cpp``              what Python sees; ``checks.h`` refuses what would not fit
=========================  ================================================================================

What holds everywhere:

*One source, the same bits.* Kernels are written over ``F32x16``. Every instruction set performs the same IEEE
operations in the same order (nothing is contracted or reassociated, exponentials are polynomials), so scalar, AVX2,
AVX-512 and NEON agree bit for bit, and the plain one is the others' test.

*Row invariance.* A group of 32 products is added in integers, exactly; groups, keys and blocks of keys are added in an
order that the row's own length fixes. Tiles, chunks and threads say who computes, never what.

*A path of a token tree is a chain.* A row reads its keys in the order of its path, wherever they lie, so its bits are
those of the same tokens one after the other.

*Weights keep their own form.* Four-bit weights stay unsigned nibbles with the file's scales and minima; a lane is an
output channel, so nothing is summed across lanes. Activations are int8 with a scale for each row and group of 32.

What was measured on the way (2 cores of an AMD EPYC with AVX-512 VNNI, 31 to 39 GB/s; the default model, 96 MB):

- Chunks dealt out alternately to two threads: 3.6 ms a pass; a contiguous run of chunks each: 2.6 ms, the memory's
  limit. Every switch to another place starts a new stream.
- Weights in 4 KB pages and without prefetch: 7.1 ms on one thread; in huge pages, asked for 8 KB ahead into the
  second-level cache: 3.9 ms.
- A hot helper that is not inlined keeps its sums in memory: rows cost twice as much. Hence ``OUTRIDER_HOT``.
- A phase of the thread pool costs 0.4 µs; a whole empty run 1.3 µs.
- On AVX2, halves of a panel one after the other, with eight rows in registers, were slower than four rows with
  shared broadcasts (101 to 122 G products/s).
- A 4-bit head costs quality: KL divergence 0.07, ten times all else together. Embedding and head keep 8 bits.
"""
