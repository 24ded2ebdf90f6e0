// What the machine can do at most, for comparison: reading memory, and multiplying codes in registers.
#pragma once

#include "moe.h"

namespace int8moe {

// Best bytes a second of `repeats` straight reads of a buffer by all threads; 0 when there is no memory for it.
double measure_read(int threads, long bytes, int repeats);

// int8 operations a second of a chain, all threads together, best of some runs of about `milliseconds`.
double measure_peak(const Peak& peak, int threads, int milliseconds);

}  // namespace int8moe
