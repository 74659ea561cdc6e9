// AVX-VNNI, AVX-512 and AMX in terms of AVX2: for builds with ATTAR_EMULATE alone, which test the levels above AVX2 on
// a processor without them. Results are those of Intel's manual, and so is what faults; speed is none.
//
// Functions have the intrinsics' names. As they lie in namespace attar, kernels find them before the compiler's own.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <immintrin.h>

#if !defined(__x86_64__) || defined(__clang__) || !defined(__OPTIMIZE__)
#error "ATTAR_EMULATE is for x86-64 and an optimising GCC, of which intrinsics are functions"
#endif

namespace attar {

#define ATTAR_EMULATED static inline __attribute__((always_inline, target("avx2,fma,f16c")))

// ---- AVX-512: most are what AVX2 does to either half

union Sixteen {
    __m512i whole;
    __m512 floats;
    __m256i half[2];
    __m256 half_floats[2];
    std::int8_t bytes[64];
    std::int32_t words[16];
    float lanes[16];
};
ATTAR_EMULATED Sixteen in(__m512i a) { return {a}; }
ATTAR_EMULATED Sixteen in(__m512 a) { return {(__m512i)a}; }
ATTAR_EMULATED __m256i low(__m512i a) { return in(a).half[0]; }
ATTAR_EMULATED __m256i high(__m512i a) { return in(a).half[1]; }
ATTAR_EMULATED __m256 low(__m512 a) { return in(a).half_floats[0]; }
ATTAR_EMULATED __m256 high(__m512 a) { return in(a).half_floats[1]; }
ATTAR_EMULATED __m512i join(__m256i a, __m256i b) {
    Sixteen out;
    out.half[0] = a, out.half[1] = b;
    return out.whole;
}
ATTAR_EMULATED __m512 join(__m256 a, __m256 b) { return (__m512)join((__m256i)a, (__m256i)b); }

#define ATTAR_BOTH(name, type)                                                       \
    ATTAR_EMULATED type _mm512_##name(type a, type b) {                              \
        return join(_mm256_##name(low(a), low(b)), _mm256_##name(high(a), high(b))); \
    }
ATTAR_BOTH(add_epi32, __m512i)
ATTAR_BOTH(mullo_epi16, __m512i)
ATTAR_BOTH(min_epu8, __m512i)
ATTAR_BOTH(shuffle_epi8, __m512i)
ATTAR_BOTH(srlv_epi64, __m512i)
ATTAR_BOTH(max_ps, __m512)
ATTAR_BOTH(min_ps, __m512)
ATTAR_BOTH(mul_ps, __m512)
#undef ATTAR_BOTH

#define ATTAR_BOTH(name)                                                        \
    ATTAR_EMULATED __m512i _mm512_##name(__m512i a, int bits) {                 \
        return join(_mm256_##name(low(a), bits), _mm256_##name(high(a), bits)); \
    }
ATTAR_BOTH(slli_epi16)
ATTAR_BOTH(slli_epi32)
ATTAR_BOTH(srai_epi16)
ATTAR_BOTH(srli_epi16)
ATTAR_BOTH(srli_epi64)
#undef ATTAR_BOTH

#define ATTAR_BOTH(name)                                                                              \
    ATTAR_EMULATED __m512 _mm512_##name(__m512 a, __m512 b, __m512 c) {                               \
        return join(_mm256_##name(low(a), low(b), low(c)), _mm256_##name(high(a), high(b), high(c))); \
    }
ATTAR_BOTH(fmadd_ps)
ATTAR_BOTH(fnmadd_ps)
#undef ATTAR_BOTH

ATTAR_EMULATED __m512i _mm512_mask_add_epi32(__m512i otherwise, __mmask16 lanes, __m512i a, __m512i b) {
    Sixteen out = in(otherwise);
    const Sixteen sum = in(_mm512_add_epi32(a, b));
    for (int i = 0; i < 16; ++i) out.words[i] = lanes >> i & 1 ? sum.words[i] : out.words[i];
    return out.whole;
}
ATTAR_EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
ATTAR_EMULATED __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }

ATTAR_EMULATED __m512i _mm512_setzero_si512() { return __m512i{}; }
ATTAR_EMULATED __m512i _mm512_set1_epi8(char a) { return join(_mm256_set1_epi8(a), _mm256_set1_epi8(a)); }
ATTAR_EMULATED __m512i _mm512_set1_epi16(short a) { return join(_mm256_set1_epi16(a), _mm256_set1_epi16(a)); }
ATTAR_EMULATED __m512i _mm512_set1_epi32(int a) { return join(_mm256_set1_epi32(a), _mm256_set1_epi32(a)); }
ATTAR_EMULATED __m512 _mm512_set1_ps(float a) { return join(_mm256_set1_ps(a), _mm256_set1_ps(a)); }
ATTAR_EMULATED __m512i _mm512_setr_epi64(long long a, long long b, long long c, long long d, long long e, long long f,
                                         long long g, long long h) {
    return __m512i{a, b, c, d, e, f, g, h};
}
ATTAR_EMULATED __m512i _mm512_broadcast_i64x4(__m256i a) { return join(a, a); }
ATTAR_EMULATED __m512i _mm512_broadcast_i32x4(__m128i a) {
    return _mm512_broadcast_i64x4(_mm256_broadcastsi128_si256(a));
}
ATTAR_EMULATED __m512 _mm512_broadcast_f32x4(__m128 a) {
    return join(_mm256_broadcast_ps(&a), _mm256_broadcast_ps(&a));
}

ATTAR_EMULATED __m256 _mm512_castps512_ps256(__m512 a) { return low(a); }
ATTAR_EMULATED __m256i _mm512_castsi512_si256(__m512i a) { return low(a); }
ATTAR_EMULATED __m256 _mm512_extractf32x8_ps(__m512 a, int at) { return in(a).half_floats[at]; }
ATTAR_EMULATED __m256i _mm512_extracti64x4_epi64(__m512i a, int at) { return in(a).half[at]; }

ATTAR_EMULATED __m512i _mm512_loadu_si512(const void* from) {
    __m512i out;
    std::memcpy(&out, from, sizeof out);
    return out;
}
ATTAR_EMULATED __m512 _mm512_loadu_ps(const void* from) { return (__m512)_mm512_loadu_si512(from); }
ATTAR_EMULATED void _mm512_store_si512(void* to, __m512i a) {
    if (reinterpret_cast<std::uintptr_t>(to) % 64) std::abort();  // as the instruction faults
    std::memcpy(to, &a, sizeof a);
}
ATTAR_EMULATED void _mm512_stream_ps(float* to, __m512 a) { _mm512_store_si512(to, (__m512i)a); }

ATTAR_EMULATED __m128i first(__m256i a) { return _mm256_castsi256_si128(a); }
ATTAR_EMULATED __m128i second(__m256i a) { return _mm256_extracti128_si256(a, 1); }
ATTAR_EMULATED __m512i _mm512_cvtepi8_epi32(__m128i a) {
    return join(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)));
}
ATTAR_EMULATED __m512i _mm512_cvtepu8_epi32(__m128i a) {
    return join(_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8)));
}
ATTAR_EMULATED __m512i _mm512_cvtepu16_epi32(__m256i a) {
    return join(_mm256_cvtepu16_epi32(first(a)), _mm256_cvtepu16_epi32(second(a)));
}
ATTAR_EMULATED __m512 _mm512_cvtph_ps(__m256i a) {
    return join(_mm256_cvtph_ps(first(a)), _mm256_cvtph_ps(second(a)));
}
ATTAR_EMULATED __m512i _mm512_cvtps_epi32(__m512 a) {
    return join(_mm256_cvtps_epi32(low(a)), _mm256_cvtps_epi32(high(a)));
}
ATTAR_EMULATED __m128i _mm512_cvtepi32_epi8(__m512i a) {  // the low bytes
    alignas(16) std::int8_t out[16];
    for (int i = 0; i < 16; ++i) out[i] = in(a).bytes[4 * i];
    return _mm_load_si128(reinterpret_cast<const __m128i*>(out));
}

ATTAR_EMULATED __m512 _mm512_permutevar_ps(__m512 a, __m512i at) {
    return join(_mm256_permutevar_ps(low(a), low(at)), _mm256_permutevar_ps(high(a), high(at)));
}
ATTAR_EMULATED __m512 _mm512_permutexvar_ps(__m512i at, __m512 a) {
    Sixteen out;
    for (int i = 0; i < 16; ++i) out.lanes[i] = in(a).lanes[in(at).words[i] & 15];
    return out.floats;
}
ATTAR_EMULATED __mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b) {
    unsigned out = 0;
    for (int i = 0; i < 16; ++i) out |= static_cast<unsigned>(in(a & b).words[i] != 0) << i;
    return static_cast<__mmask16>(out);
}
ATTAR_EMULATED __mmask64 _mm512_cmpeq_epi8_mask(__m512i a, __m512i b) {
    __mmask64 out = 0;
    for (int i = 0; i < 64; ++i) out |= static_cast<__mmask64>(in(a).bytes[i] == in(b).bytes[i]) << i;
    return out;
}
ATTAR_EMULATED __m512i _mm512_mask_shuffle_epi8(__m512i otherwise, __mmask64 here, __m512i a, __m512i at) {
    Sixteen out = in(otherwise);
    const Sixteen shuffled = in(_mm512_shuffle_epi8(a, at));
    for (int i = 0; i < 64; ++i)
        if (here >> i & 1) out.bytes[i] = shuffled.bytes[i];
    return out.whole;
}
// Each bit of `table` is the result of one choice of bits: that of a times 4, of b times 2, of c.
ATTAR_EMULATED __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
    __m512i out{};
    for (int i = 0; i < 8; ++i)
        if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return out;
}
ATTAR_EMULATED int _mm512_reduce_add_epi32(__m512i a) {
    std::uint32_t out = 0;
    for (int i = 0; i < 16; ++i) out += static_cast<std::uint32_t>(in(a).words[i]);
    return static_cast<int>(out);
}

// ---- dot products of four bytes: those of a have no sign, those of b have one; their sum wraps around

// Bytes apart, products of 16 bits are added in pairs to 32 bits, which nothing saturates.
ATTAR_EMULATED __m256i _mm256_dpbusd_avx_epi32(__m256i sum, __m256i a, __m256i b) {
    const __m256i bytes = _mm256_set1_epi16(0xff);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, bytes), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
ATTAR_EMULATED __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
    return join(_mm256_dpbusd_avx_epi32(low(sum), low(a), low(b)),
                _mm256_dpbusd_avx_epi32(high(sum), high(a), high(b)));
}

#undef ATTAR_EMULATED

// ---- AMX: the tiles of a thread

struct EmulatedTiles {
    bool configured = false;
    struct {
        int rows, bytes;  // a row
        std::uint8_t data[16][64];
    } tile[8] = {};

    static void fault(bool when) {
        if (!when) return;
        std::fputs("an AMX instruction would fault: tiles are not configured, or have other shapes\n", stderr);
        std::abort();
    }
    void configure(const void* shapes) {  // 64 bytes: palette 1, row to start with, ...; bytes a row; rows
        std::uint8_t from[64];
        std::memcpy(from, shapes, sizeof from);
        fault(from[0] != 1 || from[1] != 0);
        for (int i = 2; i < 64; ++i) fault(from[i] != 0 && (i < 16 || (i >= 32 && i < 48) || i >= 56));
        *this = {};
        configured = true;
        for (int t = 0; t < 8; ++t) {
            tile[t].rows = from[48 + t], tile[t].bytes = from[16 + 2 * t] | from[17 + 2 * t] << 8;
            fault(tile[t].rows > 16 || tile[t].bytes > 64 || (tile[t].rows == 0) != (tile[t].bytes == 0));
        }
    }
    auto& at(int t) {
        fault(!configured || tile[t].rows == 0);
        return tile[t];
    }
    void zero(int t) { std::memset(at(t).data, 0, sizeof at(t).data); }
    void load(int t, const void* from, std::int64_t stride) {
        zero(t);
        const auto bytes = static_cast<std::size_t>(at(t).bytes);
        for (int r = 0; r < at(t).rows; ++r)
            std::memcpy(at(t).data[r], static_cast<const char*>(from) + r * stride, bytes);
    }
    void store(int t, void* to, std::int64_t stride) {
        const auto bytes = static_cast<std::size_t>(at(t).bytes);
        for (int r = 0; r < at(t).rows; ++r)
            std::memcpy(static_cast<char*>(to) + r * stride, at(t).data[r], bytes);
    }
    // A and B are the types of bytes: with a sign or not.
    template <class A, class B>
    void dot(int sum, int a, int b) {
        auto &to = at(sum), &left = at(a), &right = at(b);
        fault(left.rows != to.rows || right.bytes != to.bytes || left.bytes != 4 * right.rows || to.bytes % 4);
        fault(sum == a || sum == b || a == b);
        for (int r = 0; r < to.rows; ++r)
            for (int c = 0; c < to.bytes / 4; ++c) {
                std::uint32_t total;
                std::memcpy(&total, to.data[r] + 4 * c, sizeof total);
                for (int k = 0; k < left.bytes; ++k)
                    total += static_cast<std::uint32_t>(static_cast<A>(left.data[r][k]) *
                                                        static_cast<B>(right.data[k / 4][4 * c + k % 4]));
                std::memcpy(to.data[r] + 4 * c, &total, sizeof total);
            }
    }
    void dot_ss(int sum, int a, int b) { dot<std::int8_t, std::int8_t>(sum, a, b); }
    void dot_su(int sum, int a, int b) { dot<std::int8_t, std::uint8_t>(sum, a, b); }
};
inline thread_local EmulatedTiles emulated_tiles;

}  // namespace attar
