// Kernels of linear.cpp. The order of float operations is the same in all of them: see "Order" there.

#include "activations.inl"
#include "tiles.inl"

// ---- unpacking: a run of 32 columns to eight vectors of four columns each

// Words whose bits `from` and up lie at `to` and up; what is not wanted of them comes along.
ATTAR_INLINE Ints shifted(Ints bytes, int from, int to) {
    return to >= from ? shift_left(bytes, to - from) : shift_right(bytes, from - to);
}

template <int BITS>
ATTAR_INLINE void unpack_run(const std::uint8_t* from, Ints* v) {
    if constexpr (BITS == 8) {
        for (int i = 0; i < 8; ++i) v[i] = load_bytes(from + 64 * i);
        return;
    }
    constexpr int TWOS = BITS & 4 ? 4 : 0, ONES = TWOS + (BITS & 2 ? 2 : 0);  // chunks, and bits, before those planes
    if constexpr ((BITS & 4) != 0) {
        const Ints mask = all(0x0f0f0f0f);
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) {
            const Ints chunk = load_bytes(from + 64 * n);
            v[2 * n] = chunk & mask;
            v[2 * n + 1] = shift_right(chunk, 4) & mask;
        }
    }
    if constexpr ((BITS & 2) != 0) {
        const Ints mask = all(0x03030303 << TWOS);
#pragma GCC unroll 2
        for (int n = 0; n < 2; ++n) {
            const Ints chunk = load_bytes(from + 64 * (TWOS + n));
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const Ints two = shifted(chunk, 2 * i, TWOS) & mask;
                v[4 * n + i] = BITS & 4 ? v[4 * n + i] | two : two;
            }
        }
    }
    if constexpr ((BITS & 1) != 0) {
        const Ints mask = all(0x01010101 << ONES);
        const Ints chunk = load_bytes(from + 64 * ONES);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) v[i] = v[i] | (shifted(chunk, i, ONES) & mask);
    }
}

// The same with codes looked up: LOOKED_UP stands for 4 bits and the matrix's table of bytes.
constexpr int LOOKED_UP = 9;
constexpr int bits_of(int code) { return code == LOOKED_UP ? 4 : code; }

template <int CODE>
ATTAR_INLINE void unpack_bytes(const Matrix& m, const std::uint8_t* from, Ints* v) {
    unpack_run<bits_of(CODE)>(from, v);
    if constexpr (CODE == LOOKED_UP) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) v[i] = lookup(v[i], m.bytes_of_table);
    }
}

ATTAR_INLINE Floats numbers_at(const std::uint8_t* from, Number number, std::int64_t at) {
    if (number == Number::bfloat16) return load_as_floats(reinterpret_cast<const Bfloat16*>(from) + at);
    if (number == Number::float16) return load_as_floats(reinterpret_cast<const Float16*>(from) + at);
    return load(reinterpret_cast<const float*>(from) + at);
}

// Scales of a group, or offsets: those that several groups share, times the group's own.
ATTAR_INLINE Floats both_at(const Matrix& m, const std::uint8_t* coarse, const std::int8_t* fine, std::int64_t block,
                            std::int64_t group) {
    if (!fine) return numbers_at(coarse, m.scale_number, (block * m.groups + group) * LANES);
    const Floats shared = numbers_at(coarse, m.scale_number, (block * m.coarse + (group >> m.fine_shift)) * LANES);
    return shared * to_floats(load_as_ints(fine + (block * m.groups + group) * LANES));
}
ATTAR_INLINE Floats scales_at(const Matrix& m, std::int64_t block, std::int64_t group) {
    return both_at(m, m.scales, m.fine_scales, block, group);
}
ATTAR_INLINE Floats offsets_at(const Matrix& m, std::int64_t block, std::int64_t group) {
    return both_at(m, m.offsets, m.fine_offsets, block, group);
}

ATTAR_INLINE Ints zeros_at(const Matrix& m, std::int64_t block, std::int64_t group) {
    return load_as_ints(m.zeros + (block * m.groups + group) * LANES);
}

ATTAR_INLINE std::int32_t four_bytes(const std::int8_t* from) {
    std::int32_t out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

template <int CODE>
ATTAR_INLINE Ints multiply4(Ints acc, Ints codes, std::int32_t x) {
    return CODE >= 8 ? dot4_wide(acc, codes, x) : dot4(acc, codes, x);
}

ATTAR_INLINE Ints zero_of(const Matrix& m, std::int64_t block, std::int64_t group) {
    return m.zeros ? zeros_at(m, block, group) : all(m.middle());
}

// What ends every path: the scale of a row, and the bias.
ATTAR_INLINE Floats finished(Floats acc, const Factor& factor, std::int64_t block, const float* row_scale) {
    if (row_scale) acc = acc * all(*row_scale);
    if (!factor.bias) return acc;
    const std::int64_t first = block * LANES, lanes = factor.matrix->rows - first;
    if (lanes >= LANES) return acc + load(factor.bias + first);
    float bias[16] = {};
    std::memcpy(bias, factor.bias + first, static_cast<std::size_t>(lanes) * 4);
    return acc + load(bias);
}

// The lanes of a block that exist, to their columns of a row of the output.
ATTAR_INLINE void put(Floats value, const Factor& factor, std::int64_t block, float* out) {
    const std::int64_t first = block * LANES, lanes = factor.matrix->rows - first;
    out += factor.offset + first;
    if (lanes >= LANES)
        store(out, value);
    else
        std::memcpy(out, &value, static_cast<std::size_t>(lanes) * 4);
}

ATTAR_INLINE void finish(Floats acc, const Factor& factor, std::int64_t block, const float* row_scale, float* out) {
    put(finished(acc, factor, block, row_scale), factor, block, out);
}

// ---- integer products, few rows: codes are unpacked in registers

// What lies beside the codes of a block, as floats: scales of all groups, then offsets where there are any.
static void spread_beside(const Matrix& m, std::int64_t block, float* out) {
    const auto spread = [&](const std::uint8_t* coarse, const std::int8_t* fine, auto number) {
        const auto* from = reinterpret_cast<const decltype(number)*>(coarse) + block * m.coarse * LANES;
        if (fine) fine += block * m.groups * LANES;
        for (std::int64_t c = 0, g = 0; c < m.coarse; ++c) {
            const Floats shared = load_as_floats(from + c * LANES);
            if (!fine) {
                store(out, shared), out += LANES;
                continue;
            }
            for (const std::int64_t end = std::min(m.groups, g + m.fine); g < end; ++g, out += LANES)
                store(out, shared * to_floats(load_as_ints(fine + g * LANES)));
        }
    };
    const auto both = [&](auto number) {
        spread(m.scales, m.fine_scales, number);
        if (m.offsets) spread(m.offsets, m.fine_offsets, number);
    };
    if (m.scale_number == Number::bfloat16) return both(Bfloat16{});
    if (m.scale_number == Number::float16) return both(Float16{});
    both(0.0f);
}

template <int CODE, int ROWS>
static void few_rows_of(const Factor& factor, const QuantizedRows& x, std::int64_t row, std::int64_t first,
                        std::int64_t last, float* out, std::int64_t width, float* beside) {
    constexpr std::int64_t RUN_BYTES = 64 * bits_of(CODE);
    const Matrix& m = *factor.matrix;
    const bool halves = x.part < RUN, moved = m.offsets != nullptr, grouped = x.group != 0;  // halves: a run is two parts
    const std::int64_t runs = halves ? 1 : x.part / RUN, per_weight = m.group / x.part, step_bytes = x.step_bytes();
    const std::int32_t middle = m.middle();
    const std::int8_t* base[ROWS];
    const std::int32_t* sums[ROWS];
    const float *scales[ROWS], *terms[ROWS];  // of parts
    for (int r = 0; r < ROWS; ++r) {
        const std::int64_t at = (row + r) * x.parts;
        base[r] = x.at(row + r, 0), sums[r] = x.sums + at, scales[r] = x.part_scales + at, terms[r] = x.terms + at;
    }
    for (std::int64_t block = first; block < last; ++block) {
        spread_beside(m, block, beside);
        const float *scale = beside, *offset = beside + m.groups * LANES;
        const std::uint8_t *codes = m.block(block), *zeros = m.zeros ? m.zeros + block * m.groups * LANES : nullptr;
        Floats total[ROWS], shift[ROWS];
        for (int r = 0; r < ROWS; ++r) total[r] = shift[r] = all(0.0f);
        std::int64_t left = per_weight;  // parts of the weight's group
        const auto add = [&](std::int64_t part, Ints* of_part) __attribute__((always_inline)) {
            for (int r = 0; r < ROWS; ++r) {
                if (zeros)
                    of_part[r] = of_part[r] - load_as_ints(zeros) * all(sums[r][part]);
                else
                    of_part[r] = of_part[r] - all(middle * sums[r][part]);
                Floats value = to_floats(of_part[r]);
                if (grouped) value = value * all(scales[r][part]);
                total[r] = fma(value, load(scale), total[r]);
                if (moved) shift[r] = fma(all(terms[r][part]), load(offset), shift[r]);
            }
            if (--left) return;
            left = per_weight, scale += LANES, offset += LANES;
            if (zeros) zeros += LANES;
        };
        std::int64_t run = 0, at = 0;
        for (std::int64_t part = 0; part < x.parts; part += 1 + halves) {
            Ints acc[2][ROWS];  // of either half of a run
            for (int r = 0; r < ROWS; ++r) acc[0][r] = acc[1][r] = all(0);
            for (const std::int64_t end = run + runs; run < end; at += run++ % 2 ? step_bytes - RUN : RUN, codes += RUN_BYTES) {
                Ints v[8];
                unpack_bytes<CODE>(m, codes, v);
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i)
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r)
                        acc[i / 4][r] = multiply4<CODE>(acc[i / 4][r], v[i], four_bytes(base[r] + at + 4 * i));
            }
            if (halves) {
                add(part, acc[0]);
                add(part + 1, acc[1]);
            } else {
                for (int r = 0; r < ROWS; ++r) acc[0][r] = acc[0][r] + acc[1][r];
                add(part, acc[0]);
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            if (moved) total[r] = total[r] + shift[r];
            finish(total[r], factor, block, grouped ? nullptr : x.scales + row + r, out + (row + r) * width);
        }
    }
}

template <int CODE>
static void few_rows(const Factor& factor, const QuantizedRows& x, std::int64_t first, std::int64_t last, float* out,
                     std::int64_t width, float* beside) {
    constexpr int ROWS = ATTAR_LEVEL >= ATTAR_AVX512 ? 4 : ATTAR_LEVEL >= ATTAR_AVX2 ? 2 : 1;  // what registers hold
    // All rows of a stretch of blocks that fits the first-level cache, before the next stretch is read.
    const std::int64_t stretch = std::max<std::int64_t>(1, (std::int64_t{32} << 10) / factor.matrix->block_bytes);
    for (std::int64_t from = first; from < last; from += stretch) {
        const std::int64_t to = std::min(last, from + stretch);
        std::int64_t row = 0;
        for (; row + ROWS <= x.rows; row += ROWS) few_rows_of<CODE, ROWS>(factor, x, row, from, to, out, width, beside);
        for (; row < x.rows; ++row) few_rows_of<CODE, 1>(factor, x, row, from, to, out, width, beside);
    }
}

static void integer_few(const Factor& factor, const QuantizedRows& x, std::int64_t first, std::int64_t last, float* out,
                        std::int64_t width, Scratch& scratch) {
    const Matrix& m = *factor.matrix;
    auto* beside = reinterpret_cast<float*>(scratch.at(0, m.groups * LANES * 4 * (m.offsets ? 2 : 1)));
    if (m.looked_up) return few_rows<LOOKED_UP>(factor, x, first, last, out, width, beside);
    switch (m.bits) {
        case 2: return few_rows<2>(factor, x, first, last, out, width, beside);
        case 3: return few_rows<3>(factor, x, first, last, out, width, beside);
        case 4: return few_rows<4>(factor, x, first, last, out, width, beside);
        case 5: return few_rows<5>(factor, x, first, last, out, width, beside);
        case 6: return few_rows<6>(factor, x, first, last, out, width, beside);
        case 7: return few_rows<7>(factor, x, first, last, out, width, beside);
        default: return few_rows<8>(factor, x, first, last, out, width, beside);
    }
}

// ---- integer products, many rows: a panel of four blocks is unpacked once, to a buffer that stays in cache

// Tiles multiply signed bytes, so where they do, the zero point is subtracted while unpacking. Codes of 8 bits are not
// unpacked: they are read where they lie, and the zero point comes off the sum.
constexpr bool SIGNED = ATTAR_LEVEL == ATTAR_AMX;

// Up to four blocks of one matrix, or of two that are gated: two of each then.
struct Panel {
    const Factor* factor[4];
    std::int64_t block[4];
    std::int64_t blocks;

    const Matrix& matrix(std::int64_t b) const { return *factor[b]->matrix; }
};

// Columns [from, from + columns) of the blocks of a panel, [block][columns / 4][64 bytes].
template <int CODE>
static void unpack_panel_of(const Panel& panel, std::int64_t from, std::int64_t columns, std::uint8_t* out) {
    constexpr std::int64_t RUN_BYTES = 64 * bits_of(CODE);
    for (std::int64_t b = 0; b < panel.blocks; ++b) {
        const Matrix& m = panel.matrix(b);
        const std::uint8_t* codes = m.block(panel.block[b]) + from / RUN * RUN_BYTES;
        for (std::int64_t k = from; k < from + columns;) {
            const Ints zero = zero_of(m, panel.block[b], k / m.group) * all(0x01010101);
            const Ints second = m.group < RUN ? zero_of(m, panel.block[b], k / m.group + 1) * all(0x01010101) : zero;
            const std::int64_t group_end = std::max(k + RUN, (k / m.group + 1) * m.group);
            for (const std::int64_t end = std::min(from + columns, group_end); k < end; k += RUN) {
                Ints v[8];
                unpack_bytes<CODE>(m, codes, v);
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i)
                    store_bytes(out + 64 * i, SIGNED ? minus_bytes(v[i], i < 4 ? zero : second) : v[i]);
                codes += RUN_BYTES;
                out += RUN * LANES;
            }
        }
    }
}

static void unpack_panel(const Panel& panel, std::int64_t from, std::int64_t columns, std::uint8_t* out) {
    if (panel.matrix(0).looked_up) return unpack_panel_of<LOOKED_UP>(panel, from, columns, out);
    switch (panel.matrix(0).bits) {
        case 2: return unpack_panel_of<2>(panel, from, columns, out);
        case 3: return unpack_panel_of<3>(panel, from, columns, out);
        case 4: return unpack_panel_of<4>(panel, from, columns, out);
        case 5: return unpack_panel_of<5>(panel, from, columns, out);
        case 6: return unpack_panel_of<6>(panel, from, columns, out);
        default: return unpack_panel_of<7>(panel, from, columns, out);
    }
}

ATTAR_INLINE std::int64_t tile_columns(const QuantizedRows& x) { return x.part % 64 == 0 ? 64 : x.part % RUN == 0 ? RUN : HALF_RUN; }

constexpr std::int64_t MOST_SHARED = 128;  // rows whose sums a panel keeps at hand

// One part of the columns of one panel: `add_part` adds its products with rows row .. row + rows - 1 (a multiple of the
// tile to begin with) to `total` [rows, 64].
struct Part {
    const Panel& panel;
    const QuantizedRows& x;
    std::int64_t index;            // of the part
    std::int64_t group;            // of weights, that it lies in
    const std::uint8_t* codes[4];  // of each block of the panel
};

// total [rows, 64] of a block += float(sums [rows, 16], less the zero term) * scales.
template <bool ZERO, bool GROUPED>
ATTAR_INLINE void add_sums_of(const std::int32_t* sums, std::int64_t rows, Floats scale, Ints zero,
                              const std::int32_t* row_sums, std::int64_t parts, const float* row_scales,
                              std::int64_t row_scales_apart, float* total) {
    for (std::int64_t r = 0; r < rows; ++r) {
        Ints sum = load_bytes(sums + r * LANES);
        if (ZERO) sum = sum - zero * all(row_sums[r * parts]);
        Floats value = to_floats(sum);
        if (GROUPED) value = value * all(row_scales[r * row_scales_apart]);
        store(total + r * 64, fma(value, scale, load(total + r * 64)));
    }
}

static void add_sums(const Part& p, const std::int32_t* sums, std::int64_t row, std::int64_t rows, std::int64_t block,
                     float* total) {
    const QuantizedRows& x = p.x;
    const Floats scale = scales_at(p.panel.matrix(block), p.panel.block[block], p.group);
    const Ints zero = zero_of(p.panel.matrix(block), p.panel.block[block], p.group);
    const std::int32_t* row_sums = x.sums + row * x.parts + p.index;
    const float* row_scales = x.group ? x.scales + row * x.scales_a_row + p.index * x.part / x.group : nullptr;
    total += block * LANES;
    const std::int64_t parts = x.parts, apart = x.scales_a_row;
    const bool subtracted = SIGNED && p.panel.matrix(0).bits < 8;
    if (subtracted && !row_scales && rows == 16)
        add_sums_of<false, false>(sums, 16, scale, zero, row_sums, parts, row_scales, apart, total);
    else if (subtracted && !row_scales)
        add_sums_of<false, false>(sums, rows, scale, zero, row_sums, parts, row_scales, apart, total);
    else if (subtracted)
        add_sums_of<false, true>(sums, rows, scale, zero, row_sums, parts, row_scales, apart, total);
    else if (!row_scales)
        add_sums_of<true, false>(sums, rows, scale, zero, row_sums, parts, row_scales, apart, total);
    else
        add_sums_of<true, true>(sums, rows, scale, zero, row_sums, parts, row_scales, apart, total);
}

#if ATTAR_LEVEL == ATTAR_AMX

#define ATTAR_TILE_MULTIPLY(sum, x, codes)            \
    do {                                              \
        if (UNSIGNED)                                 \
            ATTAR_TILE_DOT(su, sum, x, codes);        \
        else                                          \
            ATTAR_TILE_DOT(ss, sum, x, codes);        \
    } while (false)

// Tiles 0 to 3 are sums, 4 and 5 rows of activations, 6 and 7 codes; `columns` of input, 16, 32 or 64, a step.
static void begin_tiles(std::int64_t rows, std::int64_t columns) {
    TileShapes shapes;
    for (int t = 0; t < 4; ++t) shapes.set(t, rows, 64);
    for (int t = 4; t < 6; ++t) shapes.set(t, rows, columns);
    for (int t = 6; t < 8; ++t) shapes.set(t, columns / 4, 64);
    shapes.use();
}

// Two tiles of rows by two blocks at a time. The sums of one such quadruple are scaled while the tiles of the next are
// being multiplied, a tile of sums after each of its first products: the two have execution units of their own.
// UNSIGNED: codes of 8 bits, whose zero points come off the sums. GROUPED: a row has a scale for every part of columns.
template <bool UNSIGNED, bool GROUPED>
static void add_part_of(const Part& p, std::int64_t row, std::int64_t rows, float* total) {
    alignas(64) std::int32_t sums[2][4][256];
    const QuantizedRows& x = p.x;
    const std::int64_t columns = tile_columns(x), steps = x.part / columns, height = x.tile;
    const std::int64_t tile_bytes = height * 64, step_bytes = x.step_bytes(), start = p.index * x.part;
    const std::int64_t last = (row + rows + height - 1) / height, end = row + rows, blocks = p.panel.blocks;
    Floats scale[4];
    for (std::int64_t b = 0; b < blocks; ++b) scale[b] = scales_at(p.panel.matrix(b), p.panel.block[b], p.group);
    const float* row_scales = GROUPED ? x.scales + p.index * x.part / x.group : nullptr;
    std::int64_t tile_before = -1, block_before = 0, tiles_before = 0, blocks_before = 0;
    int buffer = 0;
    const auto scale_one = [&](int which, const std::int32_t(*from)[256]) __attribute__((always_inline)) {
        const int t = which / 2, b = which % 2;
        if (t >= tiles_before || b >= blocks_before) return;
        const std::int64_t at = (tile_before + t) * height, block = block_before + b;
        const std::int64_t count = std::min(height, end - at);
        if (UNSIGNED) {
            add_sums(p, from[which], at, count, block, total + (at - row) * 64);
            return;
        }
        const std::int32_t* sum = from[which];
        float* to = total + (at - row) * 64 + block * LANES;
        const Floats by = scale[block];
        const float* of_row = GROUPED ? row_scales + at * x.scales_a_row : nullptr;
#pragma GCC unroll 4
        for (std::int64_t r = 0; r < count; ++r, sum += LANES, to += 64) {
            Floats value = to_floats(load_bytes(sum));
            if (GROUPED) value = value * all(of_row[r * x.scales_a_row]);
            store(to, fma(value, by, load(to)));
        }
    };
    for (std::int64_t tile = row / height; tile < last; tile += 2) {
        const bool two_tiles = tile + 1 < last;
        for (std::int64_t b = 0; b < blocks; b += 2) {
            const bool two_blocks = b + 1 < blocks;
            const auto* before = sums[1 - buffer];
            ATTAR_TILE_ZERO(0);
            ATTAR_TILE_ZERO(1);
            ATTAR_TILE_ZERO(2);
            ATTAR_TILE_ZERO(3);
            std::int64_t column = start;
            for (std::int64_t s = 0; s < steps; ++s, column += columns) {
                const std::int8_t* from = x.codes + column / 64 * step_bytes + tile * tile_bytes + column % 64;
                ATTAR_TILE_LOAD(6, p.codes[b] + s * columns * LANES, 64);
                ATTAR_TILE_LOAD(4, from, 64);
                ATTAR_TILE_MULTIPLY(0, 4, 6);
                if (s < 2) scale_one(static_cast<int>(2 * s), before);
                if (two_blocks) {
                    ATTAR_TILE_LOAD(7, p.codes[b + 1] + s * columns * LANES, 64);
                    ATTAR_TILE_MULTIPLY(1, 4, 7);
                }
                if (two_tiles) {
                    ATTAR_TILE_LOAD(5, from + tile_bytes, 64);
                    ATTAR_TILE_MULTIPLY(2, 5, 6);
                }
                if (s < 2) scale_one(static_cast<int>(2 * s + 1), before);
                if (two_tiles && two_blocks) ATTAR_TILE_MULTIPLY(3, 5, 7);
            }
            for (int which = steps < 2 ? 2 : 4; which < 4; ++which) scale_one(which, before);
            ATTAR_TILE_STORE(0, sums[buffer][0]);
            if (two_blocks) ATTAR_TILE_STORE(1, sums[buffer][1]);
            if (two_tiles) ATTAR_TILE_STORE(2, sums[buffer][2]);
            if (two_tiles && two_blocks) ATTAR_TILE_STORE(3, sums[buffer][3]);
            tile_before = tile, block_before = b, tiles_before = 1 + two_tiles, blocks_before = 1 + two_blocks;
            buffer = 1 - buffer;
        }
    }
    for (int which = 0; which < 4; ++which) scale_one(which, sums[1 - buffer]);
}

// The sums of a tile, [16, 16], to 16 rows of 64 totals.
template <bool GROUPED>
static inline __attribute__((always_inline)) void scale_tile(const std::int32_t* sums, const float* row_scales, Floats by,
                                                             float* total) {
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
        Floats value = to_floats(load_bytes(sums + r * LANES));
        if (GROUPED) value = value * all(row_scales[r]);
        store(total + r * 64, fma(value, by, load(total + r * 64)));
    }
}

// add_part_of with nothing left to decide inside, for whole pairs of tiles, four blocks, signed codes and parts of 128
// columns, which is what nearly all of a prompt meets: a fifth faster.
template <bool GROUPED>
static void add_whole_part(const Part& p, std::int64_t row, std::int64_t rows, float* total) {
    alignas(64) std::int32_t sums[2][4][256];
    float row_scales[MOST_SHARED];
    const QuantizedRows& x = p.x;
    const std::int64_t step_bytes = x.step_bytes();
    if (GROUPED) {
        const float* from = x.scales + row * x.scales_a_row + p.index * x.part / x.group;
        for (std::int64_t r = 0; r < rows; ++r) row_scales[r] = from[r * x.scales_a_row];
    }
    Floats scale[4];
    for (int b = 0; b < 4; ++b) scale[b] = scales_at(p.panel.matrix(b), p.panel.block[b], p.group);
    const std::int8_t* first = x.at(row, 2 * p.index);
    // The four tiles of sums that were multiplied last, and where they go.
    const std::int32_t* before = nullptr;
    const float* of_rows = row_scales;
    float* to = total;
    Floats left = scale[0], right = scale[1];
    const auto scale_one = [&](int which) __attribute__((always_inline)) {
        const int t = which / 2, b = which % 2;
        if (before) scale_tile<GROUPED>(before + which * 256, of_rows + t * 16, b ? right : left, to + t * 16 * 64 + b * LANES);
    };
    int buffer = 0;
    for (std::int64_t r = 0; r < rows; r += 32) {
        const std::int8_t* from = first + r * 64;
        for (int b = 0; b < 4; b += 2) {
            const std::uint8_t *low = p.codes[b], *high = p.codes[b + 1];
            std::int32_t* here = sums[buffer][0];
            ATTAR_TILE_ZERO(0);
            ATTAR_TILE_ZERO(1);
            ATTAR_TILE_ZERO(2);
            ATTAR_TILE_ZERO(3);
            ATTAR_TILE_LOAD(6, low, 64);
            ATTAR_TILE_LOAD(4, from, 64);
            ATTAR_TILE_DOT(ss, 0, 4, 6);
            scale_one(0);
            ATTAR_TILE_LOAD(7, high, 64);
            ATTAR_TILE_DOT(ss, 1, 4, 7);
            ATTAR_TILE_LOAD(5, from + 1024, 64);
            ATTAR_TILE_DOT(ss, 2, 5, 6);
            scale_one(1);
            ATTAR_TILE_DOT(ss, 3, 5, 7);
            ATTAR_TILE_LOAD(6, low + 1024, 64);
            ATTAR_TILE_LOAD(4, from + step_bytes, 64);
            ATTAR_TILE_DOT(ss, 0, 4, 6);
            scale_one(2);
            ATTAR_TILE_LOAD(7, high + 1024, 64);
            ATTAR_TILE_DOT(ss, 1, 4, 7);
            ATTAR_TILE_LOAD(5, from + step_bytes + 1024, 64);
            ATTAR_TILE_DOT(ss, 2, 5, 6);
            scale_one(3);
            ATTAR_TILE_DOT(ss, 3, 5, 7);
            ATTAR_TILE_STORE(0, here);
            ATTAR_TILE_STORE(1, here + 256);
            ATTAR_TILE_STORE(2, here + 512);
            ATTAR_TILE_STORE(3, here + 768);
            before = here, of_rows = row_scales + r, to = total + r * 64 + b * LANES;
            left = scale[b], right = scale[b + 1];
            buffer = 1 - buffer;
        }
    }
    for (int which = 0; which < 4; ++which) scale_one(which);
}

static void add_part(const Part& p, std::int64_t row, std::int64_t rows, float* total) {
    const QuantizedRows& x = p.x;
    if (p.panel.matrix(0).bits < 8 && x.part == 128 && p.panel.blocks == 4 && x.tile == 16 && rows >= 32) {
        const std::int64_t whole = rows / 32 * 32;
        if (x.group)
            add_whole_part<true>(p, row, whole, total);
        else
            add_whole_part<false>(p, row, whole, total);
        row += whole, rows -= whole, total += whole * 64;
        if (!rows) return;
    }
    if (p.panel.matrix(0).bits == 8)
        add_part_of<true, false>(p, row, rows, total);
    else if (p.x.group)
        add_part_of<false, true>(p, row, rows, total);
    else
        add_part_of<false, false>(p, row, rows, total);
}

#else

static void begin_tiles(std::int64_t, std::int64_t) {}
static void end_tiles() {}

template <bool WIDE, int ROWS>
static void add_part_rows(const Part& p, std::int64_t row, float* total) {
    const QuantizedRows& x = p.x;
    const std::int64_t start = p.index * x.part, step_bytes = x.step_bytes();
    Ints acc[ROWS][4];
    const std::int8_t* base[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        base[r] = x.at(row + r, 0);
        for (int b = 0; b < 4; ++b) acc[r][b] = all(0);
    }
    const std::uint8_t* codes[4];
    for (int b = 0; b < 4; ++b) codes[b] = p.codes[b < p.panel.blocks ? b : 0];
    for (std::int64_t k = 0; k < x.part; k += 4) {
        const std::int64_t column = start + k, offset = column / 64 * step_bytes + column % 64;
        Ints v[4];
#pragma GCC unroll 4
        for (int b = 0; b < 4; ++b) v[b] = load_bytes(codes[b] + k * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const std::int32_t four = four_bytes(base[r] + offset);
#pragma GCC unroll 4
            for (int b = 0; b < 4; ++b) acc[r][b] = WIDE ? dot4_wide(acc[r][b], v[b], four) : dot4(acc[r][b], v[b], four);
        }
    }
    std::int32_t sums[ROWS * LANES];
    for (std::int64_t b = 0; b < p.panel.blocks; ++b) {
        for (int r = 0; r < ROWS; ++r) store_bytes(sums + r * LANES, acc[r][b]);
        add_sums(p, sums, row, ROWS, b, total);
    }
}

static void add_part(const Part& p, std::int64_t row, std::int64_t rows, float* total) {
    constexpr int ROWS = ATTAR_LEVEL >= ATTAR_AVX512 ? 4 : 1;  // as many as the registers hold
    const bool wide = p.panel.matrix(0).wide();
    std::int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS) {
        if (wide)
            add_part_rows<true, ROWS>(p, row + r, total + r * 64);
        else
            add_part_rows<false, ROWS>(p, row + r, total + r * 64);
    }
    for (; r < rows; ++r) {
        if (wide)
            add_part_rows<true, 1>(p, row + r, total + r * 64);
        else
            add_part_rows<false, 1>(p, row + r, total + r * 64);
    }
}

#endif

// total [rows, 64] += of each block the sum over parts of the rows' terms times offsets.
static void add_offsets(const Panel& panel, const QuantizedRows& x, std::int64_t row, std::int64_t rows, float* total,
                        Scratch& scratch) {
    constexpr std::int64_t ROWS = ATTAR_LEVEL >= ATTAR_AVX512 ? 8 : 4;
    for (std::int64_t b = 0; b < panel.blocks; ++b) {
        const Matrix& m = panel.matrix(b);
        const std::int64_t per_weight = m.group / x.part;
        auto* beside = reinterpret_cast<float*>(scratch.at(2, 2 * m.groups * LANES * 4));
        spread_beside(m, panel.block[b], beside);
        for (std::int64_t r = 0; r < rows; r += ROWS) {
            const std::int64_t count = std::min(ROWS, rows - r);
            const float *terms[ROWS], *offset = beside + m.groups * LANES;
            Floats shift[ROWS];
            for (std::int64_t i = 0; i < ROWS; ++i) {
                terms[i] = x.terms + (row + r + std::min(i, count - 1)) * x.parts;
                shift[i] = all(0.0f);
            }
            for (std::int64_t part = 0, left = per_weight; part < x.parts; ++part) {
                const Floats by = load(offset);
#pragma GCC unroll 8
                for (std::int64_t i = 0; i < ROWS; ++i) shift[i] = fma(all(terms[i][part]), by, shift[i]);
                if (--left == 0) left = per_weight, offset += LANES;
            }
            for (std::int64_t i = 0; i < count; ++i) {
                float* to = total + (r + i) * 64 + b * LANES;
                store(to, load(to) + shift[i]);
            }
        }
    }
}

// Rows row .. row + rows - 1 (row a multiple of the tile) of a panel: the first four blocks from `first` on, or, gated,
// two from there and two of the other matrix. For more rows than share it, the panel is unpacked whole, to the
// second-level cache; sums of those that share it and one part of it stay in the first. A panel that fills the second is
// read from behind it, which twice the rows make up for.
static void integer_many(const Factors& factors, const Factor& factor, const QuantizedRows& x, std::int64_t row,
                         std::int64_t rows, std::int64_t first, float* out, Scratch& scratch) {
    const Matrix& m = *factor.matrix;
    const bool gated = factors.gate != nullptr;
    const std::int64_t count = std::min<std::int64_t>(gated ? 2 : 4, m.blocks() - first), width = factors.width;
    Panel panel{};
    for (int source = 0; source <= gated; ++source)
        for (std::int64_t b = 0; b < count; ++b, ++panel.blocks) {
            panel.factor[panel.blocks] = source ? &factors.factors.back() : &factor;
            panel.block[panel.blocks] = first + b;
        }
    const std::int64_t blocks = panel.blocks, columns = x.part * x.parts, share = columns > 4096 ? MOST_SHARED : 64;
    const bool packed = m.bits < 8, whole = packed && rows > share;
    // Outputs of a megabyte and more leave the caches before they are read; keeping them there costs a fifth of the time.
    const bool past_caches = x.rows * width >= (std::int64_t{1} << 18) && width % LANES == 0 &&
                             factor.offset % LANES == 0 && reinterpret_cast<std::uintptr_t>(out) % 64 == 0;
    const std::int64_t piece = std::max(x.part, RUN);  // columns that are unpacked at once
    std::uint8_t* unpacked = packed ? scratch.at(1, 64 * (whole ? columns : piece)) : nullptr;
    auto* total = reinterpret_cast<float*>(scratch.at(0, share * 64 * 4));
    for (std::int64_t from = 0; whole && from < columns; from += piece)
        unpack_panel(panel, from, piece, unpacked + from * 64);
    begin_tiles(x.tile, tile_columns(x));
    for (std::int64_t at = row; at < row + rows; at += share) {
        const std::int64_t here = std::min(share, row + rows - at);
        std::memset(total, 0, static_cast<std::size_t>(here * 64 * 4));
        for (std::int64_t part = 0; part < x.parts; ++part) {
            const std::int64_t from = part * x.part;
            Part p{panel, x, part, from / m.group, {}};
            const std::int64_t within = from % piece, start = from - within;
            if (packed && !whole && within == 0) unpack_panel(panel, from, piece, unpacked);
            for (std::int64_t b = 0; b < blocks; ++b)
                p.codes[b] = packed ? unpacked + (whole ? start * 64 : 0) + (b * piece + within) * LANES
                                    : panel.matrix(b).block(panel.block[b]) + from * LANES;
            add_part(p, at, here, total);
        }
        if (m.offsets) add_offsets(panel, x, at, here, total, scratch);
        for (std::int64_t r = 0; r < here; ++r) {
            const float* scale = x.group ? nullptr : x.scales + at + r;
            const auto value = [&](std::int64_t b) __attribute__((always_inline)) {
                return finished(load(total + r * 64 + b * LANES), *panel.factor[b], panel.block[b], scale);
            };
            for (std::int64_t b = 0; b < count; ++b) {
                const Floats made = gated ? activated(*factors.gate, value(b)) * value(count + b) : value(b);
                float* to = out + (at + r) * width;
                if (past_caches && (first + b + 1) * LANES <= m.rows)
                    stream(to + factor.offset + (first + b) * LANES, made);
                else
                    put(made, factor, first + b, to);
            }
        }
    }
    end_tiles();
    settle();
}

#include "linear_float.inl"
#include "rounding.inl"

// ---- rows to int8

#if ATTAR_LEVEL >= ATTAR_AVX512

// a / b to the nearest, as the divider gives it, where `inverse` is 1 / b to the nearest and nothing overflows or
// underflows: two corrections by exact remainders (Markstein, "Computation of elementary functions on the IBM RISC
// System/6000 processor", 1990). The divider takes 16 cycles for 16 numbers, these take 3.
static inline __m512 divided(__m512 a, __m512 b, __m512 inverse) {
    __m512 q = _mm512_mul_ps(a, inverse);
    q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, b, a), inverse, q);
    return _mm512_fmadd_ps(_mm512_fnmadd_ps(q, b, a), inverse, q);
}

// quantize_into where steps and groups are whole: one group, to the same codes, sums and scale. Returns false, and
// does nothing, where the group's numbers are too large, too small or not finite.
static bool quantize_group(QuantizedRows& rows, const float* x, std::int64_t from, std::int64_t to, std::int8_t* codes,
                           std::int32_t* sums, float* scale_out) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512();
    for (std::int64_t k = from; k < to; k += 16)
        most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_loadu_si512(x + k), magnitude));
    const float scale = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(most)))) / 127.5f;
    // What is divided is at most 127.5 times the scale: remainders are exact.
    if (!(scale > 0x1p-90f && scale < 0x1p90f)) return false;
    const __m512 by = _mm512_set1_ps(scale), inverse = _mm512_set1_ps(1.0f / scale);
    const __m512 low = _mm512_set1_ps(-128.0f), high = _mm512_set1_ps(127.0f);
    const std::int64_t step_bytes = rows.step_bytes();
    std::int8_t* out = codes + from / 64 * step_bytes;
    std::int32_t* sum_out = sums + from / rows.part;
    std::int64_t left = rows.part;  // columns of the part
    __m512i sum = _mm512_setzero_si512();
    for (std::int64_t k = from; k < to; k += 64, out += step_bytes) {
#pragma GCC unroll 4
        for (int i = 0; i < 64; i += 16) {
            const __m512 value = divided(_mm512_loadu_ps(x + k + i), by, inverse);
            const __m512i code = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(value, low), high));
            sum = _mm512_add_epi32(sum, code);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtepi32_epi8(code));
            if ((left -= 16) > 0) continue;
            *sum_out++ = _mm512_reduce_add_epi32(sum);
            sum = _mm512_setzero_si512(), left = rows.part;
        }
    }
    *scale_out = scale;
    return true;
}
#endif

// Of each part of row `row`: the scale of its group, where rows are scaled by group, and what offsets of weights meet, the
// sum of its codes times that scale.
static void make_parts(const QuantizedRows& rows, std::int64_t row) {
    const std::int64_t at = row * rows.parts, per_group = rows.group ? rows.group / rows.part : 1;
    const float* scales = rows.scales + row * rows.scales_a_row;
    for (std::int64_t i = 0; i < rows.parts; ++i) {
        const float scale = rows.group ? scales[i / per_group] : 1.0f;
        rows.part_scales[at + i] = scale;
        rows.terms[at + i] = static_cast<float>(rows.sums[at + i]) * scale;
    }
}

// x [columns] to row `row` of `rows`.
static void quantize_into(QuantizedRows& rows, std::int64_t row, const float* x, float fixed_scale) {
    const std::int64_t columns = rows.columns, group = rows.group ? rows.group : columns;
    const std::int64_t step_bytes = rows.step_bytes();
    std::int8_t* codes = rows.at(row, 0);
    // Zero points are subtracted from padding too: what it multiplies must be zero.
    if (columns % 64) std::memset(rows.at(row, columns / 64) + columns % 64, 0, static_cast<std::size_t>(64 - columns % 64));
    std::int32_t* sums = rows.sums + row * rows.parts;
    for (std::int64_t i = 0; i < rows.parts; ++i) sums[i] = 0;
    for (std::int64_t from = 0, g = 0; from < columns; from += group, ++g) {
        const std::int64_t to = std::min(columns, from + group);
#if ATTAR_LEVEL >= ATTAR_AVX512
        const bool whole_parts = columns % 64 == 0 && rows.part % 16 == 0 && (to - from) % 64 == 0 && (to - from) % rows.part == 0;
        if (whole_parts && fixed_scale == 0.0f &&
            quantize_group(rows, x, from, to, codes, sums, rows.scales + row * rows.scales_a_row + g))
            continue;
#endif
        // max|x| over bits without their sign, as integers: NaN and infinity come out on top.
        Ints most = all(0);
        std::int64_t whole = from;
        for (; whole + 16 <= to; whole += 16) most = max(most, bits_of(load(x + whole)) & all(0x7fffffff));
        std::int32_t lane[16], top = 0;
        store_bytes(lane, most);
        for (int i = 0; i < 16; ++i) top = lane[i] > top ? lane[i] : top;
        for (std::int64_t k = whole; k < to; ++k) {
            std::int32_t bits;
            std::memcpy(&bits, x + k, sizeof bits);
            top = (bits & 0x7fffffff) > top ? bits & 0x7fffffff : top;
        }
        float largest;
        std::memcpy(&largest, &top, sizeof largest);
        const bool finite = largest <= FLT_MAX;  // else the codes are zero, and the scale makes the outputs NaN
        float scale = fixed_scale != 0.0f ? fixed_scale : largest / 127.5f;
        if (scale == 0.0f) scale = FLT_EPSILON;
        rows.scales[row * rows.scales_a_row + g] = finite ? scale : NAN;
        const Floats divisor = all(scale), rounder = all(12582912.0f), low = all(-128.0f), high = all(-127.0f);
        for (std::int64_t k = from; k < to; k += 16) {
            float tail[16] = {};
            const bool full = k + 16 <= to;
            if (!full) std::memcpy(tail, x + k, static_cast<std::size_t>(to - k) * 4);
            Floats value = (full ? load(x + k) : load(tail)) / divisor;
            value = all(0.0f) - max(all(0.0f) - max(value, low), high);
            const Ints code = finite ? bits_of(value + rounder) - bits_of(rounder) : all(0);
            std::int8_t* out = codes + k / 64 * step_bytes + k % 64;
            std::int8_t narrow[16];
            std::int32_t sum = 0;
#if ATTAR_LEVEL >= ATTAR_AVX512
            _mm_storeu_si128(reinterpret_cast<__m128i*>(narrow), _mm512_cvtepi32_epi8((__m512i)code.piece[0]));
            sum = _mm512_reduce_add_epi32((__m512i)code.piece[0]);
#else
            store_bytes(lane, code);
            for (int i = 0; i < 16; ++i) narrow[i] = static_cast<std::int8_t>(lane[i]), sum += lane[i];
#endif
            std::memcpy(out, narrow, static_cast<std::size_t>(full ? 16 : to - k));
            sums[k / rows.part] += sum;
        }
    }
}
