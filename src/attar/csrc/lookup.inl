// Kernels of lookup.cpp.

// Of rows and outputs together, as many as the registers hold.
#if ATTAR_LEVEL >= ATTAR_AVX512
constexpr int OUTPUTS = 4, ROWS = 4;
#elif ATTAR_LEVEL >= ATTAR_AVX2
constexpr int OUTPUTS = 2, ROWS = 1;
#else
constexpr int OUTPUTS = 1, ROWS = 1;
#endif

// The products of W outputs from `first` on with R rows x [R, padded], to dots [W][R].
template <int BITS, int W, int R>
static void multiply(const LookupMatrix& m, std::int64_t first, const float* x, std::int64_t padded, float* dots) {
    constexpr int PER = 32 / BITS;
    Floats acc[W][R];
    FloatTable table[W];
    const std::uint8_t* codes[W];
    for (int w = 0; w < W; ++w) {
        table[w] = float_table(m.tables + (first + w) * 16);
        codes[w] = m.codes + (first + w) * m.vectors * 64;
        for (int r = 0; r < R; ++r) acc[w][r] = all(0.0f);
    }
    for (std::int64_t v = 0; v < m.vectors; ++v, x += PER * LANES) {
        Ints words[W];
        for (int w = 0; w < W; ++w) words[w] = load_bytes(codes[w] + 64 * v);
#pragma GCC unroll 16
        for (int i = 0; i < PER; ++i) {
            Floats column[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) column[r] = load(x + r * padded + i * LANES);
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) {
                const Floats weight = lookup(shift_right(words[w], BITS * i), table[w]);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) acc[w][r] = fma(weight, column[r], acc[w][r]);
            }
        }
    }
    for (int w = 0; w < W; ++w)
        for (int r = 0; r < R; ++r) dots[w * R + r] = sum(acc[w][r]);
}

// The same with what is stored beside, and the bias, to their places in out [rows, width].
template <int BITS, int W, int R>
static void put_products(const LookupFactor& factor, std::int64_t first, const float* x, std::int64_t padded, float* out,
                         std::int64_t width) {
    const LookupMatrix& m = *factor.matrix;
    float dots[W * R];
    multiply<BITS, W, R>(m, first, x, padded, dots);
    for (int w = 0; w < W; ++w)
        for (int r = 0; r < R; ++r) {
            const std::int64_t output = first + w;
            float value = dots[w * R + r];
            if (m.outliers)
                for (std::int64_t i = m.starts[output]; i < m.starts[output + 1]; ++i)
                    value += m.extras[i] * x[r * padded + m.places[i]];
            out[r * width + factor.offset + output] = factor.bias ? value + factor.bias[output] : value;
        }
}

// Outputs first .. last - 1 of R rows.
template <int BITS, int R>
static void outputs_of(const LookupFactor& factor, const float* x, std::int64_t padded, std::int64_t first,
                       std::int64_t last, float* out, std::int64_t width) {
    std::int64_t output = first;
    for (; output + OUTPUTS <= last; output += OUTPUTS)
        put_products<BITS, OUTPUTS, R>(factor, output, x, padded, out, width);
    for (; output < last; ++output) put_products<BITS, 1, R>(factor, output, x, padded, out, width);
}

// Of all rows x [rows, padded].
template <int BITS>
static void outputs_of_all(const LookupFactor& factor, const float* x, std::int64_t rows, std::int64_t padded,
                           std::int64_t first, std::int64_t last, float* out, std::int64_t width) {
    std::int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS)
        outputs_of<BITS, ROWS>(factor, x + row * padded, padded, first, last, out + row * width, width);
    for (; row < rows; ++row)
        outputs_of<BITS, 1>(factor, x + row * padded, padded, first, last, out + row * width, width);
}

static void some_outputs(const LookupFactor& factor, const float* x, std::int64_t rows, std::int64_t padded,
                         std::int64_t first, std::int64_t last, float* out, std::int64_t width) {
    switch (factor.matrix->bits) {
        case 2: return outputs_of_all<2>(factor, x, rows, padded, first, last, out, width);
        case 3: return outputs_of_all<3>(factor, x, rows, padded, first, last, out, width);
        default: return outputs_of_all<4>(factor, x, rows, padded, first, last, out, width);
    }
}
