"""How far two trainings may be apart that differ only in the order of their sums.

Another mesh, schedule or number of micro-batches adds the same float32 numbers in another order;
Adam divides by small second moments and makes the difference larger, step by step. Another CPU
changes the order too: with AVX-512 a product adds 16 partial sums where AVX2 adds 8, and fused
multiply-adds round once where SSE4.2 rounds twice. So what one machine measures needs a margin on
the next: parameters that a machine with AVX-512 found less than 1e-5 apart after 17 steps were
2.3e-5 apart on one with AVX2. A defect (a term left out, a gradient counted twice) is far larger.
"""

# All chosen. Of a pipeline on a CPU with AVX2, one device beside eight: losses 2e-6, gradients 6e-7
# and parameters 1.1e-5 apart after 20 steps (measured).
LOSSES = 1e-5  # absolute, of a few steps, or of many at a low learning rate
LONG_LOSSES = 1e-4  # absolute, of 20 steps at a high learning rate
GRADIENTS = 5e-6  # relative L2 distance of a leaf's, after one step
PARAMETERS = 1e-4  # relative L2 distance of a leaf's, at the end
NORMS = 1e-4  # relative, of a leaf's gradient
