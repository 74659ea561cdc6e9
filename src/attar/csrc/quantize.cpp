// One body, compiled once a level: bit identity between the levels is then a property of the text. Intrinsics would have
// little to win: the division sets the pace (3.5 G elements a second and core with AVX2 and with AVX-512, 1.5 G portable,
// on a Xeon with AMX, GCC 12).
//
// Exactness. max|x| is taken over the bits with the sign removed, as integers: for finite floats that is the same order,
// no lane or thread order can change it, and NaN and infinity come out on top, so one comparison a row finds both.
// Division is IEEE division. Adding 1.5 * 2^23 rounds half to even at the units place and leaves the integer in the low
// bits, also where the instruction set has no rounding instruction; -ffast-math would break it and is not used. Clamping
// afterwards, as integers, is what lets the loop vectorise: float comparisons may raise exception flags.

#include "quantize.h"

#include <atomic>
#include <cfloat>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "pool.h"
#include "simd.h"

namespace attar {
namespace {

constexpr std::int32_t INFINITY_BITS = 0x7f800000;
constexpr float ROUNDER = 12582912.0f;          // 1.5 * 2^23
constexpr std::int64_t SERIAL_BELOW = 1 << 14;  // elements; a shared call costs about as much as this many

template <class To, class From>
ATTAR_INLINE To bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To out;
    std::memcpy(&out, &value, sizeof(To));
    return out;
}

#define ATTAR_KERNELS "quantize.inl"
#include "for_levels.h"

}  // namespace

template <class T>
std::int64_t quantize_rows_int8(const T* x, std::int64_t rows, std::int64_t columns, std::int8_t* codes, float* scales,
                                Level level) {
    constexpr std::int64_t LIMIT = std::numeric_limits<std::int64_t>::max() / static_cast<std::int64_t>(sizeof(T));
    if (rows < 0 || columns < 1 || rows > LIMIT / columns) throw std::invalid_argument("impossible shape of rows");
    const auto row = ATTAR_PICK(level, quantize_row<T>);
    std::atomic<std::int64_t> bad{rows};
    for_rows(rows, rows > 1 && rows * columns >= SERIAL_BELOW, [&](std::int64_t r) {
        const std::int64_t start = r * columns;
        if (row(x + start, columns, codes + start, scales + r)) return;
        for (std::int64_t least = bad; r < least && !bad.compare_exchange_weak(least, r);) {}
    });
    return bad == rows ? -1 : bad.load();
}

template std::int64_t quantize_rows_int8(const float*, std::int64_t, std::int64_t, std::int8_t*, float*, Level);
template std::int64_t quantize_rows_int8(const std::uint16_t*, std::int64_t, std::int64_t, std::int8_t*, float*, Level);

}  // namespace attar
