#include "rows.h"

#include "lookup.h"

#include <limits>
#include <stdexcept>

#include "pool.h"
#include "simd.h"

namespace attar {
namespace {

constexpr std::int64_t SERIAL_BELOW = 1 << 15;  // elements; a shared call costs about as much as this many

#define ATTAR_KERNELS "rows.inl"
#include "for_levels.h"

void check(std::int64_t rows, std::int64_t columns) {
    if (rows < 0 || columns < 1 || rows > std::numeric_limits<std::int64_t>::max() / 16 / columns)
        throw std::invalid_argument("impossible shape of rows");
}

void check_ids(const Table& table, const std::int64_t* ids, std::int64_t rows, std::int64_t offset) {
    for (std::int64_t r = 0; r < rows; ++r)
        if (ids[r] + offset < 0 || ids[r] + offset >= table.count)
            throw std::invalid_argument("a row that the table does not have");
}

float at(const Table& table, std::int64_t index) {
    switch (table.number) {
        case Number::float16: return to_float(static_cast<const Float16*>(table.dense)[index]);
        case Number::bfloat16: return to_float(static_cast<const Bfloat16*>(table.dense)[index]);
        default: return static_cast<const float*>(table.dense)[index];
    }
}

}  // namespace

void norm(Norm kind, const float* stream, const float* delta, std::int64_t rows, std::int64_t columns,
          const float* weight, const float* bias, float eps, float offset, float* sum, float* out, Level level) {
    check(rows, columns);
    const auto row = ATTAR_PICK(level, norm_row);
    for_rows(rows, rows > 1 && rows * columns >= SERIAL_BELOW, [&](std::int64_t r) {
        const std::int64_t from = r * columns;
        row(kind, stream + from, delta ? delta + from : nullptr, columns, weight, bias, eps, offset,
            delta ? sum + from : nullptr, out + from);
    });
}

void activate(Activation kind, bool gated, const float* x, std::int64_t rows, std::int64_t columns, float* out,
              Level level) {
    check(rows, columns);
    const auto row = ATTAR_PICK(level, activate_row);
    for_rows(rows, rows > 1 && rows * columns >= SERIAL_BELOW, [&](std::int64_t r) {
        row(kind, gated, x + r * columns * (gated ? 2 : 1), columns, out + r * columns);
    });
}

void embed(const Table& table, const std::int64_t* ids, std::int64_t rows, float scale, const Table* position_table,
           const std::int64_t* positions, std::int64_t offset, float* out) {
    check(rows, table.columns);
    check_ids(table, ids, rows, 0);
    if (position_table) check_ids(*position_table, positions, rows, offset);
    for_rows(rows, rows > 1 && rows * table.columns >= SERIAL_BELOW, [&](std::int64_t r) {
        float* to = out + r * table.columns;
        if (table.packed)
            read_row(*table.packed, ids[r], to);
        else if (table.looked_up)
            read_row(*table.looked_up, ids[r], to);
        else
            for (std::int64_t c = 0; c < table.columns; ++c) to[c] = at(table, ids[r] * table.columns + c);
        if (scale != 1.0f)
            for (std::int64_t c = 0; c < table.columns; ++c) to[c] *= scale;
        if (position_table)
            for (std::int64_t c = 0; c < table.columns; ++c)
                to[c] += at(*position_table, (positions[r] + offset) * table.columns + c);
    });
}

}  // namespace attar
