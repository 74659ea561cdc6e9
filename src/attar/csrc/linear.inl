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

// acc + the products of codes of eight columns with bytes x and y. `by` (AVX2) multiplies them, in either half of a lane.
template <int BITS>
ATTAR_INLINE Ints dot8(Ints acc, Ints a, Ints b, std::int32_t x, std::int32_t y, Ints by) {
#if ATTAR_LEVEL == ATTAR_AVX2
    static_assert(BITS <= 7, "products of 8 bits do not fit");
    ATTAR_EACH {
        __m256i one = _mm256_maddubs_epi16((__m256i)a.piece[p], _mm256_set1_epi32(x));
        const __m256i other = _mm256_maddubs_epi16((__m256i)b.piece[p], _mm256_set1_epi32(y));
        if constexpr (BITS <= 6) {  // four products: at most 4 * 63 * 128
            one = _mm256_add_epi16(one, other);
        } else {
            acc.piece[p] += (IntPiece)_mm256_madd_epi16(other, (__m256i)by.piece[p]);
        }
        acc.piece[p] += (IntPiece)_mm256_madd_epi16(one, (__m256i)by.piece[p]);
    }
    return acc;
#else
    static_cast<void>(by);
    return BITS < 8 ? dot4(dot4(acc, a, x), b, y) : dot4_wide(dot4_wide(acc, a, x), b, y);
#endif
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
                        x.group % JOINED == 0 && m.columns % JOINED == 0 && !(x.wide && x.group > JOINED);
    return joined ? JOINED / x.part : 1;
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

// Codes are asked for so many bytes before they are read: the processor's own prefetching ends with each page of memory.
constexpr std::int64_t AHEAD = 2048;

template <int CODE, int ROWS>
static void few_rows_of(const Factor& factor, const QuantizedRows& x, std::int64_t row, std::int64_t first,
                        std::int64_t last, float* out, std::int64_t width, float* beside) {
    constexpr std::int64_t RUN_BYTES = 64 * bits_of(CODE);
    const Matrix& m = *factor.matrix;
    const bool moved = m.offsets != nullptr, grouped = x.group != 0;
    const int in_run = x.part < RUN ? 2 : 1;  // parts that share a run
    const std::int64_t runs = in_run == 2 ? 1 : x.part / RUN, per_weight = m.group / x.part, step_bytes = x.step_bytes();
    const std::int64_t joined = joined_parts(m, x);
    const std::int32_t middle = m.middle();
    const std::int8_t* base[ROWS];
    const std::int32_t* sums[ROWS];
    const float *scales[ROWS], *terms[ROWS];  // of parts
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
        const Wide* wide[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            total[r] = shift[r] = all(0.0f);
            wide[r] = x.wide ? x.wide_at(row + r, 0) : nullptr;
        }
        const auto of_wide = [&](const Wide& columns) ATTAR_LAMBDA {
            const std::uint32_t column = columns.column();
            const Ints four = unpack_four<CODE>(m, m.block(block) + column / RUN * RUN_BYTES, column % RUN / 4);
            return shift_left(multiply4<CODE>(all(0), four, columns.high), HIGH_SHIFT);
        };
        const auto to_total = [&](int r, Ints sum, std::int64_t part) ATTAR_LAMBDA {
            Floats value = to_floats(sum);
            if (grouped) value = value * all(scales[r][part * x.tile]);
            total[r] = fma(value, load(scale), total[r]);
        };
        std::int64_t at = 0, run = 0, left = per_weight, left_of_group = per_group;
        for (std::int64_t part = 0; part < x.parts;) {
            Ints together[ROWS];
            for (int r = 0; r < ROWS; ++r) together[r] = all(0);
            for (const std::int64_t end = part + std::max<std::int64_t>(joined, in_run); part < end;) {
                Ints acc[2][ROWS];  // of either half of a run
                for (int r = 0; r < ROWS; ++r) acc[0][r] = acc[1][r] = all(0);
                for (const std::int64_t runs_end = run + runs; run < runs_end; codes += RUN_BYTES) {
                    for (int i = 0; i < bits_of(CODE); ++i) __builtin_prefetch(codes + AHEAD + 64 * i);
                    Ints v[8];
                    unpack_bytes<CODE>(m, codes, v);
#pragma GCC unroll 4
                    for (int i = 0; i < 8; i += 2)
#pragma GCC unroll 4
                        for (int r = 0; r < ROWS; ++r) {
                            const std::int8_t* from = base[r] + at + 4 * i;
                            const std::int32_t one = four_bytes(from), other = four_bytes(from + 4);
                            Ints& sum = acc[i / 4][r];
                            if constexpr (CODE < 8)
                                sum = dot8<CODE>(sum, v[i], v[i + 1], one, other, all(0x00010001));
                            else
                                sum = multiply4<CODE>(multiply4<CODE>(sum, v[i], one), v[i + 1], other);
                        }
                    at += run++ % 2 ? step_bytes - RUN : RUN;
                }
                if (in_run == 1)
                    for (int r = 0; r < ROWS; ++r) acc[0][r] = acc[0][r] + acc[1][r];
                for (int half = 0; half < in_run; ++half, ++part) {
                    for (int r = 0; r < ROWS; ++r) {
                        Ints sum = acc[half][r];
                        if (zeros)
                            sum = sum - load_as_ints(zeros) * all(sums[r][part]);
                        else if (middle)
                            sum = sum - all(middle * sums[r][part]);
                        if (moved) shift[r] = fma(all(terms[r][part * x.tile]), load(offset), shift[r]);
                        if (fine) {
                            together[r] = together[r] + sum * load_as_ints(fine);
                        } else {
                            if (x.wide && wide[r]->part == part) sum = sum + of_wide(*wide[r]);
                            to_total(r, sum, part);
                        }
                    }
                    if (fine) fine += LANES;
                    if (--left == 0) {
                        left = per_weight, offset += LANES;
                        if (zeros) zeros += LANES;
                        if (joined == 1) scale += LANES;
                    }
                    if (per_group && --left_of_group == 0 && joined == 1) {
                        left_of_group = per_group;
                        for (int r = 0; r < ROWS; ++r) wide[r] += x.tile;
                    }
                }
            }
            if (joined == 1) continue;
            scale = beside + ((part - 1) >> m.fine_shift) * LANES;
            for (int r = 0; r < ROWS; ++r) {
                if (x.wide) {
                    const std::int8_t* by = m.fine_scales + (block * m.groups + wide[r]->part) * LANES;
                    together[r] = together[r] + of_wide(*wide[r]) * load_as_ints(by);
                    wide[r] += x.tile;
                }
                to_total(r, together[r], part - 1);
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            if (moved) total[r] = total[r] + shift[r];
            finish(total[r], factor, block, grouped ? nullptr : x.scales + row + r, out + (row + r) * width);
        }
    }
}

#if ATTAR_LEVEL >= ATTAR_AVX512
#include "linear_few.inl"
#endif

// Rows `row` .. row + ROWS - 1.
template <int CODE, int ROWS>
static void few_rows_at(const Factor& factor, const QuantizedRows& x, std::int64_t row, std::int64_t first,
                        std::int64_t last, float* out, std::int64_t width, float* beside) {
#if ATTAR_LEVEL >= ATTAR_AVX512
    if (const FewInGroups few = few_in_groups_of<CODE, ROWS>(*factor.matrix, x)) return few(factor, x, row, first, last, out, width);
#endif
    few_rows_of<CODE, ROWS>(factor, x, row, first, last, out, width, beside);
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
        for (; row + ROWS <= x.rows; row += ROWS) few_rows_at<CODE, ROWS>(factor, x, row, from, to, out, width, beside);
        if constexpr (ROWS > 2) {  // codes are unpacked once for all that is left
            if (x.rows - row == 3) few_rows_at<CODE, 3>(factor, x, row, from, to, out, width, beside), row += 3;
            if (x.rows - row == 2) few_rows_at<CODE, 2>(factor, x, row, from, to, out, width, beside), row += 2;
        }
        for (; row < x.rows; ++row) few_rows_at<CODE, 1>(factor, x, row, from, to, out, width, beside);
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

// ---- integer products, many rows: panels of four blocks are unpacked first

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

// Scales of a group, or, where sums are joined, those that groups share.
ATTAR_INLINE Floats scales_of(const Matrix& m, std::int64_t block, std::int64_t group, bool joined) {
    if (!joined) return scales_at(m, block, group);
    return numbers_at(m.scales, m.scale_number, (block * m.coarse + (group >> m.fine_shift)) * LANES);
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

// The first four blocks from `first` on, or, gated, two from there and two of the other matrix.
static Panel panel_of(const Factors& factors, const Factor& factor, std::int64_t first) {
    const bool gated = factors.gate != nullptr;
    const std::int64_t count = std::min<std::int64_t>(gated ? 2 : 4, factor.matrix->blocks() - first);
    Panel panel{};
    for (int source = 0; source <= gated; ++source)
        for (std::int64_t b = 0; b < count; ++b, ++panel.blocks) {
            panel.factor[panel.blocks] = source ? &factors.factors.back() : &factor;
            panel.block[panel.blocks] = first + b;
        }
    return panel;
}

// Totals [rows, 64] of a panel, to rows row .. row + rows - 1 of the output.
static void put_panel(const Factors& factors, const Panel& panel, const QuantizedRows& x, std::int64_t row,
                      std::int64_t rows, const float* total, float* out) {
    const bool gated = factors.gate != nullptr;
    const Factor& factor = *panel.factor[0];
    const std::int64_t count = gated ? panel.blocks / 2 : panel.blocks, first = panel.block[0], width = factors.width;
    // Outputs of a megabyte and more leave the caches before they are read; keeping them there costs a fifth of the time.
    const bool past_caches = x.rows * width >= (std::int64_t{1} << 18) && width % LANES == 0 &&
                             factor.offset % LANES == 0 && reinterpret_cast<std::uintptr_t>(out) % 64 == 0;
    for (std::int64_t r = 0; r < rows; ++r) {
        const float* scale = x.group ? nullptr : x.scales + row + r;
        const auto value = [&](std::int64_t b) ATTAR_LAMBDA {
            return finished(load(total + r * 64 + b * LANES), *panel.factor[b], panel.block[b], scale);
        };
        for (std::int64_t b = 0; b < count; ++b) {
            const Floats made = gated ? activated(*factors.gate, value(b)) * value(count + b) : value(b);
            float* to = out + (row + r) * width;
            if (past_caches && (first + b + 1) * LANES <= factor.matrix->rows)
                stream(to + factor.offset + (first + b) * LANES, made);
            else
                put(made, factor, first + b, to);
        }
    }
}

// How rows are scaled: whole, by group, or by group with wide columns.
enum class Scaled { whole, groups, wide };

#if ATTAR_LEVEL == ATTAR_AMX
#include "linear_tiles.inl"
#else
#include "linear_stretch.inl"
#endif

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

ATTAR_INLINE std::int32_t largest(Ints a) {
    std::int32_t lane[16], top = 0;
    store_bytes(lane, a);
    for (int i = 0; i < 16; ++i) top = lane[i] > top ? lane[i] : top;
    return top;
}

// |x| of 16 columns, as bits: as integers NaN and infinity come out on top.
ATTAR_INLINE Ints magnitudes(const float* x) { return bits_of(load(x)) & all(0x7fffffff); }

// The largest of columns from .. to - 1.
static std::int32_t largest_bits(const float* x, std::int64_t from, std::int64_t to) {
    Ints most = all(0);
    for (; from + 16 <= to; from += 16) most = max(most, magnitudes(x + from));
    std::int32_t top = largest(most);
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

// The first four columns of a group that hold its largest magnitude, the bits of that, and those of the largest elsewhere.
struct Widest {
    std::int64_t column;
    std::int32_t top, rest;
};
static Widest widest(const float* x, std::int64_t from, std::int64_t to) {  // multiples of 32
    alignas(16) static const std::int8_t FOURS[16] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
    const Ints fours = load_as_ints(FOURS);
    const std::int32_t top = largest_bits(x, from, to);
    Ints left = all(0), rest = all(0);  // columns from those four to the last
    for (std::int64_t k = from; k < to; k += 16)
        left = max(left, equal(magnitudes(x + k), top) & (all(static_cast<std::int32_t>(to - k)) - fours));
    const std::int64_t column = to - largest(left);
    for (std::int64_t k = from; k < to; k += 16)
        rest = max(rest, magnitudes(x + k) - (magnitudes(x + k) & equal(fours, static_cast<std::int32_t>(column - k))));
    return {column, top, largest(rest)};
}

// Replaces the codes of a group's wide columns by their low ones, and returns the rest. Codes are low + 128 high, low from
// -64 to 63. Sums are of whole codes.
static Wide widen(QuantizedRows& rows, const float* x, std::int64_t column, float scale, std::int8_t* codes,
                  std::int32_t* sums) {
    Wide out{static_cast<std::uint32_t>(16 * column), static_cast<std::int32_t>(column / rows.part), 0, 0};
    std::int8_t* low = codes + column / 64 * rows.step_bytes() + column % 64;
    std::int8_t high[4];
    for (int i = 0; i < 4; ++i) {
        const float value = std::max(-HIGH, std::min(x[column + i] / scale, HIGH));
        const auto code = static_cast<std::int32_t>((value + 12582912.0f) - 12582912.0f);
        const std::int32_t above = (code + 64) >> HIGH_SHIFT;
        high[i] = static_cast<std::int8_t>(above);
        sums[out.part] += code - low[i];
        low[i] = static_cast<std::int8_t>(code - above * HIGH_UNIT);
        out.excess -= 128 * above;
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
}

// The codes of row `row` as numbers of 16 bits, where products take these.
static void make_pairs(const QuantizedRows& rows, std::int64_t row) {
#if ATTAR_LEVEL == ATTAR_AVX2
    std::int32_t* const out = rows.pairs + row * rows.steps * 32;
    for (std::int64_t k = 0; k < rows.steps * 64; k += 32) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows.at(row, k / 64) + k % 64));
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8), odd = _mm256_srai_epi16(codes, 8);
        auto* to = reinterpret_cast<__m256i*>(out + k / 2);
        _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
        _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
    }
    for (std::int64_t g = 0; rows.wide && g < rows.scales_a_row; ++g) {
        const Wide& wide = *rows.wide_at(row, g);
        for (int i = 0; i < 4; ++i) {
            const std::int64_t pair = wide.column() / 16 * 8 + i % 2 * 4 + wide.column() % 16 / 4;
            auto* code = reinterpret_cast<std::int16_t*>(out + pair) + i / 2;
            *code = static_cast<std::int16_t>(*code + static_cast<std::int8_t>(wide.high >> 8 * i) * HIGH_UNIT);
        }
    }
#else
    static_cast<void>(rows), static_cast<void>(row);
#endif
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
        const Widest found = rows.wide ? widest(x, from, to) : Widest{from, largest_bits(x, from, to), 0};
        const float largest = number_of(found.top);
        const bool finite = largest <= FLT_MAX;  // else the codes are zero, and the scale makes the outputs NaN
        float scale = fixed_scale != 0.0f ? fixed_scale : largest / 127.5f;
        if (rows.wide && finite) scale = std::max(number_of(found.rest) / LOW, largest / HIGH);
        if (scale == 0.0f) scale = FLT_EPSILON;
        rows.scales[row * rows.scales_a_row + g] = finite ? scale : NAN;
        const auto widened = [&]() {
            if (!rows.wide) return;
            Wide& wide = *rows.wide_at(row, g);
            if (finite)
                wide = widen(rows, x, found.column, scale, codes, sums);
            else
                wide = {static_cast<std::uint32_t>(16 * from), static_cast<std::int32_t>(from / rows.part), 0, 0};
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
