// Kernels of linear.cpp that multiply in float32: dense weights, and codes whose rows are not rounded.

// Columns [k, k + count) of a block as floats [count, 16], of one group: codes less their zero point or looked up, which
// are still to be scaled, or, where there are offsets, what they stand for.
template <int BITS>
static void codes_as_floats(const Matrix& m, std::int64_t block, std::int64_t k, std::int64_t count, float* out) {
    const std::int64_t g = k / m.group;
    const FloatTable table = float_table(m.table);
    const bool looked_up = BITS == 4 && m.looked_up, moved = m.offsets != nullptr;
    const Floats zero = to_floats(zero_of(m, block, g));
    const Floats scale = moved ? scales_at(m, block, g) : zero, offset = moved ? offsets_at(m, block, g) : zero;
    const std::uint8_t* codes = m.block(block) + k / RUN * 64 * BITS;
    int first = static_cast<int>(k % RUN) / 4;  // vector of the run
    for (std::int64_t left = count; left > 0; left -= RUN - 4 * first, first = 0, codes += 64 * BITS) {
        Ints v[8];
        unpack_run<BITS>(codes, v);
        const int last = std::min<int>(8, first + static_cast<int>(left) / 4);
        for (int i = first; i < last; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j, out += LANES) {
                const Ints code = shift_right(v[i], 8 * j) & all(0xff);
                Floats value = looked_up ? lookup(code, table) : to_floats(code) - zero;
                if (moved) value = fma(value, scale, offset);
                store(out, value);
            }
    }
}

// Codes of a byte and a group less their zero point; other numbers as they are.
template <class T>
ATTAR_INLINE Floats byte_zeros(const Matrix& m, std::int64_t block, std::int64_t group) {
    return m.zeros ? to_floats(zeros_at(m, block, group) - all(128)) : all(0.0f);
}
template <class T>
ATTAR_INLINE Floats number_at(const T* from, Floats zero) {
    if constexpr (std::is_same_v<T, Int8>) return load_as_floats(from) - zero;
    return load_as_floats(from);
}

// What a group's sum of products is scaled by.
ATTAR_INLINE Floats unit_scales_at(const Matrix& m, std::int64_t block, std::int64_t group) {
    const Floats scale = scales_at(m, block, group);
    return m.number == Number::e4m3 ? scale * all(E4M3_UNIT) : scale;
}

template <class T>
static void numbers_as_floats(const Matrix& m, std::int64_t block, std::int64_t k, std::int64_t count, float* out) {
    const T* from = reinterpret_cast<const T*>(m.block(block)) + k * LANES;
    const Floats zero = byte_zeros<T>(m, block, k / m.group);
    for (std::int64_t i = 0; i < count; ++i) store(out + i * LANES, number_at(from + i * LANES, zero));
}

// 2:4 sparse: what is kept at its place, else zero.
template <class T>
static void kept_as_floats(const Matrix& m, std::int64_t block, std::int64_t k, std::int64_t count, float* out) {
    const T* from = reinterpret_cast<const T*>(m.block(block)) + k / 2 * LANES;
    const std::uint8_t* places = m.places + (block * m.columns + k) / 8 * LANES;
    for (std::int64_t i = 0; i < count / 8; ++i, places += LANES) {
        Ints at = load_as_ints(places);
        for (int quad = 0; quad < 2; ++quad, from += 2 * LANES, at = shift_right(at, 4)) {
            const Ints first = at & all(3), second = shift_right(at, 2) & all(3);
            const Floats a = load_as_floats(from), b = load_as_floats(from + LANES);
            for (int c = 0; c < 4; ++c, out += LANES)
                store(out, from_bits(bits_of(where_equal(first, c, a)) | bits_of(where_equal(second, c, b))));
        }
    }
}

static void as_floats(const Matrix& m, std::int64_t block, std::int64_t k, std::int64_t count, float* out) {
    if (m.places) {
        if (m.number == Number::bfloat16) return kept_as_floats<Bfloat16>(m, block, k, count, out);
        if (m.number == Number::float16) return kept_as_floats<Float16>(m, block, k, count, out);
        return kept_as_floats<float>(m, block, k, count, out);
    }
    switch (m.number) {
        case Number::float32: return numbers_as_floats<float>(m, block, k, count, out);
        case Number::float16: return numbers_as_floats<Float16>(m, block, k, count, out);
        case Number::bfloat16: return numbers_as_floats<Bfloat16>(m, block, k, count, out);
        case Number::e4m3: return numbers_as_floats<E4m3>(m, block, k, count, out);
        case Number::e5m2: return numbers_as_floats<E5m2>(m, block, k, count, out);
        case Number::int8: return numbers_as_floats<Int8>(m, block, k, count, out);
        case Number::codes: break;
    }
    switch (m.bits) {
        case 2: return codes_as_floats<2>(m, block, k, count, out);
        case 3: return codes_as_floats<3>(m, block, k, count, out);
        case 4: return codes_as_floats<4>(m, block, k, count, out);
        case 5: return codes_as_floats<5>(m, block, k, count, out);
        case 6: return codes_as_floats<6>(m, block, k, count, out);
        case 7: return codes_as_floats<7>(m, block, k, count, out);
        default: return codes_as_floats<8>(m, block, k, count, out);
    }
}

// Adds the product of x [ROWS, count] and weights [BLOCKS][count, 16] to sums [ROWS, BLOCKS * 16], column by column. Rows
// of sums lie 64 floats from each other, blocks of weights `apart`.
template <int ROWS, int BLOCKS>
static void add_columns(const float* x, std::int64_t stride, const float* weights, std::int64_t apart, std::int64_t count,
                        float* acc) {
    Floats total[ROWS][BLOCKS];
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) total[r][b] = load(acc + r * 64 + b * LANES);
    for (std::int64_t k = 0; k < count; ++k) {
        Floats w[BLOCKS];
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; ++b) w[b] = load(weights + b * apart + k * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            const Floats value = all(x[r * stride + k]);
#pragma GCC unroll 4
            for (int b = 0; b < BLOCKS; ++b) total[r][b] = fma(value, w[b], total[r][b]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) store(acc + r * 64 + b * LANES, total[r][b]);
}

// The same for all rows: parts of ROWS, and what is left in one part. The last 7 or 8 are two parts of 3 or 4: fewer rows
// have too few chains of additions to fill the multipliers.
template <int ROWS, int BLOCKS>
static void add_to_rows(const float* x, std::int64_t stride, const float* weights, std::int64_t apart, std::int64_t count,
                        std::int64_t rows, float* acc) {
    for (; rows >= ROWS && !(ROWS > 4 && (rows == 7 || rows == 8)); rows -= ROWS, x += ROWS * stride, acc += ROWS * 64)
        add_columns<ROWS, BLOCKS>(x, stride, weights, apart, count, acc);
    if constexpr (ROWS > 1)
        if (rows > 0) add_to_rows<ROWS - 1, BLOCKS>(x, stride, weights, apart, count, rows, acc);
}

static void float_panel(const Factor& factor, const float* x, std::int64_t stride, std::int64_t row, std::int64_t rows,
                        std::int64_t first, float* out, std::int64_t width, Scratch& scratch) {
    // ROWS x BLOCKS vectors of sums fit the registers. Each sum is added up column by column, whatever their number.
    constexpr int ROWS = ATTAR_LEVEL >= ATTAR_AVX2 ? 6 : 1;
    constexpr int BLOCKS = ATTAR_LEVEL >= ATTAR_AVX2 && ATTAR_LEVEL < ATTAR_AVX512 ? 1 : 4;
    constexpr std::int64_t AT_ONCE = BLOCKS == 1 ? 256 : 128;  // columns whose weights, of BLOCKS, fit the first cache
    const Matrix& m = *factor.matrix;
    const bool grouped = m.scales != nullptr;
    const bool in_place = BLOCKS == 1 && m.number == Number::float32 && !m.places;  // nothing is to be converted
    const std::int64_t blocks = std::min<std::int64_t>(4, m.blocks() - first), bytes = rows * 64 * 4;
    const std::int64_t computed = (blocks + BLOCKS - 1) / BLOCKS * BLOCKS;  // the last one more than once
    auto* acc = reinterpret_cast<float*>(scratch.at(0, bytes));
    auto* total = grouped ? reinterpret_cast<float*>(scratch.at(2, bytes)) : acc;
    auto* weights = reinterpret_cast<float*>(scratch.at(1, 4 * AT_ONCE * LANES * 4));
    std::memset(acc, 0, static_cast<std::size_t>(bytes));
    if (grouped) std::memset(total, 0, static_cast<std::size_t>(bytes));
    for (std::int64_t k = 0; k < m.padded;) {
        const std::int64_t end = (k / m.group + 1) * m.group, count = std::min(AT_ONCE, end - k), apart = count * LANES;
        const std::int64_t real = std::min(count, m.columns - k);  // x has no padding
        for (std::int64_t b = 0; b < computed && !in_place; ++b)
            as_floats(m, first + std::min(b, blocks - 1), k, count, weights + b * apart);
        for (std::int64_t b = 0; b < computed && real > 0; b += BLOCKS) {
            const float* from = in_place ? reinterpret_cast<const float*>(m.block(first + b)) + k * LANES : weights + b * apart;
            add_to_rows<ROWS, BLOCKS>(x + row * stride + k, stride, from, apart, real, rows, acc + b * LANES);
        }
        k += count;
        if (grouped && k == end)
            for (std::int64_t b = 0; b < blocks; ++b) {
                const Floats scale = m.offsets ? all(1.0f) : unit_scales_at(m, first + b, (k - 1) / m.group);
                for (std::int64_t i = 0; i < rows; ++i) {
                    const std::int64_t at = i * 64 + b * LANES;
                    store(total + at, fma(load(acc + at), scale, load(total + at)));
                    store(acc + at, all(0.0f));
                }
            }
    }
    for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t b = 0; b < blocks; ++b)
            finish(load(total + r * 64 + b * LANES), factor, first + b, nullptr, out + (row + r) * width);
}

// ---- few rows: numbers are converted in registers

// How columns of a block are read: COLUMNS at once, as they lie, and then in STEPS, a number and what it multiplies; CHAINS
// blocks at a time, for one chain of additions does not fill the multipliers, and up to ROWS rows, what registers hold.
template <class T>
struct Reader {
    static constexpr std::int64_t COLUMNS = 1, STEPS = 1;
    static constexpr int CHAINS = 2, ROWS = 8;
    const T* from;
    Reader() = default;
    Reader(const Matrix& m, std::int64_t block) : from(reinterpret_cast<const T*>(m.block(block))) {}
    struct Some {
        const T* from;
    };
    ATTAR_INLINE_MEMBER Some at(std::int64_t column) const { return {from + column * LANES}; }
    ATTAR_INLINE_MEMBER static Floats get(const Some& some, int, const FloatTable&, Floats zero) { return number_at(some.from, zero); }
    ATTAR_INLINE_MEMBER static Floats input(const Some&, int, const float* x) { return all(*x); }
};
template <class T>
struct Kept {};  // 2:4 sparse numbers: half the products. Of rows that are finite, the others would add nothing
template <class T>
struct Reader<Kept<T>> {
    static constexpr std::int64_t COLUMNS = 8, STEPS = 4;
    static constexpr int CHAINS = 2, ROWS = 8;
    const T* from;
    const std::uint8_t* places;
    Reader() = default;
    Reader(const Matrix& m, std::int64_t block)
        : from(reinterpret_cast<const T*>(m.block(block))), places(m.places + block * m.columns / 8 * LANES) {}
    struct Some {
        const T* from;
        Ints places;
    };
    ATTAR_INLINE_MEMBER Some at(std::int64_t column) const {
        return {from + column / 2 * LANES, load_as_ints(places + column / 8 * LANES)};
    }
    ATTAR_INLINE_MEMBER static Floats get(const Some& some, int i, const FloatTable&, Floats) {
        return load_as_floats(some.from + i * LANES);
    }
    ATTAR_INLINE_MEMBER static Floats input(const Some& some, int i, const float* x) {
        return chosen(x + i / 2 * 4, shift_right(some.places, 2 * i));
    }
};
struct Nibble {};  // 4 bits and a table of floats
template <>
struct Reader<Nibble> {
    static constexpr std::int64_t COLUMNS = 8, STEPS = 8;
    static constexpr int CHAINS = 4, ROWS = 4;
    const std::uint8_t* from;
    Reader() = default;
    Reader(const Matrix& m, std::int64_t block) : from(m.block(block)) {}
    using Some = Ints;
    ATTAR_INLINE_MEMBER Some at(std::int64_t column) const { return load_bytes(from + column * 8); }
    ATTAR_INLINE_MEMBER static Floats get(const Some& some, int i, const FloatTable& table, Floats) {
        return lookup(shift_right(some, 8 * (i % 4) + i / 4 * 4), table);
    }
    ATTAR_INLINE_MEMBER static Floats input(const Some&, int i, const float* x) { return all(x[i]); }
};

template <class T, int ROWS>
static void few_dense_of(const Factor& factor, const float* x, std::int64_t row, std::int64_t first, std::int64_t last,
                         float* out, std::int64_t width) {
    constexpr int CHAINS = Reader<T>::CHAINS;
    const Matrix& m = *factor.matrix;
    const bool grouped = m.scales != nullptr;
    const FloatTable table = float_table(m.table);
    Reader<T> from[CHAINS];
    for (int b = 0; b < CHAINS; ++b) from[b] = Reader<T>(m, std::min(first + b, last - 1));
    Floats total[ROWS][CHAINS], acc[ROWS][CHAINS];
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < CHAINS; ++b) total[r][b] = acc[r][b] = all(0.0f);
    x += row * m.columns;
    for (std::int64_t k = 0, group = 0; k < m.columns; ++group) {
        Floats zero[CHAINS];
        for (int b = 0; b < CHAINS; ++b) zero[b] = byte_zeros<T>(m, std::min(first + b, last - 1), group);
        for (const std::int64_t end = std::min(m.columns, k + m.group); k < end; k += Reader<T>::COLUMNS) {
            typename Reader<T>::Some some[CHAINS];
#pragma GCC unroll 4
            for (int b = 0; b < CHAINS; ++b) some[b] = from[b].at(k);
#pragma GCC unroll 8
            for (int i = 0; i < Reader<T>::STEPS; ++i) {
                Floats w[CHAINS];
#pragma GCC unroll 4
                for (int b = 0; b < CHAINS; ++b) w[b] = Reader<T>::get(some[b], i, table, zero[b]);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
                    for (int b = 0; b < CHAINS; ++b)
                        acc[r][b] = fma(Reader<T>::input(some[b], i, x + r * m.columns + k), w[b], acc[r][b]);
            }
        }
        if (!grouped) break;
        for (int b = 0; b < CHAINS; ++b) {
            const Floats scale = unit_scales_at(m, std::min(first + b, last - 1), group);
            for (int r = 0; r < ROWS; ++r) {
                total[r][b] = fma(acc[r][b], scale, total[r][b]);
                acc[r][b] = all(0.0f);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (std::int64_t b = 0; b < last - first; ++b)
            finish(grouped ? total[r][b] : acc[r][b], factor, first + b, nullptr, out + (row + r) * width);
}

// The same for `count` rows, known when the program runs.
template <class T, int MOST>
static void few_dense_rows(int count, const Factor& factor, const float* x, std::int64_t row, std::int64_t first,
                           std::int64_t last, float* out, std::int64_t width) {
    if constexpr (MOST > 1)
        if (count < MOST) return few_dense_rows<T, MOST - 1>(count, factor, x, row, first, last, out, width);
    few_dense_of<T, MOST>(factor, x, row, first, last, out, width);
}

template <class T>
static void few_dense(const Factor& factor, const float* x, std::int64_t rows, std::int64_t first, std::int64_t last,
                      float* out, std::int64_t width) {
    constexpr int CHAINS = Reader<T>::CHAINS;
    constexpr int MOST = ATTAR_LEVEL >= ATTAR_AVX512 ? Reader<T>::ROWS : ATTAR_LEVEL >= ATTAR_AVX2 ? 2 : 1;
    for (std::int64_t block = first; block < last; block += CHAINS) {
        const std::int64_t end = std::min<std::int64_t>(last, block + CHAINS);
        std::int64_t row = 0;
        for (std::int64_t groups = (rows + MOST - 1) / MOST; groups > 0; --groups) {
            const int count = static_cast<int>((rows - row + groups - 1) / groups);
            few_dense_rows<T, MOST>(count, factor, x, row, block, end, out, width);
            row += count;
        }
    }
}

static void float_few(const Factor& factor, const float* x, std::int64_t rows, std::int64_t first, std::int64_t last,
                      float* out, std::int64_t width) {
    if (factor.matrix->places) {
        if (factor.matrix->number == Number::bfloat16) return few_dense<Kept<Bfloat16>>(factor, x, rows, first, last, out, width);
        if (factor.matrix->number == Number::float16) return few_dense<Kept<Float16>>(factor, x, rows, first, last, out, width);
        return few_dense<Kept<float>>(factor, x, rows, first, last, out, width);
    }
    switch (factor.matrix->number) {
        case Number::float16: return few_dense<Float16>(factor, x, rows, first, last, out, width);
        case Number::bfloat16: return few_dense<Bfloat16>(factor, x, rows, first, last, out, width);
        case Number::e4m3: return few_dense<E4m3>(factor, x, rows, first, last, out, width);
        case Number::e5m2: return few_dense<E5m2>(factor, x, rows, first, last, out, width);
        case Number::int8: return few_dense<Int8>(factor, x, rows, first, last, out, width);
        case Number::codes: return few_dense<Nibble>(factor, x, rows, first, last, out, width);
        default: return few_dense<float>(factor, x, rows, first, last, out, width);
    }
}

