// Sixteen lanes at whatever width the level has: the one vector type that kernels are written in.
//
// Included once a level by for_levels.h, inside the level's namespace, with ATTAR_LEVEL set; hence no include guard and
// no #include. A lane count that does not change with the level is what lets every level share one memory layout and
// one order of float operations, so that a test can compare levels bit for bit.
//
// Plain arithmetic is the compiler's vector extension; only what it has no operator for is an intrinsic.

#if ATTAR_LEVEL >= ATTAR_AVX512
constexpr int WIDTH = 16;
#elif ATTAR_LEVEL >= ATTAR_AVX2
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int PIECES = 16 / WIDTH;

typedef float FloatPiece __attribute__((vector_size(4 * WIDTH)));
typedef std::int32_t IntPiece __attribute__((vector_size(4 * WIDTH)));
typedef std::uint32_t WordPiece __attribute__((vector_size(4 * WIDTH)));
// The same anywhere in memory. GCC 12 copies a whole Floats in pieces of 16 bytes; wider reads of what was just written so
// wait until the stores are done, which made AVX2 ten times slower.
typedef float FloatsAnywhere __attribute__((vector_size(4 * WIDTH), aligned(1), may_alias));
typedef std::int32_t IntsAnywhere __attribute__((vector_size(4 * WIDTH), aligned(1), may_alias));

struct Floats {  // 16 float32
    FloatPiece piece[PIECES];
};
struct Ints {  // 16 int32, or 64 bytes
    IntPiece piece[PIECES];
};

#define ATTAR_EACH _Pragma("GCC unroll 4") for (int p = 0; p < PIECES; ++p)

ATTAR_INLINE Floats load(const float* from) {
    Floats out;
    ATTAR_EACH out.piece[p] = reinterpret_cast<const FloatsAnywhere*>(from)[p];
    return out;
}
ATTAR_INLINE void store(float* to, Floats value) {
    ATTAR_EACH reinterpret_cast<FloatsAnywhere*>(to)[p] = value.piece[p];
}
// To memory past the caches: for results so large that they would only displace what is still needed. `to` lies at a
// multiple of 64 bytes; `settle` comes before another thread reads.
ATTAR_INLINE void stream(float* to, Floats value) {
#if ATTAR_LEVEL >= ATTAR_AVX512
    _mm512_stream_ps(to, (__m512)value.piece[0]);
#else
    store(to, value);
#endif
}
ATTAR_INLINE void settle() {
#if ATTAR_LEVEL >= ATTAR_AVX512
    _mm_sfence();
#endif
}
ATTAR_INLINE Ints load_bytes(const void* from) {
    Ints out;
    ATTAR_EACH out.piece[p] = static_cast<const IntsAnywhere*>(from)[p];
    return out;
}
ATTAR_INLINE void store_bytes(void* to, Ints value) {
    ATTAR_EACH static_cast<IntsAnywhere*>(to)[p] = value.piece[p];
}

ATTAR_INLINE Floats all(float value) {
    Floats out;
    ATTAR_EACH out.piece[p] = value - FloatPiece{};  // x - 0 is x, also where x is -0: it compiles to a broadcast
    return out;
}
ATTAR_INLINE Ints all(std::int32_t value) {
    Ints out;
    ATTAR_EACH out.piece[p] = IntPiece{} + value;
    return out;
}

ATTAR_INLINE Floats operator+(Floats a, Floats b) {
    ATTAR_EACH a.piece[p] += b.piece[p];
    return a;
}
ATTAR_INLINE Floats operator-(Floats a, Floats b) {
    ATTAR_EACH a.piece[p] -= b.piece[p];
    return a;
}
ATTAR_INLINE Floats operator*(Floats a, Floats b) {
    ATTAR_EACH a.piece[p] *= b.piece[p];
    return a;
}
ATTAR_INLINE Floats operator/(Floats a, Floats b) {
    ATTAR_EACH a.piece[p] /= b.piece[p];
    return a;
}
// Modulo 2^32: what is not a number may turn into any bits on its way.
ATTAR_INLINE Ints operator+(Ints a, Ints b) {
    ATTAR_EACH a.piece[p] = (IntPiece)((WordPiece)a.piece[p] + (WordPiece)b.piece[p]);
    return a;
}
ATTAR_INLINE Ints operator-(Ints a, Ints b) {
    ATTAR_EACH a.piece[p] = (IntPiece)((WordPiece)a.piece[p] - (WordPiece)b.piece[p]);
    return a;
}
ATTAR_INLINE Ints operator*(Ints a, Ints b) {
    ATTAR_EACH a.piece[p] = (IntPiece)((WordPiece)a.piece[p] * (WordPiece)b.piece[p]);
    return a;
}
ATTAR_INLINE Ints operator&(Ints a, Ints b) {
    ATTAR_EACH a.piece[p] &= b.piece[p];
    return a;
}
ATTAR_INLINE Ints operator|(Ints a, Ints b) {
    ATTAR_EACH a.piece[p] |= b.piece[p];
    return a;
}
// Bytes of `a` less those of `b`, each modulo 256.
ATTAR_INLINE Ints minus_bytes(Ints a, Ints b) {
    typedef std::uint8_t BytePiece __attribute__((vector_size(4 * WIDTH)));
    ATTAR_EACH a.piece[p] = (IntPiece)((BytePiece)a.piece[p] - (BytePiece)b.piece[p]);
    return a;
}
ATTAR_INLINE Ints shift_right(Ints a, int bits) {  // zeros come in
    ATTAR_EACH a.piece[p] = (IntPiece)((WordPiece)a.piece[p] >> bits);
    return a;
}
ATTAR_INLINE Ints shift_right_signed(Ints a, int bits) {
    ATTAR_EACH a.piece[p] = a.piece[p] >> bits;
    return a;
}
ATTAR_INLINE Ints shift_left(Ints a, int bits) {
    ATTAR_EACH a.piece[p] = (IntPiece)((WordPiece)a.piece[p] << bits);
    return a;
}
ATTAR_INLINE Ints bits_of(Floats a) {
    Ints out;
    ATTAR_EACH out.piece[p] = (IntPiece)a.piece[p];
    return out;
}
ATTAR_INLINE Floats from_bits(Ints a) {
    Floats out;
    ATTAR_EACH out.piece[p] = (FloatPiece)a.piece[p];
    return out;
}
ATTAR_INLINE Floats to_floats(Ints a) {
    Floats out;
    ATTAR_EACH out.piece[p] = __builtin_convertvector(a.piece[p], FloatPiece);
    return out;
}
// Lanes of `a` where it is greater, else of `b`: a NaN in `a` is lost, one in `b` stays.
ATTAR_INLINE Floats max(Floats a, Floats b) {
    ATTAR_EACH {
        const IntPiece greater = a.piece[p] > b.piece[p];
        a.piece[p] = (FloatPiece)((greater & (IntPiece)a.piece[p]) | (~greater & (IntPiece)b.piece[p]));
    }
    return a;
}
ATTAR_INLINE Ints max(Ints a, Ints b) {
    ATTAR_EACH {
        const IntPiece greater = a.piece[p] > b.piece[p];
        a.piece[p] = (greater & a.piece[p]) | (~greater & b.piece[p]);
    }
    return a;
}

// a * b + c, rounded once at every level: the portable one calls the C library, slowly and exactly.
ATTAR_INLINE Floats fma(Floats a, Floats b, Floats c) {
    ATTAR_EACH {
#if ATTAR_LEVEL >= ATTAR_AVX512
        c.piece[p] = (FloatPiece)_mm512_fmadd_ps((__m512)a.piece[p], (__m512)b.piece[p], (__m512)c.piece[p]);
#elif ATTAR_LEVEL >= ATTAR_AVX2
        c.piece[p] = (FloatPiece)_mm256_fmadd_ps((__m256)a.piece[p], (__m256)b.piece[p], (__m256)c.piece[p]);
#elif defined(__aarch64__)
        c.piece[p] = (FloatPiece)vfmaq_f32((float32x4_t)c.piece[p], (float32x4_t)a.piece[p], (float32x4_t)b.piece[p]);
#else
        for (int i = 0; i < WIDTH; ++i) c.piece[p][i] = std::fma(a.piece[p][i], b.piece[p][i], c.piece[p][i]);
#endif
    }
    return c;
}

// The sum of the lanes, in one order at every level: halves are folded onto each other, 16 to 8 to 4 to 2 to 1.
#if ATTAR_LEVEL >= ATTAR_AVX2
ATTAR_INLINE void eight_and_eight(Floats a, __m256* low, __m256* high) {
#if ATTAR_LEVEL >= ATTAR_AVX512
    *low = _mm512_castps512_ps256((__m512)a.piece[0]);
    *high = _mm512_extractf32x8_ps((__m512)a.piece[0], 1);
#else
    *low = (__m256)a.piece[0];
    *high = (__m256)a.piece[1];
#endif
}
ATTAR_INLINE float sum(Floats a) {
    __m256 low, high;
    eight_and_eight(a, &low, &high);
    const __m256 eight = low + high;
    const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    const __m128 two = four + _mm_movehl_ps(four, four);
    return two[0] + two[1];
}
ATTAR_INLINE float largest(Floats a) {
    __m256 low, high;
    eight_and_eight(a, &low, &high);
    const __m256 eight = _mm256_max_ps(low, high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return two[0] > two[1] ? two[0] : two[1];
}
#else
ATTAR_INLINE float sum(Floats a) {
    float lane[16];
    store(lane, a);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
}
ATTAR_INLINE float largest(Floats a) {  // NaN aside
    float lane[16];
    store(lane, a);
    for (int i = 1; i < 16; ++i) lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
    return lane[0];
}
#endif

// 16 numbers of a storage type as floats. Widening is by intrinsics where there are any: GCC 12 turns the vector
// extension's own conversion into halves that it shuffles together, at a third of the speed.
ATTAR_INLINE Floats load_as_floats(const float* from) { return load(from); }
ATTAR_INLINE Floats load_as_floats(const Bfloat16* from) {
    Floats out;
    ATTAR_EACH {
#if ATTAR_LEVEL >= ATTAR_AVX512
        out.piece[p] = (FloatPiece)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif ATTAR_LEVEL >= ATTAR_AVX2
        const __m128i raw = _mm_loadu_si128((const __m128i*)(from + p * WIDTH));
        out.piece[p] = (FloatPiece)_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16);
#else
        typedef std::uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
        Halves raw;
        std::memcpy(&raw, from + p * WIDTH, sizeof raw);
        out.piece[p] = (FloatPiece)(__builtin_convertvector(raw, WordPiece) << 16);
#endif
    }
    return out;
}
ATTAR_INLINE Floats load_as_floats(const Float16* from) {
    Floats out;
    ATTAR_EACH {
#if ATTAR_LEVEL >= ATTAR_AVX512
        __m256i raw;
        std::memcpy(&raw, from, sizeof raw);
        out.piece[p] = (FloatPiece)_mm512_cvtph_ps(raw);
#elif ATTAR_LEVEL >= ATTAR_AVX2
        __m128i raw;
        std::memcpy(&raw, from + p * WIDTH, sizeof raw);
        out.piece[p] = (FloatPiece)_mm256_cvtph_ps(raw);
#else
        for (int i = 0; i < WIDTH; ++i) out.piece[p][i] = to_float(from[p * WIDTH + i]);
#endif
    }
    return out;
}
ATTAR_INLINE Ints load_as_ints(const std::int8_t* from) {
    Ints out;
    ATTAR_EACH {
#if ATTAR_LEVEL >= ATTAR_AVX512
        out.piece[p] = (IntPiece)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif ATTAR_LEVEL >= ATTAR_AVX2
        out.piece[p] = (IntPiece)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + p * WIDTH)));
#else
        typedef std::int8_t Bytes __attribute__((vector_size(WIDTH)));
        Bytes raw;
        std::memcpy(&raw, from + p * WIDTH, sizeof raw);
        out.piece[p] = __builtin_convertvector(raw, IntPiece);
#endif
    }
    return out;
}
ATTAR_INLINE Ints load_as_ints(const std::uint8_t* from) {
    Ints out;
    ATTAR_EACH {
#if ATTAR_LEVEL >= ATTAR_AVX512
        out.piece[p] = (IntPiece)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif ATTAR_LEVEL >= ATTAR_AVX2
        out.piece[p] = (IntPiece)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + p * WIDTH)));
#else
        typedef std::uint8_t Bytes __attribute__((vector_size(WIDTH)));
        Bytes raw;
        std::memcpy(&raw, from + p * WIDTH, sizeof raw);
        out.piece[p] = __builtin_convertvector(raw, IntPiece);
#endif
    }
    return out;
}
ATTAR_INLINE Floats load_as_floats(const std::int8_t* from) { return to_floats(load_as_ints(from)); }
ATTAR_INLINE Floats load_as_floats(const Int8* from) { return load_as_floats(&from->value); }
// Codes of float8 become float16, of which hardware knows the subnormals: E5M2 is its upper byte, and UpperHalf without a
// sign. E4M3 has another bias, so that what comes out is 1/256 of it (its NaN 480/256), which whoever scales sums of products
// makes up for.
constexpr float E4M3_UNIT = 256.0f;
template <int BITS, class T>
ATTAR_INLINE Floats load_shifted(const T* from) {
    Floats out;
    ATTAR_EACH {
#if ATTAR_LEVEL >= ATTAR_AVX512
        const __m256i raw = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from));
        out.piece[p] = (FloatPiece)_mm512_cvtph_ps(_mm256_slli_epi16(raw, BITS));
#elif ATTAR_LEVEL >= ATTAR_AVX2
        const __m128i raw = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)(from + p * WIDTH)));
        out.piece[p] = (FloatPiece)_mm256_cvtph_ps(_mm_slli_epi16(raw, BITS));
#else
        for (int i = 0; i < WIDTH; ++i) out.piece[p][i] = to_float(from[p * WIDTH + i]);
#endif
    }
    return out;
}
ATTAR_INLINE Floats load_as_floats(const E5m2* from) { return load_shifted<8>(from); }
ATTAR_INLINE Floats load_as_floats(const UpperHalf* from) { return load_shifted<7>(from); }
ATTAR_INLINE Floats load_as_floats(const E4m3* from) {
    Floats out;
    ATTAR_EACH {
#if ATTAR_LEVEL >= ATTAR_AVX512
        const __m256i raw = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)), 7);
        out.piece[p] = (FloatPiece)_mm512_cvtph_ps(_mm256_and_si256(raw, _mm256_set1_epi16(-0x4001)));
#elif ATTAR_LEVEL >= ATTAR_AVX2
        const __m128i raw = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)(from + p * WIDTH))), 7);
        out.piece[p] = (FloatPiece)_mm256_cvtph_ps(_mm_and_si128(raw, _mm_set1_epi16(-0x4001)));
#else
        for (int i = 0; i < WIDTH; ++i) {
            const unsigned bits = from[p * WIDTH + i].bits;
            out.piece[p][i] = to_float(Float16{static_cast<std::uint16_t>((bits & 0x80) << 8 | (bits & 0x7f) << 7)});
        }
#endif
    }
    return out;
}

// What each lane chooses of four numbers, by its lowest two bits.
ATTAR_INLINE Floats chosen(const float* four, Ints which) {
    Floats out;
    ATTAR_EACH {
#if ATTAR_LEVEL >= ATTAR_AVX512
        out.piece[p] = (FloatPiece)_mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(four)), (__m512i)which.piece[p]);
#elif ATTAR_LEVEL >= ATTAR_AVX2
        const __m128 loaded = _mm_loadu_ps(four);
        out.piece[p] = (FloatPiece)_mm256_permutevar_ps(_mm256_broadcast_ps(&loaded), (__m256i)which.piece[p]);
#else
        for (int i = 0; i < WIDTH; ++i) out.piece[p][i] = four[which.piece[p][i] & 3];
#endif
    }
    return out;
}
// All bits of the lanes where `a` is `b`, else none.
ATTAR_INLINE Ints equal(Ints a, std::int32_t b) {
    ATTAR_EACH a.piece[p] = a.piece[p] == b;
    return a;
}
// Lanes of `value` where `a` is `b`, else zero.
ATTAR_INLINE Floats where_equal(Ints a, std::int32_t b, Floats value) {
    ATTAR_EACH value.piece[p] = (FloatPiece)((a.piece[p] == b) & (IntPiece)value.piece[p]);
    return value;
}

// Bytes below 16 looked up in a table of 16 bytes.
ATTAR_INLINE Ints lookup(Ints codes, const std::uint8_t* table) {
    ATTAR_EACH {
#if ATTAR_LEVEL >= ATTAR_AVX512
        const __m512i all_of = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
        codes.piece[p] = (IntPiece)_mm512_shuffle_epi8(all_of, (__m512i)codes.piece[p]);
#elif ATTAR_LEVEL >= ATTAR_AVX2
        const __m256i all_of = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
        codes.piece[p] = (IntPiece)_mm256_shuffle_epi8(all_of, (__m256i)codes.piece[p]);
#elif ATTAR_LEVEL == ATTAR_NEON
        codes.piece[p] = (IntPiece)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes.piece[p]);
#else
        std::uint8_t bytes[4 * WIDTH];
        std::memcpy(bytes, &codes.piece[p], sizeof bytes);
        for (std::uint8_t& byte : bytes) byte = table[byte & 15];
        std::memcpy(&codes.piece[p], bytes, sizeof bytes);
#endif
    }
    return codes;
}

// A table of 16 floats, and what the lowest four bits of each lane stand for in it.
struct FloatTable {
    Floats low;
};
ATTAR_INLINE FloatTable float_table(const float* table) { return {load(table)}; }
ATTAR_INLINE Floats lookup(Ints codes, const FloatTable& table) {
    Floats out;
#if ATTAR_LEVEL >= ATTAR_AVX512
    out.piece[0] = (FloatPiece)_mm512_permutexvar_ps((__m512i)codes.piece[0], (__m512)table.low.piece[0]);
#elif ATTAR_LEVEL >= ATTAR_AVX2
    ATTAR_EACH {
        const __m256i at = (__m256i)codes.piece[p];
        const __m256 low = _mm256_permutevar8x32_ps((__m256)table.low.piece[0], at);
        const __m256 high = _mm256_permutevar8x32_ps((__m256)table.low.piece[1], at);
        out.piece[p] = (FloatPiece)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
    }
#else
    float values[16];
    store(values, table.low);
    ATTAR_EACH for (int i = 0; i < WIDTH; ++i) out.piece[p][i] = values[codes.piece[p][i] & 15];
#endif
    return out;
}

// acc[lane] += sum over j < 4 of code[4 lane + j] * x[j]: 64 unsigned codes, four signed bytes x for all lanes.
// `codes` below 128 only; `dot4_wide` takes them all.
ATTAR_INLINE Ints dot4(Ints acc, Ints codes, std::int32_t x) {
    ATTAR_EACH {
#if ATTAR_LEVEL >= ATTAR_AVX512
        acc.piece[p] = (IntPiece)_mm512_dpbusd_epi32((__m512i)acc.piece[p], (__m512i)codes.piece[p], _mm512_set1_epi32(x));
#elif ATTAR_LEVEL >= ATTAR_AVXVNNI
        acc.piece[p] =
            (IntPiece)_mm256_dpbusd_avx_epi32((__m256i)acc.piece[p], (__m256i)codes.piece[p], _mm256_set1_epi32(x));
#elif ATTAR_LEVEL >= ATTAR_AVX2
        const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes.piece[p], _mm256_set1_epi32(x));  // at most 2 * 127 * 128
        acc.piece[p] += (IntPiece)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif ATTAR_LEVEL == ATTAR_NEON
        acc.piece[p] = (IntPiece)vdotq_s32((int32x4_t)acc.piece[p], (int8x16_t)codes.piece[p],
                                           vreinterpretq_s8_s32(vdupq_n_s32(x)));
#else
        for (int i = 0; i < WIDTH; ++i) {
            const WordPiece words = (WordPiece)codes.piece[p];
            for (int j = 0; j < 4; ++j)
                acc.piece[p][i] += static_cast<std::int32_t>(words[i] >> 8 * j & 0xff) *
                                   static_cast<std::int8_t>(static_cast<std::uint32_t>(x) >> 8 * j & 0xff);
        }
#endif
    }
    return acc;
}
#if ATTAR_LEVEL >= ATTAR_AVX512
// Codes of all 8 bits, and in every lane of `x` bytes of its own.
ATTAR_INLINE Ints dot4(Ints acc, Ints codes, Ints x) {
    acc.piece[0] = (IntPiece)_mm512_dpbusd_epi32((__m512i)acc.piece[0], (__m512i)codes.piece[0], (__m512i)x.piece[0]);
    return acc;
}
// Four bytes in every lane, read where they lie: by way of a register they would take one of the two units that multiply.
ATTAR_INLINE Ints broadcast_from(const std::int8_t* from) {
#if defined(ATTAR_EMULATE)
    std::int32_t four;
    std::memcpy(&four, from, sizeof four);
    return all(four);
#else
    struct Four {
        std::int8_t bytes[4];
    };
    __m512i out;
    asm("vpbroadcastd %1, %0" : "=v"(out) : "m"(*reinterpret_cast<const Four*>(from)));
    Ints found;
    found.piece[0] = (IntPiece)out;
    return found;
#endif
}
// a + b, or a alone; one instruction, and no branch.
ATTAR_INLINE Ints add_if(bool condition, Ints a, Ints b) {
    const __mmask16 lanes = condition ? 0xffff : 0;
    a.piece[0] = (IntPiece)_mm512_mask_add_epi32((__m512i)a.piece[0], lanes, (__m512i)a.piece[0], (__m512i)b.piece[0]);
    return a;
}
#endif
ATTAR_INLINE Ints dot4_wide(Ints acc, Ints codes, std::int32_t x) {
#if ATTAR_LEVEL == ATTAR_AVX2 || ATTAR_LEVEL == ATTAR_NEON  // pairs of products may pass int16; codes may pass int8
    const Ints low = dot4(all(0), codes & all(0x0f0f0f0f), x);
    const Ints high = dot4(all(0), shift_right(codes, 4) & all(0x0f0f0f0f), x);
    return acc + low + shift_left(high, 4);
#else
    return dot4(acc, codes, x);
#endif
}

#if ATTAR_LEVEL == ATTAR_AVX2
// acc[lane] += the product of two numbers of 16 bits in each lane with the two of x.
ATTAR_INLINE Ints dot2(Ints acc, Ints pairs, std::int32_t x) {
    ATTAR_EACH acc.piece[p] += (IntPiece)_mm256_madd_epi16((__m256i)pairs.piece[p], _mm256_set1_epi32(x));
    return acc;
}
// Numbers of 16 bits: a - b, and the lower halves of a * b.
ATTAR_INLINE Ints minus_halves(Ints a, Ints b) {
    ATTAR_EACH a.piece[p] = (IntPiece)_mm256_sub_epi16((__m256i)a.piece[p], (__m256i)b.piece[p]);
    return a;
}
ATTAR_INLINE Ints times_halves(Ints a, Ints b) {
    ATTAR_EACH a.piece[p] = (IntPiece)_mm256_mullo_epi16((__m256i)a.piece[p], (__m256i)b.piece[p]);
    return a;
}
#endif

// e^x within 2 units in the last place, the same bits at every level; below -87 it is 0, e^-inf too, and above
// 88 it is e^88. Not for NaN.
ATTAR_INLINE Floats exp(Floats x) {
    const Floats rounder = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer, half to even
    const Floats bounded = all(0.0f) - max(all(0.0f) - max(x, all(-87.0f)), all(-88.0f));
    const Floats n = fma(bounded, all(1.44269504088896341f), rounder) - rounder;
    Floats r = fma(n, all(-0.693145751953125f), bounded);     // x - n ln 2, with ln 2 in two parts
    r = fma(n, all(-1.42860682030941723e-6f), r);             // |r| <= ln 2 / 2
    Floats y = all(1.9875691500e-4f);
    y = fma(y, r, all(1.3981999507e-3f));
    y = fma(y, r, all(8.3334519073e-3f));
    y = fma(y, r, all(4.1665795894e-2f));
    y = fma(y, r, all(1.6666665459e-1f));
    y = fma(y, r, all(5.0000001201e-1f));
    y = fma(y, r * r, r) + all(1.0f);
    Ints exponent;
    ATTAR_EACH exponent.piece[p] = __builtin_convertvector(n.piece[p], IntPiece);
    const Floats value = from_bits(bits_of(y) + shift_left(exponent, 23));
    Floats out;
    ATTAR_EACH {
        const IntPiece kept = x.piece[p] > FloatPiece{} - 87.0f;
        out.piece[p] = (FloatPiece)(kept & (IntPiece)value.piece[p]);
    }
    return out;
}
