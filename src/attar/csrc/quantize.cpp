// One body, compiled once a level: the loops are plain enough for the compiler to vectorise, and bit identity between
// the levels is then a property of the text. Intrinsics would have little to win: the division sets the pace (3.5 G
// elements a second and core with AVX2 and with AVX-512, 1.5 G portable, on a Xeon with AMX, GCC 12).
//
// Exactness. max|x| is taken over the bits with the sign removed, as integers: for finite floats that is the same order,
// no lane or thread order can change it, and NaN and infinity come out on top, so one comparison a row finds both.
// Division is IEEE division. Adding 1.5 * 2^23 rounds half to even at the units place and leaves the integer in the low
// bits, also where the instruction set has no rounding instruction; -ffast-math would break it and is not used. Clamping
// afterwards, as integers, is what lets the loop vectorise: float comparisons may raise exception flags.

#include "quantize.h"

#include <cfloat>
#include <cstring>
#include <limits>
#include <stdexcept>

#define ATTAR_INLINE static inline __attribute__((always_inline))

namespace attar {
namespace {

constexpr std::int32_t INFINITY_BITS = 0x7f800000;
constexpr float ROUNDER = 12582912.0f;          // 1.5 * 2^23
constexpr std::int64_t SERIAL_BELOW = 1 << 14;  // elements; a parallel region costs about as much as this many

template <class To, class From>
ATTAR_INLINE To bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To out;
    std::memcpy(&out, &value, sizeof(To));
    return out;
}

ATTAR_INLINE std::int32_t bits_of(float value) { return bit_cast<std::int32_t>(value); }
ATTAR_INLINE std::int32_t bits_of(std::uint16_t value) { return static_cast<std::int32_t>(std::uint32_t{value} << 16); }

// Returns whether every value was finite.
template <class T>
ATTAR_INLINE bool quantize_row(const T* x, std::int64_t columns, std::int8_t* codes, float* scale_out) {
    std::int32_t largest = 0;
    for (std::int64_t i = 0; i < columns; ++i) {
        const std::int32_t magnitude = bits_of(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= INFINITY_BITS) return false;
    float scale = bit_cast<float>(largest) / 127.5f;
    if (scale == 0.0f) scale = FLT_EPSILON;
    for (std::int64_t i = 0; i < columns; ++i) {
        std::int32_t code = bits_of(bit_cast<float>(bits_of(x[i])) / scale + ROUNDER) - bits_of(ROUNDER);
        code = code < -128 ? -128 : code;
        codes[i] = static_cast<std::int8_t>(code > 127 ? 127 : code);
    }
    *scale_out = scale;
    return true;
}

template <class T>
using Row = bool (*)(const T*, std::int64_t, std::int8_t*, float*);

template <class T>
bool row_portable(const T* x, std::int64_t columns, std::int8_t* codes, float* scale) {
    return quantize_row(x, columns, codes, scale);
}

#if defined(__x86_64__)
template <class T>
__attribute__((target("avx2,fma,f16c"))) bool row_avx2(const T* x, std::int64_t columns, std::int8_t* codes,
                                                       float* scale) {
    return quantize_row(x, columns, codes, scale);
}

template <class T>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))) bool row_avx512(
    const T* x, std::int64_t columns, std::int8_t* codes, float* scale) {
    return quantize_row(x, columns, codes, scale);
}
#endif

template <class T>
Row<T> row_for(Level level) {
#if defined(__x86_64__)
    if (level == Level::avx512) return row_avx512<T>;
    if (level == Level::avx2) return row_avx2<T>;
#endif
    static_cast<void>(level);
    return row_portable<T>;
}

}  // namespace

template <class T>
std::int64_t quantize_rows_int8(const T* x, std::int64_t rows, std::int64_t columns, std::int8_t* codes, float* scales,
                                Level level) {
    constexpr std::int64_t LIMIT = std::numeric_limits<std::int64_t>::max() / static_cast<std::int64_t>(sizeof(T));
    if (rows < 0 || columns < 1 || rows > LIMIT / columns) throw std::invalid_argument("impossible shape of rows");
    const Row<T> row = row_for<T>(level);
    std::int64_t bad = rows;
#pragma omp parallel for schedule(static) reduction(min : bad) if (rows > 1 && rows * columns >= SERIAL_BELOW)
    for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t start = r * columns;
        if (!row(x + start, columns, codes + start, scales + r)) bad = r < bad ? r : bad;
    }
    return bad == rows ? -1 : bad;
}

template std::int64_t quantize_rows_int8(const float*, std::int64_t, std::int64_t, std::int8_t*, float*, Level);
template std::int64_t quantize_rows_int8(const std::uint16_t*, std::int64_t, std::int64_t, std::int8_t*, float*, Level);

}  // namespace attar
