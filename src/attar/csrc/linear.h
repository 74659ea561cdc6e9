// Products of rows with weights in kernel layout; the specification is `linear` of kernels/ops.py.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu.h"
#include "matrix.h"
#include "pool.h"
#include "rows.h"

namespace attar {

// Of one group of a row's columns: the four, aligned, that hold its largest magnitude. Their codes have 15 bits, so that
// the group's scale is that of the other columns. A code is low + 128 high, both of a byte.
struct Wide {
    std::uint32_t at;          // 16 times the first of them: where codes of a block lie that have a byte each
    std::int32_t part;         // that they lie in
    std::int32_t high, excess; // the high codes, a byte each; and -128 times their sum

    std::uint32_t column() const { return at / 16; }
};
constexpr int HIGH_SHIFT = 7, HIGH_UNIT = 1 << HIGH_SHIFT;

// Rows quantized to int8, in tiles of `tile` rows by 64 columns: tile t of step s is `tile` times 64 bytes at (s * tiles +
// t) * tile * 64. There are 16 rows in a tile, which is what one AMX load takes, or all of them where they are fewer and
// weights are unpacked in registers. What a panel of weights meets next lies next. Columns past the last are zero; what
// rows past the last hold does not matter.
struct QuantizedRows {
    std::int64_t rows, columns, steps, tile, tiles;
    std::int64_t group;         // columns that share a scale; 0: the whole row
    std::int64_t scales_a_row;  // 1, or columns / group
    std::int64_t part, parts;   // columns that share both an activation's and a weight's scale; of those a row
    std::int8_t* codes;
    float* scales;       // [rows, scales_a_row]
    std::int32_t* sums;  // [rows, parts]: of codes, high ones included
    Wide* wide;          // [tiles, scales_a_row, tile], or null
    // [rows, steps * 32]: codes again, whole, as pairs of 16 bits, or null. Of 16 columns those of even places come first:
    // columns 0 and 2, 4 and 6, 8 and 10, 12 and 14; then 1 and 3, and so on.
    std::int32_t* pairs;
    float *part_scales, *terms;  // by part_at: scales of groups, and what offsets of weights are multiplied by

    // A division by 16 costs nothing, one by what is only known at run time as much as sixteen products.
    std::int64_t tile_of(std::int64_t row) const { return tile == 16 ? row / 16 : row / tile; }
    std::int8_t* at(std::int64_t row, std::int64_t step) const { return codes + (step * tiles * tile + row) * 64; }
    // [tiles, parts, tile]: of the rows of a tile side by side.
    std::int64_t part_at(std::int64_t row, std::int64_t index) const {
        const std::int64_t of_tile = tile_of(row);
        return (of_tile * parts + index) * tile + row - of_tile * tile;
    }
    // Of the group, in which wide columns lie side by side for the rows of a tile.
    Wide* wide_at(std::int64_t row, std::int64_t of_group) const {
        const std::int64_t of_tile = tile_of(row);
        return wide + (of_tile * scales_a_row + of_group) * tile + row - of_tile * tile;
    }
    std::int64_t step_bytes() const { return tiles * tile * 64; }
};

// One of the weights that multiply the same rows: its columns of the output begin at `offset`.
struct Factor {
    std::shared_ptr<Matrix> matrix;
    const float* bias;  // [rows of the matrix], or null
    std::int64_t offset;
};

// What rows that are not rounded to int8 are rounded to before a product in float32.
struct Rounding {
    enum Kind { none, e4m3, e5m2, mxfp4, nvfp4, outliers } kind = none;
    std::int64_t group = 0;  // columns that share a scale; 0: the whole row
    float number = 0;        // of float8 the fixed scale, 0: the row's; of nvfp4 the tensor's; of outliers the least of them
};

// Weights whose products with the same rows are made in one call, all of one form.
struct Factors {
    std::vector<Factor> factors;
    std::int64_t columns = 0;  // of the input
    std::int64_t width = 0;    // of the output: the sum of their rows
    // How rows are rounded before the product. `integer`: to int8 with one scale per row (activation_group 0) or per
    // group of columns. Otherwise not at all.
    bool integer = false;
    std::int64_t activation_group = 0;
    bool wide = false;  // whether four columns of each group have codes of 15 bits
    float fixed_scale = 0;                // of a static scheme; 0: the scale comes from the row
    const std::int64_t* order = nullptr;  // [columns]: x[order[i]] is column i, or null
    const float* divisor = nullptr;       // [columns], or null
    Rounding rounding;                    // where not `integer`

    // Two weights (a, b) of one shape and form whose outputs become act(a) * b: `width` is then the rows of one.
    std::shared_ptr<const Activation> gate;
    std::shared_ptr<Following> following = std::make_shared<Following>();

    // Throws std::invalid_argument where the weights do not share columns, groups and what else a call needs.
    void check() const;
};

// x [rows, columns] to out [rows, width], contiguous. Throws std::invalid_argument on impossible counts.
void linear(const Factors& factors, const float* x, std::int64_t rows, float* out, Level level);

// Rows from which panels are unpacked once for many rows; below, weights are unpacked in registers. MEASURED, which it is
// to begin with, is what was found best for each kind of weights; tests and benches set others.
constexpr std::int64_t MEASURED = -1;
std::int64_t many_rows(Level level);
void set_many_rows(Level level, std::int64_t rows);

}  // namespace attar
