// What simd.inl and for_levels.h need once: intrinsics, numbers of the levels, 16-bit floats.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(ATTAR_EMULATE)
#include "emulate.h"
#elif defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Each x86 level is a superset of the ones below it.
#define ATTAR_PORTABLE 0
#define ATTAR_NEON 1
#define ATTAR_AVX2 2
#define ATTAR_AVXVNNI 3
#define ATTAR_AVX512 4
#define ATTAR_AMX 5

// Builds that look for faults call functions, as instrumented code of everything inlined takes minutes to compile.
#if defined(ATTAR_NOT_INLINED)
#define ATTAR_LAMBDA
#define ATTAR_INLINE static inline __attribute__((unused))
#define ATTAR_INLINE_MEMBER inline
#else
#define ATTAR_LAMBDA __attribute__((always_inline))
#define ATTAR_INLINE static inline ATTAR_LAMBDA
#define ATTAR_INLINE_MEMBER inline ATTAR_LAMBDA
#endif

namespace attar {

struct Bfloat16 {
    std::uint16_t bits;
};
struct Float16 {
    std::uint16_t bits;
};

struct E4m3 {
    std::uint8_t bits;
};
struct E5m2 {
    std::uint8_t bits;
};
struct Int8 {
    std::int8_t value;
};
struct UpperHalf {  // of a float16 that is not negative, without its sign and its last seven bits
    std::uint8_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(Bfloat16 value) {
    const std::uint32_t bits = std::uint32_t{value.bits} << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

inline float to_float(Float16 value) {
    const std::uint32_t sign = std::uint32_t{value.bits & 0x8000u} << 16;
    const std::uint32_t exponent = value.bits >> 10 & 0x1f, fraction = value.bits & 0x3ff;
    float magnitude;
    if (exponent == 0) {
        magnitude = static_cast<float>(fraction) * 0x1p-24f;
    } else {
        const std::uint32_t bits = (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
        std::memcpy(&magnitude, &bits, sizeof magnitude);
    }
    std::uint32_t bits;
    std::memcpy(&bits, &magnitude, sizeof bits);
    bits |= sign;
    std::memcpy(&magnitude, &bits, sizeof bits);
    return magnitude;
}

// Its exponent is biased by 7 where a float16's is by 15, subnormals and all. NaN is 0x7f and 0xff.
inline float to_float(E4m3 value) {
    const std::uint32_t magnitude = value.bits & 0x7fu, sign = value.bits & 0x80u;
    if (magnitude == 0x7f) return NAN;
    return to_float(Float16{static_cast<std::uint16_t>(sign << 8 | magnitude << 7)}) * 256.0f;
}
inline float to_float(UpperHalf value) { return to_float(Float16{static_cast<std::uint16_t>(value.bits << 7)}); }
inline float to_float(E5m2 value) { return to_float(Float16{static_cast<std::uint16_t>(value.bits << 8)}); }

}  // namespace attar
