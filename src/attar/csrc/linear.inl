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

// The four columns `index` of the eight of a run.
template <int CODE>
ATTAR_INLINE Ints unpack_four(const Matrix& m, const std::uint8_t* from, int index) {
    constexpr int BITS = bits_of(CODE), TWOS = BITS & 4 ? 4 : 0, ONES = TWOS + (BITS & 2 ? 2 : 0);
    if constexpr (BITS == 8) return load_bytes(from + 64 * index);
    Ints v = all(0);
    if constexpr ((BITS & 4) != 0) v = shift_right(load_bytes(from + 64 * (index / 2)), 4 * (index % 2)) & all(0x0f0f0f0f);
    if constexpr ((BITS & 2) != 0) {
        const Ints two = shift_right(load_bytes(from + 64 * (TWOS + index / 4)), 2 * (index % 4)) & all(0x03030303);
        v = v | shift_left(two, TWOS);
    }
    if constexpr ((BITS & 1) != 0)
        v = v | shift_left(shift_right(load_bytes(from + 64 * ONES), index) & all(0x01010101), ONES);
    return CODE == LOOKED_UP ? lookup(v, m.bytes_of_table) : v;
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

// ---- groups whose sums are joined

constexpr std::int64_t JOINED = 128;  // columns

// Parts whose sums, times the small integers of their groups, are added as integers before they become a float; 1: none.
ATTAR_INLINE std::int64_t joined_parts(const Matrix& m, const QuantizedRows& x) {
    const bool joined = m.fine_scales && m.group == x.part && m.group < JOINED && m.group * m.fine % JOINED == 0 &&
                        x.group % JOINED == 0 && m.columns % JOINED == 0 && (!x.wide || x.group == JOINED);
    return joined ? JOINED / x.part : 1;
}

// ---- wide columns

// total + the products of high codes of a group's wide columns with their weights, of which `sum` is what codes less zero
// points, times fine scales where sums are joined, give.
ATTAR_INLINE Floats wide_added(Floats total, Ints sum, const Wide& wide, Floats scale) {
    return fma(to_floats(sum) * all(wide.scale), scale, total);
}
ATTAR_INLINE Floats scales_of_wide(const Matrix& m, std::int64_t block, const Wide& wide, bool joined) {
    if (!joined) return scales_at(m, block, wide.group);
    return numbers_at(m.scales, m.scale_number, (block * m.coarse + (wide.group >> m.fine_shift)) * LANES);
}

// ---- integer products, few rows: codes are unpacked in registers

// What lies beside the codes of a block, as floats: scales of all groups (if `joined`, those alone that groups share),
// then offsets of all groups, where there are any. Returns where these begin.
static float* spread_beside(const Matrix& m, std::int64_t block, bool joined, float* out) {
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
        spread(m.scales, joined ? nullptr : m.fine_scales, number);
        float* const offsets = out;
        if (m.offsets) spread(m.offsets, m.fine_offsets, number);
        return offsets;
    };
    if (m.scale_number == Number::bfloat16) return both(Bfloat16{});
    if (m.scale_number == Number::float16) return both(Float16{});
    return both(0.0f);
}

template <int CODE, int ROWS>
static void few_rows_of(const Factor& factor, const QuantizedRows& x, std::int64_t row, std::int64_t first,
                        std::int64_t last, float* out, std::int64_t width, float* beside) {
    constexpr std::int64_t RUN_BYTES = 64 * bits_of(CODE);
    const Matrix& m = *factor.matrix;
    const bool halves = x.part < RUN, moved = m.offsets != nullptr, grouped = x.group != 0;  // halves: a run is two parts
    const std::int64_t runs = halves ? 1 : x.part / RUN, per_weight = m.group / x.part, step_bytes = x.step_bytes();
    const std::int64_t joined = joined_parts(m, x), per_scale = joined > 1 ? m.group * m.fine / x.part : per_weight;
    const std::int32_t middle = m.middle();
    const std::int8_t* base[ROWS];
    const std::int32_t* sums[ROWS];
    const float *scales[ROWS], *terms[ROWS];  // of parts
    const Wide* wide[ROWS];
    const std::int64_t per_group = x.wide ? x.group / x.part : 0;  // parts
    for (int r = 0; r < ROWS; ++r) {
        const std::int64_t at = x.part_at(row + r, 0);
        base[r] = x.at(row + r, 0), sums[r] = x.sums + (row + r) * x.parts;
        scales[r] = x.part_scales + at, terms[r] = x.terms + at;
    }
    for (std::int64_t block = first; block < last; ++block) {
        const float *scale = beside, *offset = spread_beside(m, block, joined > 1, beside);
        const std::uint8_t *codes = m.block(block), *zeros = m.zeros ? m.zeros + block * m.groups * LANES : nullptr;
        const std::int8_t* fine = joined > 1 ? m.fine_scales + block * m.groups * LANES : nullptr;
        Floats total[ROWS], shift[ROWS];
        Ints together[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            total[r] = shift[r] = all(0.0f), together[r] = all(0);
            if (x.wide) wide[r] = x.wide + (row + r) * x.scales_a_row;
        }
        std::int64_t left = per_weight, to_join = joined, left_of_scale = per_scale, left_of_group = per_group;  // parts
        const auto add = [&](std::int64_t part, Ints* of_part) __attribute__((always_inline)) {
            for (int r = 0; r < ROWS; ++r) {
                if (zeros)
                    of_part[r] = of_part[r] - load_as_ints(zeros) * all(sums[r][part]);
                else
                    of_part[r] = of_part[r] - all(middle * sums[r][part]);
                if (moved) shift[r] = fma(all(terms[r][part * x.tile]), load(offset), shift[r]);
                if (fine) together[r] = together[r] + of_part[r] * load_as_ints(fine);
            }
            if (fine) fine += LANES;
            if (--left == 0) {
                left = per_weight, offset += LANES;
                if (zeros) zeros += LANES;
            }
            if (--to_join == 0) {
                to_join = joined;
                for (int r = 0; r < ROWS; ++r) {
                    Floats value = to_floats(fine ? together[r] : of_part[r]);
                    if (grouped) value = value * all(scales[r][part * x.tile]);
                    total[r] = fma(value, load(scale), total[r]);
                    together[r] = all(0);
                }
            }
            if (--left_of_scale == 0) left_of_scale = per_scale, scale += LANES;
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
            if (per_group == 0 || (left_of_group -= 1 + halves) > 0) continue;
            left_of_group = per_group;
            for (int r = 0; r < ROWS; ++r) {
                const Wide& of_row = *wide[r]++;
                const std::uint8_t* of_run = m.block(block) + of_row.column / RUN * RUN_BYTES;
                const Ints four = unpack_four<CODE>(m, of_run, of_row.column % static_cast<int>(RUN) / 4);
                Ints sum = multiply4<CODE>(all(0), four, of_row.high);
                sum = sum - (zeros ? zeros_at(m, block, of_row.group) * all(of_row.sum) : all(middle * of_row.sum));
                if (joined > 1) sum = sum * load_as_ints(m.fine_scales + (block * m.groups + of_row.group) * LANES);
                const std::int64_t of_scale = joined > 1 ? of_row.group >> m.fine_shift : of_row.group;
                total[r] = wide_added(total[r], sum, of_row, load(beside + of_scale * LANES));
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
        if constexpr (ROWS > 2) {  // codes are unpacked once for all that is left
            if (x.rows - row == 3) few_rows_of<CODE, 3>(factor, x, row, from, to, out, width, beside), row += 3;
            if (x.rows - row == 2) few_rows_of<CODE, 2>(factor, x, row, from, to, out, width, beside), row += 2;
        }
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

// Tiles multiply signed bytes, so where they do, the zero point is subtracted while unpacking.
constexpr bool SIGNED = ATTAR_LEVEL == ATTAR_AMX;

#if ATTAR_LEVEL == ATTAR_AMX
// Signed bytes times fine scales are numbers of 16 bits: their low and their high bytes, each the codes of a product.
ATTAR_INLINE void store_products(Ints codes, Ints fine, std::uint8_t* low, std::uint8_t* high) {
    const __m512i of_code = (__m512i)codes.piece[0], of_group = (__m512i)fine.piece[0], odd_bytes = _mm512_set1_epi16(-256);
    const __m512i even = _mm512_mullo_epi16(_mm512_srai_epi16(_mm512_slli_epi16(of_code, 8), 8), of_group);
    const __m512i odd = _mm512_mullo_epi16(_mm512_srai_epi16(of_code, 8), of_group);
    constexpr int SELECT = 0xca;  // of each bit: a ? b : c
    _mm512_store_si512(low, _mm512_ternarylogic_epi32(odd_bytes, _mm512_slli_epi16(odd, 8), even, SELECT));
    _mm512_store_si512(high, _mm512_ternarylogic_epi32(odd_bytes, odd, _mm512_srli_epi16(even, 8), SELECT));
}
#else
ATTAR_INLINE void store_products(Ints, Ints, std::uint8_t*, std::uint8_t*) {}
#endif

// The fine scales of a group, each in both halves of its lane.
ATTAR_INLINE Ints fine_at(const Matrix& m, std::int64_t block, std::int64_t group) {
    const Ints fine = load_as_ints(m.fine_scales + (block * m.groups + group) * LANES);
    return (fine & all(0xffff)) | shift_left(fine, 16);
}

// Up to four blocks of one matrix, or of two that are gated: two of each then.
struct Panel {
    const Factor* factor[4];
    std::int64_t block[4];
    std::int64_t blocks;

    const Matrix& matrix(std::int64_t b) const { return *factor[b]->matrix; }
};

// Columns [from, from + columns) of the blocks of a panel, [block][columns / 4][64 bytes]. If JOIN, codes less their zero
// points times the fine scales: numbers of 16 bits, all their low bytes (unsigned) before all their high ones (signed).
template <int CODE, bool JOIN>
static void unpack_panel_of(const Panel& panel, std::int64_t from, std::int64_t columns, std::uint8_t* out) {
    constexpr std::int64_t RUN_BYTES = 64 * bits_of(CODE);
    for (std::int64_t b = 0; b < panel.blocks; ++b) {
        const Matrix& m = panel.matrix(b);
        const std::uint8_t* codes = m.block(panel.block[b]) + from / RUN * RUN_BYTES;
        for (std::int64_t k = from; k < from + columns;) {
            const std::int64_t group = k / m.group, other = m.group < RUN ? group + 1 : group;  // of either half of a run
            const Ints zero = zero_of(m, panel.block[b], group) * all(0x01010101);
            const Ints second = zero_of(m, panel.block[b], other) * all(0x01010101);
            const Ints fine = JOIN ? fine_at(m, panel.block[b], group) : zero;
            const Ints fine_second = JOIN ? fine_at(m, panel.block[b], other) : zero;
            const std::int64_t group_end = std::max(k + RUN, (group + 1) * m.group);
            for (const std::int64_t end = std::min(from + columns, group_end); k < end; k += RUN) {
                Ints v[8];
                unpack_bytes<CODE>(m, codes, v);
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i) {
                    if (SIGNED) v[i] = minus_bytes(v[i], i < 4 ? zero : second);
                    if (JOIN)
                        store_products(v[i], i < 4 ? fine : fine_second, out + 64 * i, out + 64 * i + columns * LANES);
                    else
                        store_bytes(out + 64 * i, v[i]);
                }
                codes += RUN_BYTES;
                out += RUN * LANES;
            }
        }
        if (JOIN) out += columns * LANES;
    }
}

template <bool JOIN>
static void unpack_panel_as(const Panel& panel, std::int64_t from, std::int64_t columns, std::uint8_t* out) {
    if (panel.matrix(0).looked_up) return unpack_panel_of<LOOKED_UP, JOIN>(panel, from, columns, out);
    switch (panel.matrix(0).bits) {
        case 2: return unpack_panel_of<2, JOIN>(panel, from, columns, out);
        case 3: return unpack_panel_of<3, JOIN>(panel, from, columns, out);
        case 4: return unpack_panel_of<4, JOIN>(panel, from, columns, out);
        case 5: return unpack_panel_of<5, JOIN>(panel, from, columns, out);
        case 6: return unpack_panel_of<6, JOIN>(panel, from, columns, out);
        case 7: return unpack_panel_of<7, JOIN>(panel, from, columns, out);
        default: return unpack_panel_of<8, JOIN>(panel, from, columns, out);
    }
}

static void unpack_panel(const Panel& panel, bool join, std::int64_t from, std::int64_t columns, std::uint8_t* out) {
    if constexpr (SIGNED)
        if (join) return unpack_panel_as<true>(panel, from, columns, out);
    unpack_panel_as<false>(panel, from, columns, out);
}

ATTAR_INLINE std::int64_t tile_columns(const QuantizedRows& x) { return x.part % 64 == 0 ? 64 : x.part % RUN == 0 ? RUN : HALF_RUN; }

constexpr std::int64_t MOST_SHARED = 128;  // rows whose sums a panel keeps at hand

// One part of the columns of one panel: `add_part` adds its products with rows row .. row + rows - 1 (a multiple of the
// tile to begin with) to `total` [rows, 64].
struct Part {
    const Panel& panel;
    const QuantizedRows& x;
    bool subtracted;               // zero points are off the codes
    std::int64_t joined;           // parts whose sums are added as integers
    std::int32_t* together;        // where, [rows, 64]
    bool ahead;                    // the codes that come next are still to be read from memory
    std::int64_t index;            // of the part
    std::int64_t group;            // of weights, that it lies in
    const std::uint8_t* codes[4];  // of each block of the panel

    void advance(std::int64_t parts) {
        group = (index += parts) * x.part / panel.matrix(0).group;
        for (std::int64_t b = 0; b < panel.blocks; ++b) codes[b] += parts * x.part * LANES;
    }
};

// The scales that sums of a part meet as floats.
ATTAR_INLINE Floats scales_of(const Part& p, std::int64_t block, std::int64_t group) {
    const Matrix& m = p.panel.matrix(block);
    if (p.joined == 1) return scales_at(m, p.panel.block[block], group);
    return numbers_at(m.scales, m.scale_number, (p.panel.block[block] * m.coarse + (group >> m.fine_shift)) * LANES);
}

// total [rows, 64] of a block += float(sums [rows, 16], less the zero term) * scales.
template <bool ZERO, bool GROUPED>
ATTAR_INLINE void add_sums_of(const std::int32_t* sums, std::int64_t rows, Floats scale, Ints zero,
                              const std::int32_t* row_sums, std::int64_t parts, const float* row_scales, float* total) {
    for (std::int64_t r = 0; r < rows; ++r) {
        Ints sum = load_bytes(sums + r * LANES);
        if (ZERO) sum = sum - zero * all(row_sums[r * parts]);
        Floats value = to_floats(sum);
        if (GROUPED) value = value * all(row_scales[r]);
        store(total + r * 64, fma(value, scale, load(total + r * 64)));
    }
}

// The same where sums are joined: they reach the total with the last part.
ATTAR_INLINE void join_sums(const Part& p, const std::int32_t* sums, std::int64_t rows, std::int64_t block, Floats scale,
                            Ints zero, const std::int32_t* row_sums, const float* row_scales, std::int32_t* together,
                            float* total) {
    const Matrix& m = p.panel.matrix(block);
    const Ints fine = load_as_ints(m.fine_scales + (p.panel.block[block] * m.groups + p.index) * LANES);
    const std::int64_t within = p.index & (p.joined - 1);
    const bool first = within == 0, last = within == p.joined - 1;
    for (std::int64_t r = 0; r < rows; ++r, together += 64, total += 64) {
        Ints sum = load_bytes(sums + r * LANES);
        if (!p.subtracted) sum = sum - zero * all(row_sums[r * p.x.parts]);
        sum = sum * fine;
        if (!first) sum = sum + load_bytes(together);
        if (!last) {
            store_bytes(together, sum);
            continue;
        }
        Floats value = to_floats(sum);
        if (row_scales) value = value * all(row_scales[r]);
        store(total, fma(value, scale, load(total)));
    }
}

// Rows of one tile, the first of them `at` rows behind where totals begin.
static void add_sums(const Part& p, const std::int32_t* sums, std::int64_t row, std::int64_t at, std::int64_t rows,
                     std::int64_t block, float* total) {
    const QuantizedRows& x = p.x;
    const Floats scale = scales_of(p, block, p.group);
    const Ints zero = zero_of(p.panel.matrix(block), p.panel.block[block], p.group);
    const std::int32_t* row_sums = x.sums + (row + at) * x.parts + p.index;
    const float* row_scales = x.group ? x.part_scales + x.part_at(row + at, p.index) : nullptr;
    total += at * 64 + block * LANES;
    if (p.joined > 1)
        join_sums(p, sums, rows, block, scale, zero, row_sums, row_scales, p.together + at * 64 + block * LANES, total);
    else if (p.subtracted && row_scales)
        add_sums_of<false, true>(sums, rows, scale, zero, row_sums, x.parts, row_scales, total);
    else if (p.subtracted)
        add_sums_of<false, false>(sums, rows, scale, zero, row_sums, x.parts, row_scales, total);
    else if (row_scales)
        add_sums_of<true, true>(sums, rows, scale, zero, row_sums, x.parts, row_scales, total);
    else
        add_sums_of<true, false>(sums, rows, scale, zero, row_sums, x.parts, row_scales, total);
}

#if ATTAR_LEVEL == ATTAR_AMX

#define ATTAR_TILE_MULTIPLY(sum, x, codes)            \
    do {                                              \
        if (UNSIGNED)                                 \
            ATTAR_TILE_DOT(su, sum, x, codes);        \
        else                                          \
            ATTAR_TILE_DOT(ss, sum, x, codes);        \
    } while (false)

// Tiles 0 to sums - 1 are sums, the next two rows of activations, the rest codes; `columns` of input, 16, 32 or 64, a step.
static void begin_tiles(int sums, std::int64_t rows, std::int64_t columns) {
    TileShapes shapes;
    for (int t = 0; t < sums; ++t) shapes.set(t, rows, 64);
    for (int t = sums; t < sums + 2; ++t) shapes.set(t, rows, columns);
    for (int t = sums + 2; t < 8; ++t) shapes.set(t, columns / 4, 64);
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
    for (std::int64_t b = 0; b < blocks; ++b) scale[b] = scales_of(p, b, p.group);
    std::int64_t tile_before = -1, block_before = 0, tiles_before = 0, blocks_before = 0;
    int buffer = 0;
    const auto scale_one = [&](int which, const std::int32_t(*from)[256]) __attribute__((always_inline)) {
        const int t = which / 2, b = which % 2;
        if (t >= tiles_before || b >= blocks_before) return;
        const std::int64_t at = (tile_before + t) * height, block = block_before + b;
        const std::int64_t count = std::min(height, end - at);
        if (UNSIGNED || p.joined > 1) return add_sums(p, from[which], row, at - row, count, block, total);
        const std::int32_t* sum = from[which];
        float* to = total + (at - row) * 64 + block * LANES;
        const Floats by = scale[block];
        const float* row_scales = GROUPED ? x.part_scales + x.part_at(at, p.index) : nullptr;
#pragma GCC unroll 4
        for (std::int64_t r = 0; r < count; ++r, sum += LANES, to += 64) {
            Floats value = to_floats(load_bytes(sum));
            if (GROUPED) value = value * all(row_scales[r]);
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

// Parts that are multiplied in one go, by as many codes as four tiles hold; 1 where a part takes more, or rows are few.
ATTAR_INLINE std::int64_t parts_at_once(const QuantizedRows& x, std::int64_t joined) {
    return joined > 1 ? joined : x.tile < 16 ? 1 : x.part <= 64 ? 4 : x.part == 128 ? 2 : 1;
}

// Four parts of a tile of codes each; two parts of two tiles; or parts that are joined to 128 columns: two tiles of low
// bytes and two of high ones.
enum class Stretch { four, two, joined };

// Adds a stretch of columns. Its codes, a block's at a time, are in tiles 4 to 7 while all rows pass. A tile of rows (in 2
// and 3) is multiplied (to 0 and 1) while the sums of the one before are scaled, with its totals in registers: they are
// read and written once for all parts. Sums behind the last part are made of anything and left.
template <Stretch STRETCH, bool GROUPED>
static void add_stretch(const Part& p, std::int64_t parts, std::int64_t row, std::int64_t rows, float* total) {
    constexpr int SCALES = STRETCH == Stretch::four ? 4 : STRETCH == Stretch::two ? 2 : 1;
    alignas(64) std::int32_t sums[4][256];
    const QuantizedRows& x = p.x;
    if (x.tile < 16) std::memset(sums, 0, sizeof sums);
    const std::int64_t columns = STRETCH == Stretch::four ? x.part : 64, scales = std::min<std::int64_t>(parts, SCALES);
    std::int64_t at[4];  // of each tile of codes its columns in rows; behind the last part anything
    for (int s = 0; s < 4; ++s) {
        const std::int64_t step = STRETCH == Stretch::joined ? s % 2 : s;
        const std::int64_t column = std::min(p.index * x.part + step * columns, x.parts * x.part - columns);
        at[s] = column / 64 * x.step_bytes() + column % 64;
    }
    // Lines of the next stretch's codes that are asked for with each tile of rows: blocks are so short there that the
    // processor does not see them coming.
    const std::int64_t runs = parts * x.part / RUN, tiles = (rows + 15) / 16;
    const std::int64_t lines = p.ahead ? (runs * p.panel.matrix(0).bits + tiles - 1) / tiles : 0;
    Floats scale[4][SCALES];
    for (std::int64_t b = 0; b < p.panel.blocks; ++b)
        for (std::int64_t i = 0; i < scales; ++i)
            scale[b][i] = scales_of(p, b, (p.index + i) * x.part / p.panel.matrix(b).group);

    // The tile of rows that was multiplied last: where its totals are, and what scales them.
    float* to = nullptr;
    const float* row_scales = nullptr;
    const Floats* by = nullptr;
    Floats out[16];
    const auto begin = [&]() ATTAR_LAMBDA {
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r) out[r] = load(to + r * 64);
    };
    const auto add = [&](int part, int first, int last) ATTAR_LAMBDA {
        if (part >= scales || first >= x.tile) return;
#pragma GCC unroll 16
        for (int r = first; r < last; ++r) {
            Floats value = to_floats(load_bytes(sums[part] + r * LANES));
            if (STRETCH == Stretch::joined) value = fma(to_floats(load_bytes(sums[1] + r * LANES)), all(256.0f), value);
            if (GROUPED) value = value * all(row_scales[part * 16 + r]);
            out[r] = fma(value, by[part], out[r]);
        }
    };
    const auto end = [&]() ATTAR_LAMBDA {
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r) store(to + r * 64, out[r]);
    };
    for (std::int64_t b = 0; b < p.panel.blocks; ++b) {
        ATTAR_TILE_LOAD(4, p.codes[b], 64);
        ATTAR_TILE_LOAD(5, p.codes[b] + columns * LANES, 64);
        ATTAR_TILE_LOAD(6, p.codes[b] + 2 * columns * LANES, 64);
        ATTAR_TILE_LOAD(7, p.codes[b] + 3 * columns * LANES, 64);
        const Matrix& m = p.panel.matrix(b);
        const std::uint8_t* next = m.block(p.panel.block[b]) + (p.index * x.part / RUN + runs) * m.bits * 64;
        for (std::int64_t r = 0; r < rows; r += 16) {
            const std::int8_t* from = x.at(row + r, 0);
            for (std::int64_t line = 0; line < lines; ++line, next += 64) __builtin_prefetch(next, 0, 2);
            if (to) begin();
            ATTAR_TILE_ZERO(0);
            ATTAR_TILE_LOAD(2, from + at[0], 64);
            if constexpr (STRETCH == Stretch::four) {
                ATTAR_TILE_DOT(ss, 0, 2, 4);
                if (to) {
                    ATTAR_TILE_STORE(1, sums[3]);
                    add(0, 0, 16);
                }
                ATTAR_TILE_ZERO(1);
                ATTAR_TILE_LOAD(3, from + at[1], 64);
                ATTAR_TILE_DOT(ss, 1, 3, 5);
                ATTAR_TILE_STORE(0, sums[0]);
                if (to) add(1, 0, 16);
                ATTAR_TILE_ZERO(0);
                ATTAR_TILE_LOAD(2, from + at[2], 64);
                ATTAR_TILE_DOT(ss, 0, 2, 6);
                ATTAR_TILE_STORE(1, sums[1]);
                if (to) add(2, 0, 16);
                ATTAR_TILE_ZERO(1);
                ATTAR_TILE_LOAD(3, from + at[3], 64);
                ATTAR_TILE_DOT(ss, 1, 3, 7);
                ATTAR_TILE_STORE(0, sums[2]);
                if (to) add(3, 0, 16);
            } else if constexpr (STRETCH == Stretch::two) {
                ATTAR_TILE_DOT(ss, 0, 2, 4);
                if (to) {
                    ATTAR_TILE_STORE(1, sums[1]);
                    add(0, 0, 8);
                }
                ATTAR_TILE_ZERO(1);
                ATTAR_TILE_LOAD(3, from + at[2], 64);
                ATTAR_TILE_DOT(ss, 1, 3, 6);
                if (to) add(0, 8, 16);
                ATTAR_TILE_LOAD(2, from + at[1], 64);
                ATTAR_TILE_DOT(ss, 0, 2, 5);
                if (to) add(1, 0, 8);
                ATTAR_TILE_LOAD(3, from + at[3], 64);
                ATTAR_TILE_DOT(ss, 1, 3, 7);
                ATTAR_TILE_STORE(0, sums[0]);
                if (to) add(1, 8, 16);
            } else {
                ATTAR_TILE_DOT(su, 0, 2, 4);
                if (to) {
                    ATTAR_TILE_STORE(1, sums[1]);
                    add(0, 0, 4);
                }
                ATTAR_TILE_ZERO(1);
                ATTAR_TILE_DOT(ss, 1, 2, 6);
                if (to) add(0, 4, 8);
                ATTAR_TILE_LOAD(3, from + at[1], 64);
                ATTAR_TILE_DOT(su, 0, 3, 5);
                if (to) add(0, 8, 16);
                ATTAR_TILE_DOT(ss, 1, 3, 7);
                ATTAR_TILE_STORE(0, sums[0]);
            }
            if (to) end();
            to = total + r * 64 + b * LANES, by = scale[b];
            if (GROUPED) row_scales = x.part_scales + x.part_at(row + r, p.index);
        }
    }
    ATTAR_TILE_STORE(1, sums[STRETCH == Stretch::four ? 3 : 1]);
    begin();
    for (int part = 0; part < SCALES; ++part) add(part, 0, 16);
    end();
}

template <Stretch STRETCH>
static void add_stretch_of(const Part& p, std::int64_t parts, std::int64_t row, std::int64_t rows, float* total) {
    p.x.group ? add_stretch<STRETCH, true>(p, parts, row, rows, total)
              : add_stretch<STRETCH, false>(p, parts, row, rows, total);
}

static void add_parts(const Part& p, std::int64_t parts, std::int64_t row, std::int64_t rows, float* total) {
    if (p.joined > 1) return add_stretch_of<Stretch::joined>(p, parts, row, rows, total);
    if (p.x.part == 128) return add_stretch_of<Stretch::two>(p, parts, row, rows, total);
    add_stretch_of<Stretch::four>(p, parts, row, rows, total);
}

static void add_part(const Part& p, std::int64_t row, std::int64_t rows, float* total) {
    if (!p.subtracted)
        add_part_of<true, false>(p, row, rows, total);
    else if (p.x.group)
        add_part_of<false, true>(p, row, rows, total);
    else
        add_part_of<false, false>(p, row, rows, total);
}

#else

static void begin_tiles(int, std::int64_t, std::int64_t) {}
static void end_tiles() {}

template <bool WIDE, int ROWS>
static void add_part_rows(const Part& p, std::int64_t row, std::int64_t at, float* total) {
    const QuantizedRows& x = p.x;
    const std::int64_t start = p.index * x.part, step_bytes = x.step_bytes();
    Ints acc[ROWS][4];
    const std::int8_t* base[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        base[r] = x.at(row + at + r, 0);
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
        add_sums(p, sums, row, at, ROWS, b, total);
    }
}

constexpr std::int64_t parts_at_once(const QuantizedRows&, std::int64_t) { return 1; }
static void add_parts(const Part&, std::int64_t, std::int64_t, std::int64_t, float*) {}

static void add_part(const Part& p, std::int64_t row, std::int64_t rows, float* total) {
    constexpr int ROWS = ATTAR_LEVEL >= ATTAR_AVX512 ? 4 : 1;  // as many as the registers hold
    const bool wide = p.panel.matrix(0).wide();
    std::int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS) {
        if (wide)
            add_part_rows<true, ROWS>(p, row, r, total);
        else
            add_part_rows<false, ROWS>(p, row, r, total);
    }
    for (; r < rows; ++r) {
        if (wide)
            add_part_rows<true, 1>(p, row, r, total);
        else
            add_part_rows<false, 1>(p, row, r, total);
    }
}

#endif

// total [rows, 64] += products of the wide columns of one group of activations, whose codes of `p` begin with. `products`:
// codes are products with fine scales, of which high bytes lie `high` bytes behind low ones.
static void add_wide(const Part& p, bool products, std::int64_t high, std::int64_t row, std::int64_t rows, float* total) {
    const QuantizedRows& x = p.x;
    const std::int64_t start = p.index * x.part, group = start / x.group;
    const Ints flip = all(static_cast<std::int32_t>(0x80808080u));
    for (std::int64_t b = 0; b < p.panel.blocks; ++b) {
        const Matrix& m = p.panel.matrix(b);
        const std::int64_t block = p.panel.block[b];
        for (std::int64_t r = 0; r < rows; ++r) {
            const Wide& wide = x.wide[(row + r) * x.scales_a_row + group];
            const std::uint8_t* codes = p.codes[b] + (wide.column - start) * LANES;
            Ints sum;
            if (products) {
                const Ints of_high = dot4_wide(all(-128 * wide.sum), minus_bytes(load_bytes(codes + high), flip), wide.high);
                sum = dot4_wide(shift_left(of_high, 8), load_bytes(codes), wide.high);
            } else if (p.subtracted) {
                sum = dot4_wide(all(-128 * wide.sum), minus_bytes(load_bytes(codes), flip), wide.high);
            } else {
                sum = m.wide() ? dot4_wide(all(0), load_bytes(codes), wide.high) : dot4(all(0), load_bytes(codes), wide.high);
                sum = sum - zero_of(m, block, wide.group) * all(wide.sum);
            }
            const bool joined = p.joined > 1;
            if (joined && !products) sum = sum * load_as_ints(m.fine_scales + (block * m.groups + wide.group) * LANES);
            float* to = total + r * 64 + b * LANES;
            store(to, wide_added(load(to), sum, wide, scales_of_wide(m, block, wide, joined)));
        }
    }
}

// Codes of 8 bits are read where they lie, unless tiles multiply parts so short that it pays to take zero points off
// first, and these leave them signed bytes.
static bool unpacks(const Panel& panel, const QuantizedRows& x) {
    const Matrix &a = panel.matrix(0), &b = panel.matrix(panel.blocks - 1);
    return a.bits < 8 || (parts_at_once(x, 1) > 1 && !a.zeros && !b.zeros);
}

// total [rows, 64] += of each block the sum over parts of the rows' terms times offsets.
static void add_offsets(const Panel& panel, const QuantizedRows& x, std::int64_t row, std::int64_t rows, float* total,
                        Scratch& scratch) {
    constexpr std::int64_t ROWS = ATTAR_LEVEL >= ATTAR_AVX512 ? 8 : 4;
    for (std::int64_t b = 0; b < panel.blocks; ++b) {
        const Matrix& m = panel.matrix(b);
        const std::int64_t per_weight = m.group / x.part;
        auto* beside = reinterpret_cast<float*>(scratch.at(2, 2 * m.groups * LANES * 4));
        const float* const offsets = spread_beside(m, panel.block[b], true, beside);
        for (std::int64_t r = 0; r < rows;) {
            const std::int64_t count = std::min({ROWS, rows - r, x.tile - r % x.tile});
            const float *terms = x.terms + x.part_at(row + r, 0), *offset = offsets;
            Floats shift[ROWS];
            for (std::int64_t i = 0; i < ROWS; ++i) shift[i] = all(0.0f);
            for (std::int64_t part = 0, left = per_weight; part < x.parts; ++part, terms += x.tile) {
                const Floats by = load(offset);
#pragma GCC unroll 8
                for (std::int64_t i = 0; i < ROWS; ++i) shift[i] = fma(all(terms[i]), by, shift[i]);  // of any past `count`
                if (--left == 0) left = per_weight, offset += LANES;
            }
            for (std::int64_t i = 0; i < count; ++i) {
                float* to = total + (r + i) * 64 + b * LANES;
                store(to, load(to) + shift[i]);
            }
            r += count;
        }
    }
}

// Rows row .. row + rows - 1 (row a multiple of the tile) of a panel: the first four blocks from `first` on, or, gated,
// two from there and two of the other matrix. For more rows than share it, the panel is unpacked whole, to the
// second-level cache; of those that share it the sums, and one stretch of it, stay in the first or near it. A panel that
// fills the second is read from behind it, which twice the rows make up for.
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
    const std::int64_t blocks = panel.blocks, columns = x.part * x.parts;
    const std::int64_t share = SIGNED || columns > 4096 ? MOST_SHARED : 64;
    const std::int64_t joined = joined_parts(m, x), at_once = parts_at_once(x, joined);
    const bool packed = unpacks(panel, x), by_stretch = packed && at_once > 1, whole = packed && rows > share;
    const bool products = by_stretch && joined > 1;
    const std::int64_t column_bytes = 64 * (products ? 2 : 1);  // of a panel
    // Outputs of a megabyte and more leave the caches before they are read; keeping them there costs a fifth of the time.
    const bool past_caches = x.rows * width >= (std::int64_t{1} << 18) && width % LANES == 0 &&
                             factor.offset % LANES == 0 && reinterpret_cast<std::uintptr_t>(out) % 64 == 0;
    // Columns that are unpacked at once: whole groups of activations, where these have wide columns.
    const std::int64_t unit = x.wide ? x.group : std::max(x.part * at_once, RUN);
    const std::int64_t piece = (std::max(x.part * at_once, RUN) + unit - 1) / unit * unit;
    std::uint8_t* unpacked = packed ? scratch.at(1, column_bytes * ((whole ? columns : piece) + piece)) : nullptr;
    auto* total = reinterpret_cast<float*>(scratch.at(0, share * 64 * 4));
    auto* together = reinterpret_cast<std::int32_t*>(joined > 1 && !products ? scratch.at(3, share * 64 * 4) : nullptr);
    for (std::int64_t from = 0; whole && from < columns; from += piece)
        unpack_panel(panel, products, from, std::min(piece, columns - from), unpacked + from * column_bytes);
    begin_tiles(by_stretch ? 2 : 4, x.tile, products ? 64 : tile_columns(x));
    for (std::int64_t at = row; at < row + rows; at += share) {
        const std::int64_t here = std::min(share, row + rows - at);
        std::memset(total, 0, static_cast<std::size_t>(here * 64 * 4));
        for (std::int64_t from = 0; from < columns; from += piece) {
            const std::int64_t taken = std::min(piece, columns - from);
            std::uint8_t* codes = whole ? unpacked + from * column_bytes : unpacked;
            if (packed && !whole) unpack_panel(panel, products, from, taken, codes);
            Part p{panel, x, SIGNED && packed, joined, together, !whole && from + taken < columns, from / x.part, from / m.group, {}};
            for (std::int64_t b = 0; b < blocks; ++b)
                p.codes[b] = packed ? codes + b * taken * column_bytes / 4
                                    : panel.matrix(b).block(panel.block[b]) + from * LANES;
            for (std::int64_t done = 0; done < taken; done += unit) {
                const Part begun = p;
                for (const std::int64_t end = std::min(taken, done + unit); p.index * x.part < from + end;) {
                    const std::int64_t parts = by_stretch ? std::min(at_once, (from + end) / x.part - p.index) : 1;
                    by_stretch ? add_parts(p, parts, at, here, total) : add_part(p, at, here, total);
                    p.advance(parts);
                }
                if (x.wide) add_wide(begun, products, taken * LANES, at, here, total);
            }
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

// quantize_into where steps and groups are whole: one group, to the same codes and sums. Returns false, and does nothing,
// where its scale is too large, too small or not finite.
static bool quantize_group(QuantizedRows& rows, const float* x, std::int64_t from, std::int64_t to, std::int8_t* codes,
                           std::int32_t* sums, float scale) {
    // What is divided is at most 16,256 times the scale: remainders are exact.
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
    return true;
}
#endif

// max|x| of columns from .. to - 1, as bits: as integers NaN and infinity come out on top.
static std::int32_t largest_bits(const float* x, std::int64_t from, std::int64_t to) {
    Ints most = all(0);
    for (; from + 16 <= to; from += 16) most = max(most, bits_of(load(x + from)) & all(0x7fffffff));
    std::int32_t lane[16], top = 0;
    store_bytes(lane, most);
    for (int i = 0; i < 16; ++i) top = lane[i] > top ? lane[i] : top;
    for (; from < to; ++from) {
        std::int32_t bits;
        std::memcpy(&bits, x + from, sizeof bits);
        top = (bits & 0x7fffffff) > top ? bits & 0x7fffffff : top;
    }
    return top;
}

static float number_of(std::int32_t bits) {
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

constexpr float LOW = 127.0f, HIGH = 127.0f * 128.0f;  // largest codes of columns, and of wide ones

// The first four columns of a group that hold a magnitude of bits `top`.
static std::int64_t widest(const float* x, std::int64_t from, std::int32_t top) {
    for (;; from += 4)
        for (int i = 0; i < 4; ++i) {
            std::int32_t bits;
            std::memcpy(&bits, x + from + i, sizeof bits);
            if ((bits & 0x7fffffff) == top) return from;
        }
}

// Replaces the codes of a group's wide columns by their low ones, and returns the rest. Codes are low + 128 high, low from
// -64 to 63.
static Wide widen(QuantizedRows& rows, const float* x, std::int64_t column, float scale, std::int8_t* codes,
                  std::int32_t* sums) {
    Wide out{static_cast<std::int32_t>(column), static_cast<std::int32_t>(column / rows.weight_group), 0, 0, scale * 128.0f};
    std::int8_t* low = codes + column / 64 * rows.step_bytes() + column % 64;
    std::int8_t high[4];
    for (int i = 0; i < 4; ++i) {
        const float value = std::max(-HIGH, std::min(x[column + i] / scale, HIGH));
        const auto code = static_cast<std::int32_t>((value + 12582912.0f) - 12582912.0f);
        const std::int32_t above = (code + 64) >> 7;
        high[i] = static_cast<std::int8_t>(above);
        sums[column / rows.part] += code - 128 * above - low[i];
        low[i] = static_cast<std::int8_t>(code - 128 * above);
        out.sum += above;
    }
    std::memcpy(&out.high, high, sizeof high);
    return out;
}

// Of each part of row `row`: the scale of its group, where rows are scaled by group, and what offsets of weights meet, the
// sum of its codes times that scale.
static void make_parts(const QuantizedRows& rows, std::int64_t row) {
    const std::int64_t per_group = rows.group ? rows.group / rows.part : 1;
    const float* scales = rows.scales + row * rows.scales_a_row;
    for (std::int64_t i = 0; i < rows.parts; ++i) {
        const float scale = rows.group ? scales[i / per_group] : 1.0f;
        const std::int64_t at = rows.part_at(row, i);
        rows.part_scales[at] = scale;
        rows.terms[at] = static_cast<float>(rows.sums[row * rows.parts + i]) * scale;
    }
    for (std::int64_t g = 0; rows.wide && g < rows.scales_a_row; ++g) {
        const Wide& wide = rows.wide[row * rows.scales_a_row + g];
        const std::int64_t i = wide.column / rows.part;
        rows.terms[rows.part_at(row, i)] = static_cast<float>(rows.sums[row * rows.parts + i] + 128 * wide.sum) * scales[g];
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
        const std::int32_t top = largest_bits(x, from, to);
        const float largest = number_of(top);
        const bool finite = largest <= FLT_MAX;  // else the codes are zero, and the scale makes the outputs NaN
        std::int64_t column = from;
        float scale = fixed_scale != 0.0f ? fixed_scale : largest / 127.5f;
        if (rows.wide && finite) {
            column = widest(x, from, top);
            const std::int32_t rest = std::max(largest_bits(x, from, column), largest_bits(x, column + 4, to));
            scale = std::max(number_of(rest) / LOW, largest / HIGH);
        }
        if (scale == 0.0f) scale = FLT_EPSILON;
        rows.scales[row * rows.scales_a_row + g] = finite ? scale : NAN;
        const auto widened = [&]() {
            if (!rows.wide) return;
            Wide& wide = rows.wide[row * rows.scales_a_row + g];
            if (finite)
                wide = widen(rows, x, column, scale, codes, sums);
            else
                wide = {static_cast<std::int32_t>(from), static_cast<std::int32_t>(from / rows.weight_group), 0, 0, NAN};
        };
#if ATTAR_LEVEL >= ATTAR_AVX512
        const bool whole_parts = columns % 64 == 0 && rows.part % 16 == 0 && (to - from) % 64 == 0 && (to - from) % rows.part == 0;
        if (whole_parts && fixed_scale == 0.0f && quantize_group(rows, x, from, to, codes, sums, scale)) {
            widened();
            continue;
        }
#endif
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
            std::int32_t lane[16], sum = 0;
#if ATTAR_LEVEL >= ATTAR_AVX512
            static_cast<void>(lane);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(narrow), _mm512_cvtepi32_epi8((__m512i)code.piece[0]));
            sum = _mm512_reduce_add_epi32((__m512i)code.piece[0]);
#else
            store_bytes(lane, code);
            for (int i = 0; i < 16; ++i) narrow[i] = static_cast<std::int8_t>(lane[i]), sum += lane[i];
#endif
            std::memcpy(out, narrow, static_cast<std::size_t>(full ? 16 : to - k));
            sums[k / rows.part] += sum;
        }
        widened();
    }
}
