// Integer products of many rows by tiles: included by linear.inl. A panel is unpacked to a buffer that stays in cache. Tiles
// multiply signed bytes, so zero points are subtracted while unpacking.

// Signed bytes times fine scales are numbers of 16 bits: their low and their high bytes, each the codes of a product.
ATTAR_INLINE void store_products(Ints codes, Ints fine, std::uint8_t* low, std::uint8_t* high) {
    const __m512i of_code = (__m512i)codes.piece[0], of_group = (__m512i)fine.piece[0], odd_bytes = _mm512_set1_epi16(-256);
    const __m512i even = _mm512_mullo_epi16(_mm512_srai_epi16(_mm512_slli_epi16(of_code, 8), 8), of_group);
    const __m512i odd = _mm512_mullo_epi16(_mm512_srai_epi16(of_code, 8), of_group);
    constexpr int SELECT = 0xca;  // of each bit: a ? b : c
    _mm512_store_si512(low, _mm512_ternarylogic_epi32(odd_bytes, _mm512_slli_epi16(odd, 8), even, SELECT));
    _mm512_store_si512(high, _mm512_ternarylogic_epi32(odd_bytes, odd, _mm512_srli_epi16(even, 8), SELECT));
}

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
                    v[i] = minus_bytes(v[i], i < 4 ? zero : second);
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
    join ? unpack_panel_as<true>(panel, from, columns, out) : unpack_panel_as<false>(panel, from, columns, out);
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

    void advance() {
        group = ++index * x.part / panel.matrix(0).group;
        for (std::int64_t b = 0; b < panel.blocks; ++b) codes[b] += x.part * LANES;
    }
};

ATTAR_INLINE Floats scales_in(const Part& p, std::int64_t block, std::int64_t group) {
    return scales_of(p.panel.matrix(block), p.panel.block[block], group, p.joined > 1);
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
    const Floats scale = scales_in(p, block, p.group);
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

// What the high codes of a row's wide columns add to the sums of a block, of whose `codes` the columns from `start` on are.
// `subtracted`: these are signed bytes.
ATTAR_INLINE Ints wide_sums(const Wide& wide, const std::uint8_t* codes, std::int64_t start, bool subtracted) {
    codes += wide.at - start * LANES;
    if (!subtracted) return shift_left(dot4_wide(all(0), load_bytes(codes), wide.high), HIGH_SHIFT);
    const Ints flip = all(static_cast<std::int32_t>(0x80808080u));
    return shift_left(dot4_wide(all(wide.excess), minus_bytes(load_bytes(codes), flip), wide.high), HIGH_SHIFT);
}

#define ATTAR_TILE_MULTIPLY(sum, x, codes)            \
    do {                                              \
        if (UNSIGNED)                                 \
            ATTAR_TILE_DOT(su, sum, x, codes);        \
        else                                          \
            ATTAR_TILE_DOT(ss, sum, x, codes);        \
    } while (false)

// Tiles 0 to sums - 1 are sums, of the next two and the rest one are rows of activations and the other codes; `columns` of
// input, 16, 32 or 64, a step.
static void begin_tiles(int sums, bool codes_first, std::int64_t rows, std::int64_t columns) {
    TileShapes shapes;
    for (int t = 0; t < sums; ++t) shapes.set(t, rows, 64);
    for (int t = sums; t < 8; ++t) {
        const bool codes = codes_first == (t < sums + 2);
        codes ? shapes.set(t, columns / 4, 64) : shapes.set(t, rows, columns);
    }
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
    for (std::int64_t b = 0; b < blocks; ++b) scale[b] = scales_in(p, b, p.group);
    std::int64_t tile_before = -1, block_before = 0, tiles_before = 0, blocks_before = 0;
    int buffer = 0;
    const auto scale_one = [&](int which, std::int32_t(*from)[256]) ATTAR_LAMBDA {
        const int t = which / 2, b = which % 2;
        if (t >= tiles_before || b >= blocks_before) return;
        const std::int64_t at = (tile_before + t) * height, block = block_before + b;
        const std::int64_t count = std::min(height, end - at);
        for (std::int64_t r = 0; x.wide && r < count; ++r) {
            const Wide& wide = *x.wide_at(at + r, start / x.group);
            std::int32_t* sum = from[which] + r * LANES;
            if (wide.part != p.index) continue;
            store_bytes(sum, load_bytes(sum) + wide_sums(wide, p.codes[block], start, p.subtracted));
        }
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
            auto* before = sums[1 - buffer];
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

// Parts that are multiplied in one go, by as many codes as four tiles hold, of whole groups of rows if possible; 1 where a
// part takes more.
ATTAR_INLINE std::int64_t parts_at_once(const QuantizedRows& x, std::int64_t joined) {
    if (joined > 1) return joined;
    if (x.wide && x.group > JOINED) return 1;
    if (x.part <= 64) return x.group == 3 * x.part ? 3 : 4;
    return x.part == 128 ? 2 : 1;
}

// Four parts of a tile of codes each; two parts of two tiles; or parts that are joined to 128 columns: two tiles of low
// bytes and two of high ones.
enum class Stretch { four, two, joined };

// Adds a stretch of columns. A tile of rows lies in tiles 4 to 7 while the blocks of the panel pass through 2 and 3. A block
// is multiplied (to 0 and 1) while the sums of the one before are scaled, with its totals in registers: they are read and
// written once for all parts. Sums behind the last part are made of anything and left.
template <Stretch STRETCH, Scaled SCALED>
static void add_stretch(const Part& p, std::int64_t parts, std::int64_t row, std::int64_t rows, float* total) {
    constexpr int SCALES = STRETCH == Stretch::four ? 4 : STRETCH == Stretch::two ? 2 : 1;
    constexpr bool WIDE = SCALED == Scaled::wide, JOINED_PARTS = STRETCH == Stretch::joined;
    alignas(64) std::int32_t sums[2][STRETCH == Stretch::four ? 4 : 2][256];
    const QuantizedRows& x = p.x;
    const std::int64_t columns = STRETCH == Stretch::four ? x.part : 64, scales = std::min<std::int64_t>(parts, SCALES);
    const std::int64_t start = p.index * x.part, blocks = p.panel.blocks;
    std::int64_t at[4];  // of each tile of rows its columns; behind the last part anything
    for (int s = 0; s < 4; ++s) {
        const std::int64_t column = std::min(start + s * columns, x.parts * x.part - columns);
        at[s] = column / 64 * x.step_bytes() + column % 64;
    }
    // Lines of the next stretch's codes that are asked for with each tile of rows: blocks are so short there that the
    // processor does not see them coming.
    const std::int64_t runs = parts * x.part / RUN, tiles = (rows + 15) / 16;
    const std::int64_t lines = p.ahead ? (runs * p.panel.matrix(0).bits + tiles - 1) / tiles : 0;
    Floats scale[4][SCALES];
    const std::uint8_t* next[4];
    for (std::int64_t b = 0; b < blocks; ++b) {
        const Matrix& m = p.panel.matrix(b);
        next[b] = m.block(p.panel.block[b]) + (start / RUN + runs) * m.bits * 64;
        for (std::int64_t i = 0; i < scales; ++i) scale[b][i] = scales_in(p, b, (p.index + i) * x.part / m.group);
    }
    const std::int64_t group = WIDE ? start / x.group : 0;  // the first of the rows' groups that the stretch has columns of
    const std::int64_t groups = WIDE ? (start + parts * x.part - 1) / x.group - group + 1 : 0;

    // What was multiplied last: the sums, of which rows, where its totals are, and what scales them.
    std::int32_t(*before)[256] = sums[1], (*now)[256] = sums[0];
    std::int64_t rows_before = 0;
    float* to = nullptr;
    const float* row_scales = nullptr;
    const Floats* by = nullptr;
    const Wide* wide = nullptr;  // of its first row and group
    const std::uint8_t* codes_before = nullptr;  // those of column 0, if they were there
    Floats out[16];
    const auto add = [&](int part) ATTAR_LAMBDA {
        if (part >= scales) return;
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r) {
            Ints sum = load_bytes(before[part] + r * LANES);
            [[maybe_unused]] const Wide* const of_row = wide + part * 16 + r;
            if constexpr (JOINED_PARTS) {  // low bytes are unsigned, high ones signed
                Ints high = load_bytes(before[1] + r * LANES);
                if constexpr (WIDE) {
                    sum = sum + wide_sums(*of_row, codes_before, 0, false);
                    high = high + wide_sums(*of_row, codes_before + 2 * 64 * LANES, 0, true);
                }
                sum = sum + shift_left(high, 8);
            } else if constexpr (WIDE && STRETCH == Stretch::two) {
                sum = sum + wide_sums(*of_row, codes_before, 0, true);
            }
            Floats value = to_floats(sum);
            if constexpr (SCALED != Scaled::whole) value = value * all(row_scales[part * 16 + r]);
            out[r] = fma(value, by[part], out[r]);
        }
    };
    // Wide columns, before the sums are scaled, where it depends on a row which part they lie in.
    const auto widen = [&]() ATTAR_LAMBDA {
        for (std::int64_t r = 0; r < rows_before; ++r)
            for (std::int64_t g = 0; g < groups; ++g) {
                const Wide& columns_of = wide[g * 16 + r];
                const std::int64_t part = columns_of.part - p.index;
                if (part < 0 || part >= parts) continue;  // the group has columns beyond the stretch
                std::int32_t* const sum = before[part] + r * LANES;
                store_bytes(sum, load_bytes(sum) + wide_sums(columns_of, codes_before, 0, true));
            }
    };
    const auto begin = [&]() ATTAR_LAMBDA {
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r) out[r] = load(to + r * 64);
    };
    const auto end = [&]() ATTAR_LAMBDA {
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r) store(to + r * 64, out[r]);
    };
    const std::int64_t items = tiles * blocks;
    for (std::int64_t item = 0, b = 0, r = 0; item <= items; ++item) {
        const bool more = item < items;
        const std::uint8_t* const codes = p.codes[b];
        if (more) {
            if (b == 0) {
                const std::int8_t* const from = x.at(row + r, 0);
                ATTAR_TILE_LOAD(4, from + at[0], 64);
                ATTAR_TILE_LOAD(5, from + at[1], 64);
                if constexpr (!JOINED_PARTS) {
                    ATTAR_TILE_LOAD(6, from + at[2], 64);
                    ATTAR_TILE_LOAD(7, from + at[3], 64);
                }
            }
            ATTAR_TILE_ZERO(0);
            ATTAR_TILE_ZERO(1);
            ATTAR_TILE_LOAD(2, codes, 64);
            if constexpr (STRETCH == Stretch::four) {
                ATTAR_TILE_LOAD(3, codes + columns * LANES, 64);
                ATTAR_TILE_DOT(ss, 0, 4, 2);
                ATTAR_TILE_DOT(ss, 1, 5, 3);
            } else {
                ATTAR_TILE_LOAD(3, codes + 2 * 64 * LANES, 64);
                if constexpr (JOINED_PARTS) {
                    ATTAR_TILE_DOT(su, 0, 4, 2);
                    ATTAR_TILE_DOT(ss, 1, 4, 3);
                } else {
                    ATTAR_TILE_DOT(ss, 0, 4, 2);
                    ATTAR_TILE_DOT(ss, 1, 6, 3);
                }
                ATTAR_TILE_LOAD(2, codes + 64 * LANES, 64);
                ATTAR_TILE_LOAD(3, codes + 3 * 64 * LANES, 64);
                if constexpr (JOINED_PARTS) {
                    ATTAR_TILE_DOT(su, 0, 5, 2);
                    ATTAR_TILE_DOT(ss, 1, 5, 3);
                } else {
                    ATTAR_TILE_DOT(ss, 0, 5, 2);
                    ATTAR_TILE_DOT(ss, 1, 7, 3);
                }
            }
            for (std::int64_t line = 0; line < lines; ++line, next[b] += 64) __builtin_prefetch(next[b], 0, 2);
        }
        if (item > 0) {
            begin();
            if constexpr (WIDE && STRETCH == Stretch::four) widen();
            add(0);
            if constexpr (STRETCH != Stretch::joined) add(1);
        }
        if (more) {
            ATTAR_TILE_STORE(0, now[0]);
            ATTAR_TILE_STORE(1, now[1]);
        }
        if constexpr (STRETCH == Stretch::four) {
            const bool all_four = more && scales > 2;
            if (all_four) {
                ATTAR_TILE_ZERO(0);
                ATTAR_TILE_ZERO(1);
                ATTAR_TILE_LOAD(2, codes + 2 * columns * LANES, 64);
                ATTAR_TILE_LOAD(3, codes + 3 * columns * LANES, 64);
                ATTAR_TILE_DOT(ss, 0, 6, 2);
                ATTAR_TILE_DOT(ss, 1, 7, 3);
            }
            if (item > 0) add(2), add(3);
            if (all_four) {
                ATTAR_TILE_STORE(0, now[2]);
                ATTAR_TILE_STORE(1, now[3]);
            }
        }
        if (item > 0) end();
        if (!more) break;
        std::swap(before, now);
        rows_before = std::min<std::int64_t>(16, rows - r), to = total + r * 64 + b * LANES, by = scale[b];
        codes_before = codes - start * LANES;
        if constexpr (WIDE) wide = x.wide_at(row + r, group);
        if constexpr (SCALED != Scaled::whole) row_scales = x.part_scales + x.part_at(row + r, p.index);
        if (++b == blocks) b = 0, r += 16;
    }
}

template <Stretch STRETCH>
static void add_stretch_of(const Part& p, std::int64_t parts, std::int64_t row, std::int64_t rows, float* total) {
    if (p.x.wide) return add_stretch<STRETCH, Scaled::wide>(p, parts, row, rows, total);
    if (p.x.group) return add_stretch<STRETCH, Scaled::groups>(p, parts, row, rows, total);
    add_stretch<STRETCH, Scaled::whole>(p, parts, row, rows, total);
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

// Codes of 8 bits are read where they lie, unless tiles multiply parts so short that it pays to take zero points off
// first, and these leave them signed bytes.
static bool unpacks(const Panel& panel, const QuantizedRows& x) {
    const Matrix &a = panel.matrix(0), &b = panel.matrix(panel.blocks - 1);
    return a.bits < 8 || (parts_at_once(x, 1) > 1 && !a.zeros && !b.zeros);
}

// Rows row .. row + rows - 1 (row a multiple of the tile) of the panel at `first`. For more rows than share it, the panel is
// unpacked whole, to the second-level cache; of those that share it the sums, and one stretch of it, stay in the first or
// near it.
static void integer_many(const Factors& factors, const Factor& factor, const QuantizedRows& x, std::int64_t row,
                         std::int64_t rows, std::int64_t first, float* out, Scratch& scratch) {
    const Matrix& m = *factor.matrix;
    const Panel panel = panel_of(factors, factor, first);
    const std::int64_t blocks = panel.blocks, columns = x.part * x.parts;
    const std::int64_t joined = joined_parts(m, x), at_once = parts_at_once(x, joined);
    const bool packed = unpacks(panel, x), by_stretch = packed && at_once > 1, whole = packed && rows > MOST_SHARED;
    const bool products = by_stretch && joined > 1;
    const std::int64_t column_bytes = 64 * (products ? 2 : 1);  // of a panel
    const std::int64_t piece = std::max(x.part * at_once, RUN);  // columns that are unpacked at once
    // Where three parts are taken at once, a fourth is read and left.
    const std::int64_t room = (whole ? columns : 0) + piece + x.part;
    std::uint8_t* unpacked = packed ? scratch.at(1, column_bytes * room) : nullptr;
    auto* total = reinterpret_cast<float*>(scratch.at(0, MOST_SHARED * 64 * 4));
    auto* together = reinterpret_cast<std::int32_t*>(joined > 1 && !products ? scratch.at(3, MOST_SHARED * 64 * 4) : nullptr);
    for (std::int64_t from = 0; whole && from < columns; from += piece)
        unpack_panel(panel, products, from, std::min(piece, columns - from), unpacked + from * column_bytes);
    begin_tiles(by_stretch ? 2 : 4, by_stretch, x.tile, products ? 64 : tile_columns(x));
    for (std::int64_t at = row; at < row + rows; at += MOST_SHARED) {
        const std::int64_t here = std::min(MOST_SHARED, row + rows - at);
        std::memset(total, 0, static_cast<std::size_t>(here * 64 * 4));
        for (std::int64_t from = 0; from < columns; from += piece) {
            const std::int64_t taken = std::min(piece, columns - from);
            std::uint8_t* codes = whole ? unpacked + from * column_bytes : unpacked;
            if (packed && !whole) unpack_panel(panel, products, from, taken, codes);
            const bool ahead = !whole && from + taken < columns;
            Part p{panel, x, packed, joined, together, ahead, from / x.part, from / m.group, {}};
            for (std::int64_t b = 0; b < blocks; ++b)
                p.codes[b] = packed ? codes + b * taken * column_bytes / 4
                                    : panel.matrix(b).block(panel.block[b]) + from * LANES;
            if (by_stretch)
                add_parts(p, taken / x.part, at, here, total);
            else
                for (std::int64_t part = 0; part < taken; part += x.part, p.advance()) add_part(p, at, here, total);
        }
        if (m.offsets) add_offsets(panel, x, at, here, total, scratch);
        put_panel(factors, panel, x, at, here, total, out);
    }
    end_tiles();
    settle();
}
