// What happens to rows between products: norms, activations, embedding. Specifications: kernels/ops.py. Each row is
// computed alone and in one order, so its bits depend on nothing beside it.
#pragma once

#include <cstdint>

#include "cpu.h"
#include "matrix.h"

namespace attar {

struct LookupMatrix;

enum class Norm { rms, layer };

// stream [rows, columns] (plus delta, if given, into `sum`) normalised to `out`. weight [columns], bias [columns] or null.
void norm(Norm kind, const float* stream, const float* delta, std::int64_t rows, std::int64_t columns,
          const float* weight, const float* bias, float eps, float offset, float* sum, float* out, Level level);

enum class Activation { silu, gelu, gelu_tanh, quick_gelu, relu };

// x [rows, columns], or [rows, 2 columns] as (a | b) if gated, to out [rows, columns]: act(x), or act(a) * b.
void activate(Activation kind, bool gated, const float* x, std::int64_t rows, std::int64_t columns, float* out,
              Level level);

// Rows of a table [count, columns], packed, or dense in row order, scaled; plus rows of a dense table of positions, if
// given. Throws std::invalid_argument where an id is not in the table, before anything is written.
struct Table {
    const Matrix* packed;  // or
    const LookupMatrix* looked_up;  // or
    const void* dense;
    Number number;
    std::int64_t count, columns;
};
void embed(const Table& table, const std::int64_t* ids, std::int64_t rows, float scale, const Table* position_table,
           const std::int64_t* positions, std::int64_t offset, float* out);

}  // namespace attar
