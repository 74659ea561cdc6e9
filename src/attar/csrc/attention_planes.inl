// Part of attention.inl: pages in planes. A split's codes become levels of int8 in the thread's buffers, laid out as int8
// pages are, and whatever is done with those is done with these. Queries, keys, values and mixtures are turned here.

// y = x matrix for `rows` rows x [rows, size] of `size` columns, a multiple of 16; each output is one chain in the order
// of the matrix' rows, however many of them are held at once.
template <int R, int C>
ATTAR_INLINE void turn_columns(const float* x, const float* matrix, std::int64_t size, float* y) {
    Floats acc[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c] = all(0.0f);
    for (std::int64_t d = 0; d < size; ++d) {
        Floats row[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) row[c] = load(matrix + d * size + 16 * c);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const Floats from = all(x[r * size + d]);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) acc[r][c] = fma(from, row[c], acc[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) store(y + r * size + 16 * c, acc[r][c]);
}
template <int R>
ATTAR_INLINE void turn_rows(const float* x, const float* matrix, std::int64_t size, float* y) {
    std::int64_t c = 0;
    for (; c + 16 * ABREAST <= size; c += 16 * ABREAST) turn_columns<R, ABREAST>(x, matrix + c, size, y + c);
    for (; c < size; c += 16) turn_columns<R, 1>(x, matrix + c, size, y + c);
}
static void turn(const float* x, std::int64_t rows, const float* matrix, std::int64_t size, float* y) {
    std::int64_t r = 0;
    for (; r + 4 <= rows; r += 4) turn_rows<4>(x + r * size, matrix, size, y + r * size);
    for (; r < rows; ++r) turn_rows<1>(x + r * size, matrix, size, y + r * size);
}

// ---- reading

// Codes 32 at + .. 32 at + 31 of a bucket's 128, or 64 of them where a register is as wide, from a plane of W bits.
#if ATTAR_LEVEL >= ATTAR_AVX512
template <int W>
ATTAR_INLINE __m512i codes_of(const std::uint8_t* plane, int half) {
    if (W == 4) {
        const __m512i both = _mm512_loadu_si512(plane);
        return _mm512_and_si512(half ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
    }
    if (W == 2) {
        const __m512i four = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane)));
        const __m512i by = _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2);
        return _mm512_and_si512(_mm512_srlv_epi64(half ? _mm512_srli_epi64(four, 4) : four, by), _mm512_set1_epi8(3));
    }
    const __m512i eight = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(plane)));
    const __m512i by = _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3);
    return _mm512_and_si512(_mm512_srlv_epi64(half ? _mm512_srli_epi64(eight, 4) : eight, by), _mm512_set1_epi8(1));
}
#elif ATTAR_LEVEL >= ATTAR_AVX2
template <int W>
ATTAR_INLINE __m256i codes_of(const std::uint8_t* plane, int quarter) {
    if (W == 1) {
        const __m256i eight = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(plane)));
        const __m256i by = _mm256_setr_epi64x(2 * quarter, 2 * quarter, 2 * quarter + 1, 2 * quarter + 1);
        return _mm256_and_si256(_mm256_srlv_epi64(eight, by), _mm256_set1_epi8(1));
    }
    const std::uint8_t* from = plane + (W == 4 ? quarter % 2 * 32 : 0);
    const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm256_and_si256(_mm256_srli_epi16(some, W == 4 ? quarter / 2 * 4 : 2 * quarter),
                            _mm256_set1_epi8((1 << W) - 1));
}
#endif

// The levels of a bucket's 128 codes of B bits, 32 by 32 to to[0], to[step], to[2 step] and to[3 step].
template <int B>
ATTAR_INLINE void levels_of(const std::uint8_t* planes, std::int8_t* to, std::int64_t step) {
    constexpr int LOW = B >= 4 ? 4 : B >= 2 ? 2 : 1, HIGH = B - LOW;  // bits of the first plane, and of the one behind
    const std::int8_t* table = TABLES.level[B];
    const std::uint8_t* behind = planes + 16 * LOW;
#if ATTAR_LEVEL >= ATTAR_AVX512
    const auto part = [table](int i) {
        return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table + 16 * i)));
    };
    for (int half = 0; half < 2; ++half) {
        __m512i low = codes_of<LOW>(planes, half), out;
        if constexpr (LOW == 4) {
            out = _mm512_shuffle_epi8(part(0), low);
            if constexpr (HIGH > 0) {
                const __m512i high = codes_of<HIGH>(behind, half);
#pragma GCC unroll 3
                for (int i = 1; i < 1 << HIGH; ++i) {
                    const __mmask64 here = _mm512_cmpeq_epi8_mask(high, _mm512_set1_epi8(static_cast<char>(i)));
                    out = _mm512_mask_shuffle_epi8(out, here, part(i), low);
                }
            }
        } else {
            if constexpr (HIGH > 0) low = _mm512_or_si512(low, _mm512_slli_epi16(codes_of<HIGH>(behind, half), LOW));
            out = _mm512_shuffle_epi8(part(0), low);
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * half * step), _mm512_castsi512_si256(out));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (2 * half + 1) * step), _mm512_extracti64x4_epi64(out, 1));
    }
#elif ATTAR_LEVEL >= ATTAR_AVX2
    const auto part = [table](int i) {
        return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table + 16 * i)));
    };
    for (int quarter = 0; quarter < 4; ++quarter) {
        __m256i low = codes_of<LOW>(planes, quarter), out;
        if constexpr (LOW == 4) {
            out = _mm256_shuffle_epi8(part(0), low);
            if constexpr (HIGH > 0) {
                const __m256i high = codes_of<HIGH>(behind, quarter);
                for (int i = 1; i < 1 << HIGH; ++i) {
                    const __m256i here = _mm256_cmpeq_epi8(high, _mm256_set1_epi8(static_cast<char>(i)));
                    out = _mm256_blendv_epi8(out, _mm256_shuffle_epi8(part(i), low), here);
                }
            }
        } else {
            if constexpr (HIGH > 0)
                low = _mm256_or_si256(low, _mm256_slli_epi16(codes_of<HIGH>(behind, quarter), LOW));
            out = _mm256_shuffle_epi8(part(0), low);
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + quarter * step), out);
    }
#else
    const auto code = [](const std::uint8_t* plane, int width, int i) {
        return plane[i % (16 * width)] >> width * (i / (16 * width)) & ((1 << width) - 1);
    };
    for (int i = 0; i < 128; ++i) {
        int found = code(planes, LOW, i);
        if constexpr (HIGH > 0) found |= code(behind, HIGH, i) << LOW;
        to[i / 32 * step + i % 32] = table[found];
    }
#endif
}

// One run of a head, of buckets of so many bits each, as int8; `across` from one bucket to the next.
static void expand_run(const std::uint8_t* raw, const std::uint8_t* bits, std::int64_t buckets, std::int8_t* to,
                       std::int64_t step, std::int64_t across) {
    for (std::int64_t i = 0; i < buckets; ++i, to += across) {
        switch (bits[i]) {
            case 1: levels_of<1>(raw, to, step); break;
            case 2: levels_of<2>(raw, to, step); break;
            case 3: levels_of<3>(raw, to, step); break;
            case 4: levels_of<4>(raw, to, step); break;
            case 5: levels_of<5>(raw, to, step); break;
            case 6: levels_of<6>(raw, to, step); break;
            default:
                for (int quarter = 0; quarter < 4; ++quarter) std::memset(to + quarter * step, 0, 32);
        }
        raw += 16 * bits[i];
    }
}

// A slot's int8 codes [size] to its lane of a run of keys, and of values.
ATTAR_INLINE void put_key(const std::int8_t* codes, std::int64_t size, std::int64_t lane, std::int8_t* run) {
    for (std::int64_t d = 0; d < size; d += 4) std::memcpy(run + 16 * d + 4 * lane, codes + d, 4);
}
ATTAR_INLINE void put_value(const std::int8_t* codes, std::int64_t size, std::int64_t padded, std::int64_t lane,
                            std::int8_t* run) {
    run += lane / 4 * 4 * padded + lane % 4;
    for (std::int64_t d = 0; d < size; ++d) run[4 * d] = codes[d];
}

// The keys of a split's runs, of a tile's head, as int8, or the values: `seen` names them from then on. Of unfinished
// blocks, whose numbers have 16 bits, each slot becomes int8 by a scale of its own, which is far below what finished ones
// have lost. Meanwhile the same of the split behind is on its way into the second cache.
static void expand(const Pages& pages, const Sizes& sizes, const Tile& tile, bool value, Seen<std::int8_t>& seen,
                   const Seen<std::int8_t>& next) {
    const std::int64_t size = sizes.head_dim, buckets = size / 8;
    const std::uint8_t* bits = (value ? pages.bases->values : pages.bases->keys).bits + tile.head * buckets;
    const std::int64_t run_size = value ? sizes.value_run : sizes.key_run, step = value ? 4 * sizes.padded : 32;
    std::int8_t* to = static_cast<std::int8_t*>(tile.expanded) + (value ? SPLIT / 16 * sizes.key_run : 0);
    float* scales = tile.expanded_scales + (value ? SPLIT : 0);
    const void* every = value ? pages.value_scales : pages.key_scales;
    const Bfloat16* recent = value ? pages.recent_values : pages.recent_keys;
    const std::int8_t** named = value ? seen.values : seen.keys;
    const std::uint8_t *const *raw = value ? seen.raw_values : seen.raw_keys,
                             *const *ahead = value ? next.raw_values : next.raw_keys;
    for (int i = 0; i < seen.runs; ++i, to += run_size, scales += 16) {
        if (i < next.runs)
            for (std::int64_t at = 0; at < sizes.raw_key; at += 64) ask_for(ahead[i], at);
        if (seen.recent[i]) {
            alignas(64) float x[MOST_COLUMNS];
            alignas(64) std::int8_t codes[MOST_COLUMNS];
            for (int lane = 0; lane < 16; ++lane) {
                const std::int64_t at = (seen.at[i] + lane) * size;
                for (std::int64_t d = 0; d < size; d += 16) store(x + d, load_as_floats(recent + at + d));
                quantize(x, size, codes, scales + lane);
                value ? put_value(codes, size, sizes.padded, lane, to) : put_key(codes, size, lane, to);
            }
        } else {
            expand_run(raw[i], bits, buckets, to, step, value ? 32 : 128);
            const std::int64_t at = 16 * seen.at[i];
            store(scales, pages.byte_scales ? load_as_floats(static_cast<const UpperHalf*>(every) + at)
                                            : load_as_floats(static_cast<const Bfloat16*>(every) + at));
        }
        named[i] = to;
        (value ? seen.value_scales : seen.key_scales)[i] = scales;
    }
}

// ---- writing

// Rounded half to even; what is beyond it is infinite.
ATTAR_INLINE Float16 to_half(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    std::uint32_t half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // 65520
        half = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // 2^-14: it counts units of 2^-24
        float small;
        std::memcpy(&small, &magnitude, sizeof small);
        small = small * 0x1p24f + ROUNDER;
        std::memcpy(&half, &small, sizeof half);
        half &= 0xffffu;
    } else {
        half = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
    }
    return Float16{static_cast<std::uint16_t>(sign | half)};
}

// Numbers of y [size] over a scale, as the integers nearest to them from -127 to 127. NaN may become any of these.
static void nearest_integers(const float* y, std::int64_t size, float scale, std::int32_t* at) {
    const Floats inverse = all(1.0f / scale), rounder = all(ROUNDER), last = all(127.0f);
    for (std::int64_t d = 0; d < size; d += 16) {
        const Floats x = max(load(y + d) * inverse, all(0.0f) - last);
        const Floats bounded = all(0.0f) - max(all(0.0f) - x, all(0.0f) - last);
        store_bytes(at + d, bits_of(bounded + rounder) - bits_of(rounder));
    }
}

// The `i`th scale to try for numbers of a root mean square of `length`.
static void candidate(float length, int i, Bfloat16* scale) {
    const float wanted = length * STEPS[i];
    put(&wanted, 1, 1, scale);
}
static void candidate(float length, int i, UpperHalf* scale) {
    constexpr int INFINITE = 0x7c00 >> 7;
    const int half = to_half(length).bits >> 7, found = half + i + LEAST_BYTE;
    scale->bits = static_cast<std::uint8_t>(half >= INFINITE || found > INFINITE ? INFINITE : found < 0 ? 0 : found);
}

// Coordinates y [size] of one head to codes, by the best scale tried, which is returned; NaN where y is not finite, or so
// large that no scale has an error that is. Scales of a byte are tried beyond TRIED as long as each is better.
template <class Scale>
static Scale quantize_coordinates(const float* y, std::int64_t size, const Coordinates& of, std::int64_t head,
                                  std::uint8_t* codes) {
    const float *shares = of.shares + head * size, *weights = of.weights + head * size;
    const std::uint8_t* bits = of.bits + head * (size / 8);
    Floats squares = all(0.0f);
    for (std::int64_t d = 0; d < size; d += 16) {
        const Floats x = load(y + d) * load(shares + d);
        squares = fma(x, x, squares);
    }
    const float length = std::sqrt(sum(squares));
    alignas(64) std::int32_t at[MOST_COLUMNS];
    alignas(64) float levels[MOST_COLUMNS];
    float least = std::numeric_limits<float>::infinity(), chosen = 1.0f;
    Scale best;
    best.bits = static_cast<decltype(best.bits)>(sizeof best == 1 ? 0x7e00u >> 7 : 0x7fc0u);  // a NaN
    constexpr bool GOES_ON = sizeof(Scale) == 1;
    bool better = false;
    for (int i = 0; i < TRIED || (GOES_ON && better); ++i) {
        Scale tried;
        candidate(length, i, &tried);
        const float scale = to_float(tried), by = scale < TINY ? 1.0f : scale;
        nearest_integers(y, size, by, at);
        for (std::int64_t d = 0; d < size; d += 8) {
            const float* nearest = TABLES.nearest[bits[d / 8]] + 127;
            for (int j = 0; j < 8; ++j) levels[d + j] = nearest[at[d + j]];
        }
        Floats error = all(0.0f);
        for (std::int64_t d = 0; d < size; d += 16) {
            const Floats off = load(y + d) - all(scale) * load(levels + d);
            error = fma(off * off, load(weights + d), error);
        }
        const float found = sum(error);
        better = found < least;
        if (!better) continue;
        least = found;
        best = tried;
        chosen = by;
    }
    nearest_integers(y, size, chosen, at);
    for (std::int64_t d = 0; d < size; ++d) codes[d] = TABLES.code[bits[d / 8]][at[d] + 127];
    return best;
}

// Codes [size] of one slot to its bits of the planes of a run.
static void put_planes(const std::uint8_t* codes, std::int64_t size, const std::uint8_t* bits, std::int64_t lane,
                       bool value, std::uint8_t* run) {
    for (std::int64_t bucket = 0; bucket < size / 8; ++bucket, codes += 8) {
        for (int from = 0, left = bits[bucket]; left > 0;) {
            const int width = left >= 4 ? 4 : left >= 2 ? 2 : 1, all_ones = (1 << width) - 1;
            for (std::int64_t c = 0; c < 8; ++c) {
                const std::int64_t i = value ? 32 * (lane / 4) + 4 * c + lane % 4 : 64 * (c / 4) + 4 * lane + c % 4;
                const std::int64_t shift = width * (i / (16 * width));
                std::uint8_t& byte = run[i % (16 * width)];
                const int one = codes[c] >> from & all_ones;
                byte = static_cast<std::uint8_t>((byte & ~(all_ones << shift)) | one << shift);
            }
            run += 16 * width;
            from += width;
            left -= width;
        }
    }
}

// Coordinates of key-value head g to their slot of finished blocks.
static void finish_slot(const Pages& pages, const Sizes& sizes, std::int64_t g, std::int64_t slot, const float* y,
                        bool value) {
    alignas(64) std::uint8_t codes[MOST_COLUMNS];
    const Coordinates& of = value ? pages.bases->values : pages.bases->keys;
    const std::int64_t block = slot / sizes.block, place = slot % sizes.block, head = block * sizes.kv_heads + g;
    void* scales = value ? pages.value_scales : pages.key_scales;
    const std::int64_t at = head * sizes.block + place;
    if (pages.byte_scales)
        static_cast<UpperHalf*>(scales)[at] = quantize_coordinates<UpperHalf>(y, sizes.head_dim, of, g, codes);
    else
        static_cast<Bfloat16*>(scales)[at] = quantize_coordinates<Bfloat16>(y, sizes.head_dim, of, g, codes);
    auto* run = static_cast<std::uint8_t*>(value ? pages.values : pages.keys) +
                (head * (sizes.block / 16) + place / 16) * sizes.raw_key;
    put_planes(codes, sizes.head_dim, of.bits + g * (sizes.head_dim / 8), place % 16, value, run);
}
