// Symmetric int8 quantization of rows; the specification is `quantize_rows_int8` of kernels/ops.py.
#pragma once

#include <cstdint>

#include "cpu.h"

namespace attar {

// x [rows, columns] to codes [rows, columns] and scales [rows]; all contiguous. `T` is float, or std::uint16_t for the
// bits of bfloat16. Returns the first row that holds a NaN or an infinity (what is written then has no meaning), or -1.
template <class T>
std::int64_t quantize_rows_int8(const T* x, std::int64_t rows, std::int64_t columns, std::int8_t* codes, float* scales,
                                Level level);

}  // namespace attar
