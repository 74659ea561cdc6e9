// Kernels of progressive.cpp: what they compute is said there.

#include "tiles.inl"

ATTAR_INLINE std::int32_t four_bytes(const std::int8_t* from) {
    std::int32_t out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

// A run of 32 columns to eight vectors of four columns each.
ATTAR_INLINE void unpack_run(const std::uint8_t* from, Ints* v) {
    const Ints mask = all(0x0f0f0f0f);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
        const Ints chunk = load_bytes(from + 64 * n);
        v[2 * n] = chunk & mask;
        v[2 * n + 1] = shift_right(chunk, 4) & mask;
    }
}

// Codes times whole numbers of their lanes, byte by byte, where no product passes 255: `factor` is repeated in both halves
// of each word.
ATTAR_INLINE Ints times_bytes(Ints codes, Ints factor) {
    typedef std::uint16_t HalfPiece __attribute__((vector_size(4 * WIDTH)));
    ATTAR_EACH codes.piece[p] = (IntPiece)((HalfPiece)codes.piece[p] * (HalfPiece)factor.piece[p]);
    return codes;
}

// codes [columns] of a row to the sums of its groups; returns the sum of all.
static std::int32_t sum_groups(const std::int8_t* codes, std::int64_t groups, std::int64_t group, std::int32_t* sums) {
    std::int32_t total = 0;
    for (std::int64_t g = 0; g < groups; ++g, codes += group) {
        std::int32_t sum = 0;
        for (std::int64_t k = 0; k < group; ++k) sum += codes[k];
        sums[g] = sum, total += sum;
    }
    return total;
}

// Sums of a row and sixteen outputs to these outputs.
ATTAR_INLINE void finish(Ints sum, const ProgressiveFactor& factor, std::int64_t block, float row_scale, float* out) {
    const std::int64_t first = block * LANES, lanes = factor.matrix->rows - first;
    Floats value = to_floats(sum) * load(factor.matrix->scales + first) * all(row_scale);
    out += factor.offset + first;
    if (lanes >= LANES) {
        store(out, factor.bias ? value + load(factor.bias + first) : value);
        return;
    }
    float bias[16] = {};
    if (factor.bias) std::memcpy(bias, factor.bias + first, static_cast<std::size_t>(lanes) * 4);
    if (factor.bias) value = value + load(bias);
    std::memcpy(out, &value, static_cast<std::size_t>(lanes) * 4);
}

// ---- few rows: codes are unpacked in registers, and sums of a group multiplied instead of its codes

template <int ROWS>
static void few_rows_of(const ProgressiveFactor& factor, const Int8Rows& x, std::int64_t row, std::int64_t first,
                        std::int64_t last, float* out, std::int64_t width) {
    const ProgressiveMatrix& m = *factor.matrix;
    const std::int64_t runs = m.group / RUN;
    const std::int8_t* base[ROWS];
    const std::int32_t* sums[ROWS];
    for (int r = 0; r < ROWS; ++r) base[r] = x.at(row + r, 0), sums[r] = x.sums + (row + r) * x.groups;
    for (std::int64_t block = first; block < last; ++block) {
        const std::uint8_t* codes = m.codes + block * m.block_bytes();
        Ints total[ROWS];
        for (int r = 0; r < ROWS; ++r) total[r] = all(0);
        for (std::int64_t group = 0, run = 0; group < m.groups; ++group) {
            Ints acc[ROWS][2];
            for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = all(0);
            for (const std::int64_t end = run + runs; run < end; ++run, codes += RUN * LANES / 2) {
                Ints v[8];
                unpack_run(codes, v);
                const std::int64_t offset = run / 2 * x.step_bytes() + run % 2 * RUN;
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i)
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r)
                        acc[r][i % 2] = dot4(acc[r][i % 2], v[i], four_bytes(base[r] + offset + 4 * i));
            }
            const std::int64_t at = (block * m.groups + group) * LANES;
            const Ints by = load_as_ints(m.factors + at), less = load_as_ints(m.offsets + at);
            for (int r = 0; r < ROWS; ++r)
                total[r] = total[r] + (acc[r][0] + acc[r][1]) * by - less * all(sums[r][group]);
        }
        for (int r = 0; r < ROWS; ++r) finish(total[r], factor, block, x.scales[row + r], out + (row + r) * width);
    }
}

static void few_rows(const ProgressiveFactor& factor, const Int8Rows& x, std::int64_t first, std::int64_t last,
                     float* out, std::int64_t width) {
    constexpr int ROWS = ATTAR_LEVEL >= ATTAR_AVX512 ? 4 : ATTAR_LEVEL >= ATTAR_AVX2 ? 2 : 1;  // what registers hold
    // All rows of a stretch of blocks that fits the first-level cache, before the next stretch is read.
    const std::int64_t stretch = std::max<std::int64_t>(1, (std::int64_t{32} << 10) / factor.matrix->block_bytes());
    for (std::int64_t from = first; from < last; from += stretch) {
        const std::int64_t to = std::min(last, from + stretch);
        std::int64_t row = 0;
        for (; row + ROWS <= x.rows; row += ROWS) few_rows_of<ROWS>(factor, x, row, from, to, out, width);
        for (; row < x.rows; ++row) few_rows_of<1>(factor, x, row, from, to, out, width);
    }
}

// ---- many rows: a panel of four blocks becomes int8 once, in a buffer that stays in the second-level cache

// Blocks [first, first + count) as bytes of int8 plus 128, [block][steps * 16][64 bytes]: four products of a code and its
// factor in one multiplication of words, since none passes 255; less the offset, modulo 256. Columns past the last are
// 128, which rows that are zero there do not see.
static void unpack_panel(const ProgressiveMatrix& m, std::int64_t first, std::int64_t count, std::int64_t steps,
                         std::uint8_t* out) {
    for (std::int64_t block = first; block < first + count; ++block) {
        const std::uint8_t* codes = m.codes + block * m.block_bytes();
        for (std::int64_t group = 0; group < m.groups; ++group) {
            const std::int64_t at = (block * m.groups + group) * LANES;
            const Ints by = load_as_ints(m.factors + at) * all(0x00010001);
            const Ints less = ((load_as_ints(m.offsets + at) + all(128)) & all(0xff)) * all(0x01010101);
            for (std::int64_t k = 0; k < m.group; k += RUN, codes += RUN * LANES / 2, out += RUN * LANES) {
                Ints v[8];
                unpack_run(codes, v);
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i) store_bytes(out + 64 * i, minus_bytes(times_bytes(v[i], by), less));
            }
        }
        const std::int64_t rest = steps * STEP * LANES - m.columns * LANES;
        std::memset(out, 128, static_cast<std::size_t>(rest));
        out += rest;
    }
}

#if ATTAR_LEVEL == ATTAR_AMX

// The sums of a tile [rows, 16], of a block and rows from `row` on, to their outputs.
static void finish_tile(const std::int32_t* sums, const ProgressiveFactor& factor, std::int64_t block, const Int8Rows& x,
                        std::int64_t row, std::int64_t rows, float* out, std::int64_t width) {
    const std::int64_t first = block * LANES;
    if (factor.matrix->rows - first < LANES) {
        for (std::int64_t r = row; r < row + rows; ++r, sums += LANES)
            finish(load_bytes(sums) - all(128 * x.totals[r]), factor, block, x.scales[r], out + r * width);
        return;
    }
    const Floats by = load(factor.matrix->scales + first);
    const Floats bias = factor.bias ? load(factor.bias + first) : all(0.0f);
    float* to = out + row * width + factor.offset + first;
    for (std::int64_t r = row; r < row + rows; ++r, sums += LANES, to += width) {
        const Floats value = to_floats(load_bytes(sums) - all(128 * x.totals[r])) * by * all(x.scales[r]);
        store(to, factor.bias ? value + bias : value);
    }
}

// Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights: two tiles of rows by two blocks, through all columns.
static void multiply_panel(const ProgressiveFactor& factor, const Int8Rows& x, std::int64_t row, std::int64_t rows,
                           const std::uint8_t* panel, std::int64_t first, std::int64_t count, float* out,
                           std::int64_t width) {
    alignas(64) std::int32_t sums[4][16 * LANES];
    const std::int64_t height = x.tile, last = (row + rows + height - 1) / height, block_bytes = x.steps * STEP * LANES;
    TileShapes shapes;
    for (int t = 0; t < 6; ++t) shapes.set(t, height, 64);
    for (int t = 6; t < 8; ++t) shapes.set(t, 16, 64);
    shapes.use();
    for (std::int64_t tile = row / height; tile < last; tile += 2) {
        const bool two_tiles = tile + 1 < last;
        for (std::int64_t b = 0; b < count; b += 2) {
            const bool two_blocks = b + 1 < count;
            const std::uint8_t *left = panel + b * block_bytes, *right = left + block_bytes;
            const std::int8_t* from = x.at(tile * height, 0);
            ATTAR_TILE_ZERO(0);
            ATTAR_TILE_ZERO(1);
            ATTAR_TILE_ZERO(2);
            ATTAR_TILE_ZERO(3);
            for (std::int64_t s = 0; s < x.steps; ++s, from += x.step_bytes(), left += STEP * LANES, right += STEP * LANES) {
                ATTAR_TILE_LOAD(6, left, 64);
                ATTAR_TILE_LOAD(4, from, 64);
                ATTAR_TILE_DOT(su, 0, 4, 6);
                if (two_blocks) {
                    ATTAR_TILE_LOAD(7, right, 64);
                    ATTAR_TILE_DOT(su, 1, 4, 7);
                }
                if (two_tiles) {
                    ATTAR_TILE_LOAD(5, from + height * STEP, 64);
                    ATTAR_TILE_DOT(su, 2, 5, 6);
                    if (two_blocks) ATTAR_TILE_DOT(su, 3, 5, 7);
                }
            }
            ATTAR_TILE_STORE(0, sums[0]);
            if (two_blocks) ATTAR_TILE_STORE(1, sums[1]);
            if (two_tiles) ATTAR_TILE_STORE(2, sums[2]);
            if (two_tiles && two_blocks) ATTAR_TILE_STORE(3, sums[3]);
            for (int t = 0; t <= two_tiles; ++t)
                for (int j = 0; j <= two_blocks; ++j) {
                    const std::int64_t at = (tile + t) * height, here = std::min(height, row + rows - at);
                    finish_tile(sums[2 * t + j], factor, first + b + j, x, at, here, out, width);
                }
        }
    }
    end_tiles();
}

#else

template <int ROWS>
static void multiply_rows(const ProgressiveFactor& factor, const Int8Rows& x, std::int64_t row,
                          const std::uint8_t* panel, std::int64_t first, std::int64_t count, float* out,
                          std::int64_t width) {
    const std::int64_t block_bytes = x.steps * STEP * LANES;
    const std::uint8_t* from[4];
    for (std::int64_t b = 0; b < 4; ++b) from[b] = panel + (b < count ? b : 0) * block_bytes;
    const std::int8_t* base[ROWS];
    Ints acc[ROWS][4];
    for (int r = 0; r < ROWS; ++r) {
        base[r] = x.at(row + r, 0);
        for (int b = 0; b < 4; ++b) acc[r][b] = all(0);
    }
    for (std::int64_t k = 0; k < x.columns; k += 4) {
        const std::int64_t offset = k / STEP * x.step_bytes() + k % STEP;
        Ints v[4];
#pragma GCC unroll 4
        for (int b = 0; b < 4; ++b) v[b] = load_bytes(from[b] + k * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const std::int32_t four = four_bytes(base[r] + offset);
#pragma GCC unroll 4
            for (int b = 0; b < 4; ++b) acc[r][b] = dot4_wide(acc[r][b], v[b], four);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (std::int64_t b = 0; b < count; ++b)
            finish(acc[r][b] - all(128 * x.totals[row + r]), factor, first + b, x.scales[row + r],
                   out + (row + r) * width);
}

static void multiply_panel(const ProgressiveFactor& factor, const Int8Rows& x, std::int64_t row, std::int64_t rows,
                           const std::uint8_t* panel, std::int64_t first, std::int64_t count, float* out,
                           std::int64_t width) {
    constexpr int ROWS = ATTAR_LEVEL >= ATTAR_AVX512 ? 4 : 1;  // as many as the registers hold
    std::int64_t r = row;
    for (; r + ROWS <= row + rows; r += ROWS) multiply_rows<ROWS>(factor, x, r, panel, first, count, out, width);
    for (; r < row + rows; ++r) multiply_rows<1>(factor, x, r, panel, first, count, out, width);
}

#endif

// Rows row .. row + rows - 1, row a multiple of the tile, times the blocks [first, first + count).
static void many_rows_of(const ProgressiveFactor& factor, const Int8Rows& x, std::int64_t row, std::int64_t rows,
                         std::int64_t first, std::int64_t count, std::uint8_t* panel, float* out, std::int64_t width) {
    unpack_panel(*factor.matrix, first, count, x.steps, panel);
    multiply_panel(factor, x, row, rows, panel, first, count, out, width);
}
