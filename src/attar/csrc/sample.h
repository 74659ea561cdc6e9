// The random choice of a token from each row of scaled logits; the specification is `gumbel_max` of kernels/ops.py.
#pragma once

#include <cstdint>

namespace attar {

// rows [count, columns], contiguous, without NaN and +inf; -inf drops an element. Writes the first index of the largest
// sum of number and noise of each row to `chosen`: 0 where all are dropped. The noise of column i of a row follows from
// its seed, its index and i alone.
void gumbel_max(const double* rows, std::int64_t count, std::int64_t columns, const std::uint64_t* seeds,
                const std::uint64_t* indices, std::int64_t* chosen);

}  // namespace attar
