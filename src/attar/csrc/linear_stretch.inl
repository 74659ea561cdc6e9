// Integer products of many rows where no tiles multiply: included by linear.inl.
//
// A panel is made ready for a stretch of columns at a time: codes as bytes, scales and zero points as they meet the sums.
// That stays in the first-level cache while the rows pass, each with as many sums as the registers hold.
//
// AVX2 multiplies bytes by `maddubs`, whose sums of two products take 16 bits; `madd` adds those in pairs, and is where the
// fine scales of joined parts multiply at no cost. Codes of 8 bits do not fit, nor do zero points there: numbers of 16 bits
// take as many multiplications, one for two products, and are what codes less their zero points times fine scales give.
//
// AVX-512 has two units for all that it does, multiplying included: what ends a part costs as much as columns do. So bytes
// of rows are broadcast as they are loaded, which takes neither unit, sums of four rows by a whole panel stay in registers,
// and a stretch is whole groups of activations, for which it is known without a branch where a row's wide columns are.

constexpr std::int64_t STRETCH = 128;    // columns
constexpr std::int64_t ROWS_SHARE = 64;  // rows for which a stretch is made
constexpr std::int64_t MOST_PARTS = STRETCH / HALF_RUN;

enum class Products {
    bytes,   // of codes; zero points come off the sums of a part
    joined,  // the same, times the fine scale of each part
    halves,  // of numbers of 16 bits: AVX2
};
constexpr bool MADDS = ATTAR_LEVEL == ATTAR_AVX2;

constexpr int rows_of(Products products) {
    return ATTAR_LEVEL >= ATTAR_AVX512 || products == Products::halves ? 4 : 1;
}
constexpr int blocks_of(Products products) {
    return products == Products::halves ? 1 : products == Products::joined && !MADDS ? 2 : 4;
}

// A stretch of a panel. Where it has not all columns of a span, which share a float scale, the integers wait in `together`.
struct Stretch {
    const Panel* panel;
    std::int64_t from, columns, part;   // `part` columns share a fine scale and a zero point
    std::int64_t index, parts;          // of the first part; how many a span has
    std::int64_t group[MOST_PARTS];     // of activations, that each part lies in
    std::int64_t span, spans;           // columns of one; how many begin here
    bool begins, ends;                  // whether the stretch has the beginning of its first, and the end of its last
    bool offset, zeros;                 // whether there are zero points, each its own; else all are `middle`
    std::int32_t middle;
    const std::uint8_t* codes[4];             // of each block, [columns / 4][64 bytes]; halves: [columns / 2][64 bytes]
    float scales[MOST_PARTS * 64];            // of spans
    std::int32_t zero_points[MOST_PARTS * 64], fine[MOST_PARTS * 64];  // of parts; AVX2 has `fine` in either half
};

// ---- codes

template <int CODE>
static void unpack_stretch_of(const Panel& panel, std::int64_t from, std::int64_t columns, std::uint8_t* out) {
    constexpr std::int64_t RUN_BYTES = 64 * bits_of(CODE);
    for (std::int64_t b = 0; b < panel.blocks; ++b) {
        const std::uint8_t* codes = panel.matrix(b).block(panel.block[b]) + from / RUN * RUN_BYTES;
        for (std::int64_t k = 0; k < columns; k += RUN, codes += RUN_BYTES, out += RUN * LANES) {
            Ints v[8];
            unpack_bytes<CODE>(panel.matrix(b), codes, v);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) store_bytes(out + 64 * i, v[i]);
        }
    }
}

#if ATTAR_LEVEL == ATTAR_AVX2
// Numbers of 16 bits in the order of QuantizedRows::pairs. If JOIN, times fine scales.
template <int CODE, bool JOIN>
static void make_halves_of(const Panel& panel, std::int64_t from, std::int64_t columns, std::uint8_t* out) {
    constexpr std::int64_t RUN_BYTES = 64 * bits_of(CODE);
    const Ints low = all(0x00ff00ff);
    for (std::int64_t b = 0; b < panel.blocks; ++b) {
        const Matrix& m = panel.matrix(b);
        const std::uint8_t* codes = m.block(panel.block[b]) + from / RUN * RUN_BYTES;
        for (std::int64_t k = from; k < from + columns; k += RUN, codes += RUN_BYTES, out += RUN * 32) {
            Ints zero[2], fine[2];
            for (int half = 0; half < 2; ++half) {
                const std::int64_t group = (k + half * HALF_RUN) / m.group;
                zero[half] = zero_of(m, panel.block[b], group);
                zero[half] = zero[half] | shift_left(zero[half], 16);
                if (JOIN) fine[half] = fine_at(m, panel.block[b], group);
            }
            Ints v[8];
            unpack_bytes<CODE>(m, codes, v);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                const int half = i / 4;
                Ints even = minus_halves(v[i] & low, zero[half]);
                Ints odd = minus_halves(shift_right(v[i], 8) & low, zero[half]);
                if (JOIN) even = times_halves(even, fine[half]), odd = times_halves(odd, fine[half]);
                store_bytes(out + 64 * (i + 4 * half), even);
                store_bytes(out + 64 * (i + 4 * half + 4), odd);
            }
        }
    }
}
#endif

template <int CODE>
static void make_codes_of(const Panel& panel, Products products, bool join, std::int64_t from, std::int64_t columns,
                          std::uint8_t* out) {
#if ATTAR_LEVEL == ATTAR_AVX2
    if (products == Products::halves)
        return join ? make_halves_of<CODE, true>(panel, from, columns, out)
                    : make_halves_of<CODE, false>(panel, from, columns, out);
#endif
    static_cast<void>(products), static_cast<void>(join);
    unpack_stretch_of<CODE>(panel, from, columns, out);
}

static void make_codes(const Panel& panel, Products products, bool join, std::int64_t from, std::int64_t columns,
                       std::uint8_t* out) {
    if (panel.matrix(0).looked_up) return make_codes_of<LOOKED_UP>(panel, products, join, from, columns, out);
    switch (panel.matrix(0).bits) {
        case 2: return make_codes_of<2>(panel, products, join, from, columns, out);
        case 3: return make_codes_of<3>(panel, products, join, from, columns, out);
        case 4: return make_codes_of<4>(panel, products, join, from, columns, out);
        case 5: return make_codes_of<5>(panel, products, join, from, columns, out);
        case 6: return make_codes_of<6>(panel, products, join, from, columns, out);
        case 7: return make_codes_of<7>(panel, products, join, from, columns, out);
        default: return make_codes_of<8>(panel, products, join, from, columns, out);
    }
}

// ---- products

// What the high codes of a row's wide columns add to the sums of a block, of whose bytes the columns from `start` on are.
template <int BITS>
ATTAR_INLINE Ints wide_sums(const Wide& wide, const std::uint8_t* codes, std::int64_t start) {
    const Ints four = load_bytes(codes + wide.at - start * LANES);
    return shift_left(BITS < 8 ? dot4(all(0), four, wide.high) : dot4_wide(all(0), four, wide.high), HIGH_SHIFT);
}

// What ends the sums of a part of a row: wide columns, if they lie in it, and the sum of the row's codes.
struct Ending {
    const Wide* wide;
    std::int32_t row_sum;
};
ATTAR_INLINE Ending ending_of(const Stretch& s, const QuantizedRows& x, std::int64_t row, std::int64_t part) {
    Ending out{nullptr, s.offset ? x.sums[row * x.parts + s.index + part] : 0};
    if (!x.wide) return out;
    const Wide* of_group = x.wide_at(row, s.group[part]);
    if (of_group->part == s.index + part) out.wide = of_group;
    return out;
}
// `at`: of the lanes' zero points in those of the stretch.
template <int BITS>
ATTAR_INLINE Ints ended(Ints sum, const Ending& ending, const Stretch& s, const std::uint8_t* codes, std::int64_t at) {
    if (ending.wide) sum = sum + wide_sums<BITS>(*ending.wide, codes, s.from);
    if (!s.offset) return sum;
    return sum - (s.zeros ? load_bytes(s.zero_points + at) * all(ending.row_sum) : all(s.middle * ending.row_sum));
}

// ROWS rows from `row` on times `blocks` blocks from `first` on.
template <Products PRODUCTS, int BITS, int ROWS>
static void add_stretch(const Stretch& s, const QuantizedRows& x, std::int64_t row, std::int64_t first, std::int64_t blocks,
                        float* total, std::int32_t* together) {
    constexpr int BLOCKS = blocks_of(PRODUCTS);
    constexpr bool HALVES = PRODUCTS == Products::halves, JOINS = PRODUCTS == Products::joined;
    const std::int64_t step_bytes = x.step_bytes(), at_once = std::min(s.columns, HALVES ? s.span : s.part);
    const std::uint8_t* codes[BLOCKS];
    for (int b = 0; b < BLOCKS; ++b) codes[b] = s.codes[first + (b < blocks ? b : 0)];
    const std::int8_t* base[ROWS];
    [[maybe_unused]] const std::int32_t* pairs[ROWS];
    const float* row_scales[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        base[r] = x.at(row + r, 0);
        pairs[r] = HALVES ? x.pairs + (row + r) * x.steps * 32 + s.from / 2 : nullptr;
        row_scales[r] = x.group ? x.part_scales + x.part_at(row + r, s.index) : nullptr;
    }
    total += first * LANES, together += first * LANES;
    std::int64_t k = 0, part = 0;  // of the stretch
    for (std::int64_t span = 0; span < s.spans; ++span) {
        Ints acc[ROWS][BLOCKS], sums[ROWS][BLOCKS];
        for (int r = 0; r < ROWS; ++r)
            for (int b = 0; b < BLOCKS; ++b) {
                const bool from_memory = !s.begins && b < blocks;
                acc[r][b] = from_memory ? load_bytes(together + r * 64 + b * LANES) : all(0);
                sums[r][b] = all(0);
            }
        for (std::int64_t i = 0; i < (JOINS ? s.parts : 1); ++i, ++part) {
            const std::int64_t end = k + at_once;
            if constexpr (HALVES) {
#if ATTAR_LEVEL == ATTAR_AVX2
                for (; k < end; k += 2) {
                    Ints v[BLOCKS];
                    for (int b = 0; b < BLOCKS; ++b) v[b] = load_bytes(codes[b] + k * 32);
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r)
                        for (int b = 0; b < BLOCKS; ++b) acc[r][b] = dot2(acc[r][b], v[b], pairs[r][k / 2]);
                }
#endif
            } else {
                const std::int32_t* fine = s.fine + part * 64 + first * LANES;
                for (; k < end; k += 8) {
                    const std::int64_t column = s.from + k, offset = (column >> 6) * step_bytes + (column & 63);
                    std::int32_t one[ROWS], other[ROWS];
                    for (int r = 0; r < ROWS; ++r) {
                        one[r] = four_bytes(base[r] + offset);
                        other[r] = four_bytes(base[r] + offset + 4);
                    }
#pragma GCC unroll 4
                    for (int b = 0; b < BLOCKS; ++b) {
                        const Ints v = load_bytes(codes[b] + k * LANES), w = load_bytes(codes[b] + (k + 4) * LANES);
                        const Ints by = MADDS && JOINS ? load_bytes(fine + (b < blocks ? b : 0) * LANES) : all(0x00010001);
#pragma GCC unroll 4
                        for (int r = 0; r < ROWS; ++r) acc[r][b] = dot8<BITS>(acc[r][b], v, w, one[r], other[r], by);
                    }
                }
                if constexpr (JOINS) {
                    for (int r = 0; r < ROWS; ++r) {
                        const Ending ending = ending_of(s, x, row + r, part);
                        for (int b = 0; b < BLOCKS; ++b) {
                            const std::int64_t at = part * 64 + (first + (b < blocks ? b : 0)) * LANES;
                            if constexpr (MADDS) {
                                if (!ending.wide) break;
                                const Ints by = shift_right_signed(load_bytes(s.fine + at), 16);
                                acc[r][b] = acc[r][b] + wide_sums<BITS>(*ending.wide, codes[b], s.from) * by;
                            } else {
                                const Ints sum = ended<BITS>(acc[r][b], ending, s, codes[b], at);
                                sums[r][b] = sums[r][b] + sum * load_bytes(s.fine + at);
                                acc[r][b] = all(0);
                            }
                        }
                    }
                }
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            const Ending ending = PRODUCTS == Products::bytes ? ending_of(s, x, row + r, span) : Ending{};
            for (int b = 0; b < BLOCKS && b < blocks; ++b) {
                if (!s.ends) {
                    store_bytes(together + r * 64 + b * LANES, acc[r][b]);
                    continue;
                }
                Ints sum = JOINS && !MADDS ? sums[r][b] : acc[r][b];
                const std::int64_t at = span * 64 + (first + b) * LANES;
                if constexpr (PRODUCTS == Products::bytes) sum = ended<BITS>(sum, ending, s, codes[b], at);
                Floats value = to_floats(sum);
                if (row_scales[r]) value = value * all(row_scales[r][span * (JOINS || HALVES ? s.parts : 1) * x.tile]);
                float* to = total + r * 64 + b * LANES;
                store(to, fma(value, load(s.scales + at), load(to)));
            }
        }
    }
}

#if ATTAR_LEVEL >= ATTAR_AVX512
// The same for all blocks of the panel, of a stretch that has whole spans, and, where rows have wide columns, whole groups
// or a part of one. Sums of blocks that the panel lacks are made of the first, and go nowhere that is read.
template <bool JOINS, Scaled SCALED, int ROWS>
static void add_spans(const Stretch& s, const QuantizedRows& x, std::int64_t row, float* total) {
    constexpr int BLOCKS = 4;
    constexpr bool WIDE = SCALED == Scaled::wide;
    const std::int64_t step_bytes = x.step_bytes(), parts = s.columns / s.part;
    const std::int64_t per_group = WIDE ? std::min(parts, x.group / s.part) : parts, per_span = JOINS ? s.parts : 1;
    const std::int32_t middle = s.offset && !s.zeros ? s.middle : 0;
    const std::uint8_t* codes[BLOCKS];
    for (int b = 0; b < BLOCKS; ++b) codes[b] = s.codes[b < s.panel->blocks ? b : 0];
    const std::int8_t* const base = x.at(row, 0);  // rows of a tile lie 64 bytes apart
    const std::int32_t* const row_sums = x.sums + row * x.parts + s.index;
    const float* const row_scales = SCALED == Scaled::whole ? nullptr : x.part_scales + x.part_at(row, s.index);
    const Wide* const of_rows = WIDE ? x.wide_at(row, s.group[0]) : nullptr;
    for (std::int64_t part = 0, k = 0, span = 0, group = 0; part < parts; ++group) {
        [[maybe_unused]] Ints wide[ROWS][BLOCKS];  // what wide columns add, by row and block
        [[maybe_unused]] std::int64_t of_part[ROWS];
        if constexpr (WIDE) {
            for (int r = 0; r < ROWS; ++r) {
                const Wide& columns = of_rows[group * x.tile + r];
                of_part[r] = columns.part - s.index;
                const bool here = of_part[r] >= 0 && of_part[r] < parts;  // else they lie in the group's other stretches
                const std::int64_t at = here ? columns.at - s.from * LANES : 0;
                const Ints high = all(columns.high);
                for (int b = 0; b < BLOCKS; ++b)
                    wide[r][b] = shift_left(dot4(all(0), load_bytes(codes[b] + at), high), HIGH_SHIFT);
            }
        }
        for (const std::int64_t group_end = part + per_group; part < group_end; ++span) {
            Ints sums[ROWS][BLOCKS];
            for (std::int64_t i = 0; i < per_span; ++i, ++part) {
                Ints acc[ROWS][BLOCKS];
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) {
                    const Ints start = all(-middle * row_sums[r * x.parts + part]);
                    if constexpr (WIDE) {
                        const bool here = of_part[r] == part;
#pragma GCC unroll 4
                        for (int b = 0; b < BLOCKS; ++b) acc[r][b] = add_if(here, start, wide[r][b]);
                    } else {
#pragma GCC unroll 4
                        for (int b = 0; b < BLOCKS; ++b) acc[r][b] = start;
                    }
                }
                for (const std::int64_t end = k + s.part; k < end; k += HALF_RUN) {
                    const std::int64_t column = s.from + k;
                    const std::int8_t* const from = base + (column >> 6) * step_bytes + (column & 63);
#pragma GCC unroll 4
                    for (int four = 0; four < HALF_RUN; four += 4) {
                        Ints v[BLOCKS];
#pragma GCC unroll 4
                        for (int b = 0; b < BLOCKS; ++b) v[b] = load_bytes(codes[b] + (k + four) * LANES);
#pragma GCC unroll 4
                        for (int r = 0; r < ROWS; ++r) {
                            const Ints of_row = broadcast_from(from + r * 64 + four);
#pragma GCC unroll 4
                            for (int b = 0; b < BLOCKS; ++b) acc[r][b] = dot4(acc[r][b], v[b], of_row);
                        }
                    }
                }
                if (s.zeros) {
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r) {
                        const Ints sum = all(row_sums[r * x.parts + part]);
#pragma GCC unroll 4
                        for (int b = 0; b < BLOCKS; ++b)
                            acc[r][b] = acc[r][b] - load_bytes(s.zero_points + part * 64 + b * LANES) * sum;
                    }
                }
#pragma GCC unroll 4
                for (int b = 0; b < BLOCKS; ++b) {
                    [[maybe_unused]] Ints fine;
                    if constexpr (JOINS) fine = load_bytes(s.fine + part * 64 + b * LANES);
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r) {
                        if constexpr (JOINS) acc[r][b] = acc[r][b] * fine;
                        sums[r][b] = JOINS && i ? sums[r][b] + acc[r][b] : acc[r][b];
                    }
                }
            }
            const float* const by = s.scales + span * 64;
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
                for (int b = 0; b < BLOCKS; ++b) {
                    Floats value = to_floats(sums[r][b]);
                    if constexpr (SCALED != Scaled::whole)
                        value = value * all(row_scales[span * per_span * x.tile + r]);
                    float* const to = total + r * 64 + b * LANES;
                    store(to, fma(value, load(by + b * LANES), load(to)));
                }
            }
        }
    }
}

template <bool JOINS, Scaled SCALED>
static void add_spans_of(const Stretch& s, const QuantizedRows& x, std::int64_t row, std::int64_t rows, float* total) {
    for (std::int64_t r = 0; r < rows;) {
        const bool four = r + 4 <= rows && (row + r) % x.tile + 4 <= x.tile;  // rows of one tile
        (four ? add_spans<JOINS, SCALED, 4> : add_spans<JOINS, SCALED, 1>)(s, x, row + r, total + r * 64);
        r += four ? 4 : 1;
    }
}

template <bool JOINS>
static void add_whole_spans(const Stretch& s, const QuantizedRows& x, std::int64_t row, std::int64_t rows, float* total) {
    if (x.wide) return add_spans_of<JOINS, Scaled::wide>(s, x, row, rows, total);
    if (x.group) return add_spans_of<JOINS, Scaled::groups>(s, x, row, rows, total);
    add_spans_of<JOINS, Scaled::whole>(s, x, row, rows, total);
}
#endif

template <Products PRODUCTS, int BITS>
static void add_rows(const Stretch& s, const QuantizedRows& x, std::int64_t row, std::int64_t rows, float* total,
                     std::int32_t* together) {
    constexpr int ROWS = rows_of(PRODUCTS), BLOCKS = blocks_of(PRODUCTS);
    for (std::int64_t r = 0; r < rows;) {
        const std::int64_t many = r + ROWS <= rows ? ROWS : 1;
        for (std::int64_t b = 0; b < s.panel->blocks; b += BLOCKS)
            (many == ROWS ? add_stretch<PRODUCTS, BITS, ROWS> : add_stretch<PRODUCTS, BITS, 1>)(
                s, x, row + r, b, std::min<std::int64_t>(BLOCKS, s.panel->blocks - b), total + r * 64, together + r * 64);
        r += many;
    }
}

template <Products PRODUCTS>
static void add_rows_of(int bits, const Stretch& s, const QuantizedRows& x, std::int64_t row, std::int64_t rows, float* total,
                        std::int32_t* together) {
    constexpr bool SEVEN = MADDS && PRODUCTS == Products::bytes;
    if (bits <= (SEVEN ? 6 : 7)) return add_rows<PRODUCTS, 6>(s, x, row, rows, total, together);
    if constexpr (SEVEN) add_rows<PRODUCTS, 7>(s, x, row, rows, total, together);
    if constexpr (!MADDS) add_rows<PRODUCTS, 8>(s, x, row, rows, total, together);
}

// Rows row .. row + rows - 1 of the panel at `first`.
static void integer_many(const Factors& factors, const Factor& factor, const QuantizedRows& x, std::int64_t row,
                         std::int64_t rows, std::int64_t first, float* out, Scratch& scratch) {
    const Matrix& m = *factor.matrix;
    const Panel panel = panel_of(factors, factor, first);
    const std::int64_t joined = joined_parts(m, x), all_columns = x.part * x.parts;
    const int bits = m.looked_up ? 8 : m.bits;
    bool zeros = false;
    for (std::int64_t b = 0; b < panel.blocks; ++b) zeros = zeros || panel.matrix(b).zeros;
    const bool offset = zeros || m.middle();
    const Products products = MADDS && (bits == 8 || (joined > 1 && (offset || bits > 6))) ? Products::halves
                              : joined > 1                                   ? Products::joined
                                                                             : Products::bytes;
    const bool in_place = bits == 8 && !m.looked_up && products != Products::halves;
    Stretch s;
    s.panel = &panel, s.part = x.part, s.span = joined * x.part, s.zeros = zeros, s.offset = offset, s.middle = m.middle();
    std::int64_t whole = STRETCH / s.span;  // spans of a stretch; 0: a piece of one
#if ATTAR_LEVEL >= ATTAR_AVX512
    const bool in_groups = whole && (!x.wide || x.group % STRETCH == 0 || (x.group < STRETCH && x.group % s.span == 0));
    if (in_groups && x.wide && x.group < STRETCH) whole = STRETCH / x.group * x.group / s.span;
#endif
    auto* total = reinterpret_cast<float*>(scratch.at(0, ROWS_SHARE * 64 * 4));
    auto* together = reinterpret_cast<std::int32_t*>(scratch.at(3, ROWS_SHARE * 64 * 4));
    std::uint8_t* made = in_place ? nullptr : scratch.at(1, STRETCH * 64 * 2);
    for (std::int64_t at = row; at < row + rows; at += ROWS_SHARE) {
        const std::int64_t here = std::min(ROWS_SHARE, row + rows - at);
        std::memset(total, 0, static_cast<std::size_t>(here * 64 * 4));
        for (s.from = 0; s.from < all_columns; s.from += s.columns) {
            const std::int64_t left = s.span - s.from % s.span;  // of the span
            s.columns = std::min(all_columns - s.from, whole ? whole * s.span : std::min(STRETCH, left));
            s.begins = s.from % s.span == 0, s.ends = whole || s.columns == left, s.spans = whole ? s.columns / s.span : 1;
            s.index = s.from / s.part, s.parts = joined;
            for (std::int64_t i = 0; x.group && i * s.part < s.columns; ++i) s.group[i] = (s.from + i * s.part) / x.group;
            if (made) make_codes(panel, products, joined > 1, s.from, s.columns, made);
            for (std::int64_t b = 0; b < panel.blocks; ++b) {
                const Matrix& of = panel.matrix(b);
                s.codes[b] = made ? made + b * s.columns * (products == Products::halves ? 32 : LANES)
                                  : of.block(panel.block[b]) + s.from * LANES;
                for (std::int64_t i = 0; i < s.spans; ++i) {
                    const std::int64_t group = (s.from + i * s.span) / m.group;
                    store(s.scales + i * 64 + b * LANES, scales_of(of, panel.block[b], group, joined > 1));
                }
                const std::int64_t parts = products == Products::halves ? 0 : std::max<std::int64_t>(1, s.columns / s.part);
                for (std::int64_t i = 0; i < parts; ++i) {
                    const std::int64_t group = (s.from + i * s.part) / m.group, to = i * 64 + b * LANES;
                    if (zeros) store_bytes(s.zero_points + to, zero_of(of, panel.block[b], group));
                    if (joined == 1) continue;
                    const Ints fine = load_as_ints(of.fine_scales + (panel.block[b] * of.groups + group) * LANES);
                    store_bytes(s.fine + to, MADDS ? fine_at(of, panel.block[b], group) : fine);
                }
            }
#if ATTAR_LEVEL >= ATTAR_AVX512
            if (joined > 1)  // a span is a stretch, and lies in one group
                add_whole_spans<true>(s, x, at, here, total);
            else if (in_groups)
                add_whole_spans<false>(s, x, at, here, total);
            else
                add_rows_of<Products::bytes>(bits, s, x, at, here, total, together);
#else
            if (products == Products::bytes)
                add_rows_of<Products::bytes>(bits, s, x, at, here, total, together);
            else if (products == Products::joined)
                add_rows_of<Products::joined>(bits, s, x, at, here, total, together);
            else if constexpr (MADDS)
                add_rows<Products::halves, 0>(s, x, at, here, total, together);
#endif
        }
        if (m.offsets) add_offsets(panel, x, at, here, total, scratch);
        put_panel(factors, panel, x, at, here, total, out);
    }
    settle();
}
