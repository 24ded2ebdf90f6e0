"""The constants of docs/numerics.md, once for Python and Triton.

The C++ kernels state them in csrc/cpu/numerics.h; a test compares the bits of both.
"""

from __future__ import annotations

RINT_MAGIC = 12582912.0  # 1.5 * 2**23: adding and subtracting it rounds to the nearest integer, ties to even
INT8_MAX = 127.0
AMAX_FLOOR = 1e-30

EXP_LOW, EXP_HIGH = -87.0, 88.0
LOG2E = 1.44269504088896341
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # the high part has 9 significant bits: n * LN2_HIGH is exact
EXP_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)

GELU_TANH_SCALE, GELU_TANH_CUBIC = 0.7978845608028654, 0.044715  # sqrt(2/pi); Hendrycks & Gimpel 2016
SQRT_HALF = 0.7071067811865476
# erf: Abramowitz & Stegun 7.1.26, highest power first; error at most 1.5e-7
ERF_P = 0.3275911
ERF_POLYNOMIAL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
