// Products of a few rows that are scaled by groups and have wide columns, as they do by default: the bits of few_rows_of in
// fewer instructions, and without a branch on where wide columns lie. Included by linear.inl, for AVX-512 alone.

// Codes are asked for so many bytes before they are read, into the second-level cache: lines on their way there are three
// times as many as to the first. So memory is read faster than by plain reading.
constexpr std::int64_t FAR_AHEAD = 4096;

// Sums of products with the columns of a part, for rows side by side. Codes of 4 bits that lie in the upper half of a byte
// are multiplied where they stand: sums of 16 times the products.
template <int CODE, int ROWS>
struct PartSums {
    Ints low[ROWS], high[ROWS];

    ATTAR_INLINE_MEMBER void begin(int row, Ints start) {
        low[row] = start;
        if constexpr (CODE == 4) high[row] = all(0);
    }
    ATTAR_INLINE_MEMBER void add(int row, Ints codes, const std::int8_t* from, bool upper) {
        Ints& sum = upper ? high[row] : low[row];
        sum = dot4(sum, codes, broadcast_from(from));
    }
    ATTAR_INLINE_MEMBER Ints of(int row) const {
        if constexpr (CODE == 4) return low[row] + shift_right_signed(high[row], 4);
        return low[row];
    }
};

// Adds the products of a run. Its halves may be of two parts.
template <int CODE, int ROWS, int HALVES>
ATTAR_INLINE void add_run(const Matrix& m, const std::uint8_t* codes, const std::int8_t* const* rows, std::int64_t at,
                          PartSums<CODE, ROWS>* sums) {
    Ints v[8];
    if constexpr (CODE == 4) {
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) {
            const Ints chunk = load_bytes(codes + 64 * n);
            v[2 * n] = chunk & all(0x0f0f0f0f), v[2 * n + 1] = chunk & all(static_cast<std::int32_t>(0xf0f0f0f0));
        }
    } else {
        unpack_bytes<CODE>(m, codes, v);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) sums[HALVES == 2 ? i / 4 : 0].add(r, v[i], rows[r] + at + 4 * i, CODE == 4 && i % 2);
}

// JOINS: parts of a group are summed as integers (joined_parts). HALVES: parts that share a run.
template <int CODE, int ROWS, bool JOINS, int HALVES>
static void few_in_groups(const Factor& factor, const QuantizedRows& x, std::int64_t row, std::int64_t first,
                          std::int64_t last, float* out, std::int64_t width) {
    constexpr std::int64_t RUN_BYTES = 64 * bits_of(CODE);
    const Matrix& m = *factor.matrix;
    const std::int64_t runs = JOINS || HALVES == 2 ? 1 : x.part / RUN, step_bytes = x.step_bytes();
    const std::int64_t per_group = x.group / x.part, per_weight = m.group / x.part;
    const std::int32_t middle = m.zeros ? 0 : m.middle();
    const std::int8_t* base[ROWS];
    const std::int32_t* sums[ROWS];
    const float *scales[ROWS], *terms[ROWS];  // of parts
    for (int r = 0; r < ROWS; ++r) {
        const std::int64_t at = x.part_at(row + r, 0);
        base[r] = x.at(row + r, 0), sums[r] = x.sums + (row + r) * x.parts;
        scales[r] = x.part_scales + at, terms[r] = x.terms + at;
    }
    for (std::int64_t block = first; block < last; ++block) {
        const std::uint8_t* codes = m.block(block);
        Floats total[ROWS], shift[ROWS], weight_scale = all(0.0f), weight_offset = all(0.0f);
        for (int r = 0; r < ROWS; ++r) total[r] = shift[r] = all(0.0f);
        std::int64_t at = 0, run = 0, part = 0, weight_group = 0, left = 0;
        for (std::int64_t group = 0; group < x.scales_a_row; ++group) {
            Ints wide[ROWS], together[ROWS];
            std::int64_t wide_part[ROWS];
            for (int r = 0; r < ROWS; ++r) {
                const Wide& columns = *x.wide_at(row + r, group);
                const std::uint32_t column = columns.column();
                const Ints four = unpack_four<CODE>(m, m.block(block) + column / RUN * RUN_BYTES, column % RUN / 4);
                wide[r] = shift_left(dot4(all(0), four, all(columns.high)), HIGH_SHIFT), wide_part[r] = columns.part;
                if constexpr (JOINS)
                    together[r] = wide[r] * load_as_ints(m.fine_scales + (block * m.groups + columns.part) * LANES);
            }
            for (const std::int64_t end = part + per_group; part < end;) {
                PartSums<CODE, ROWS> of_parts[HALVES];
                for (int half = 0; half < HALVES; ++half)
                    for (int r = 0; r < ROWS; ++r) of_parts[half].begin(r, all(middle ? -middle * sums[r][part + half] : 0));
                for (const std::int64_t runs_end = run + runs; run < runs_end; codes += RUN_BYTES) {
#pragma GCC unroll 8
                    for (int i = 0; i < bits_of(CODE); ++i) __builtin_prefetch(codes + FAR_AHEAD + 64 * i, 0, 2);
                    add_run<CODE, ROWS, HALVES>(m, codes, base, at, of_parts);
                    at += run++ % 2 ? step_bytes - RUN : RUN;
                }
#pragma GCC unroll 2
                for (int half = 0; half < HALVES; ++half, ++part) {
                    if (JOINS || left == 0) {
                        if constexpr (!JOINS) weight_scale = scales_at(m, block, weight_group);
                        if (m.offsets) weight_offset = offsets_at(m, block, weight_group);
                        left = per_weight, ++weight_group;
                    }
                    --left;
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r) {
                        Ints sum = of_parts[half].of(r);
                        if (m.zeros) sum = sum - zeros_at(m, block, weight_group - 1) * all(sums[r][part]);
                        if (m.offsets) shift[r] = fma(all(terms[r][part * x.tile]), weight_offset, shift[r]);
                        if constexpr (JOINS) {
                            together[r] = together[r] + sum * load_as_ints(m.fine_scales + (block * m.groups + part) * LANES);
                        } else {
                            const Floats value = to_floats(add_if(wide_part[r] == part, sum, wide[r]));
                            total[r] = fma(value * all(scales[r][part * x.tile]), weight_scale, total[r]);
                        }
                    }
                }
            }
            if constexpr (JOINS) {
                const std::int64_t coarse = block * m.coarse + ((part - 1) >> m.fine_shift);
                weight_scale = numbers_at(m.scales, m.scale_number, coarse * LANES);
                for (int r = 0; r < ROWS; ++r)
                    total[r] = fma(to_floats(together[r]) * all(scales[r][(part - 1) * x.tile]), weight_scale, total[r]);
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            if (m.offsets) total[r] = total[r] + shift[r];
            finish(total[r], factor, block, nullptr, out + (row + r) * width);
        }
    }
}

// That kernel, for codes and groups that it is made for; else null.
using FewInGroups = void (*)(const Factor&, const QuantizedRows&, std::int64_t, std::int64_t, std::int64_t, float*, std::int64_t);

template <int CODE, int ROWS>
static FewInGroups few_in_groups_of(const Matrix& m, const QuantizedRows& x) {
    constexpr bool PLANES = CODE == 3 || CODE == 6 || CODE == 7;
    if (!x.wide || !x.group) return nullptr;
    if (joined_parts(m, x) > 1) {
        if constexpr (CODE == 2 || CODE == 3 || CODE == 6)
            if (x.part == HALF_RUN) return few_in_groups<CODE, ROWS, true, 2>;
        if constexpr (CODE == 4 || CODE == 5 || CODE == LOOKED_UP)
            if (x.part == RUN) return few_in_groups<CODE, ROWS, true, 1>;
        return nullptr;
    }
    if constexpr (!PLANES)
        if (x.part >= RUN) return few_in_groups<CODE, ROWS, false, 1>;
    return nullptr;
}
