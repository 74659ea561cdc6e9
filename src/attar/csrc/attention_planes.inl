// Part of attention.inl: pages in planes. A split's codes become levels of int8 in the thread's buffers, laid out as int8
// pages are, and whatever is done with those is done with these. Queries, keys, values and mixtures are turned here.

// y = (x - mean) matrix of `size` columns, a multiple of 16; each output is one chain in the order of the rows.
template <int C>
ATTAR_INLINE void turn_columns(const float* x, const float* mean, const float* matrix, std::int64_t size, float* y) {
    Floats acc[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[c] = all(0.0f);
    for (std::int64_t d = 0; d < size; ++d) {
        const Floats from = all(mean == nullptr ? x[d] : x[d] - mean[d]);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[c] = fma(from, load(matrix + d * size + 16 * c), acc[c]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(y + 16 * c, acc[c]);
}
static void turn(const float* x, const float* mean, const float* matrix, std::int64_t size, float* y) {
    std::int64_t c = 0;
    for (; c + 64 <= size; c += 64) turn_columns<4>(x, mean, matrix + c, size, y + c);
    for (; c < size; c += 16) turn_columns<1>(x, mean, matrix + c, size, y + c);
}

// ---- reading

// The levels of 64 codes, whose bits are 64 neighbouring bits of each of `bits` planes.
ATTAR_INLINE void levels_of(const std::uint8_t* planes, int bits, std::int8_t* to) {
    const std::int8_t* table = TABLES.level[bits];
#if ATTAR_LEVEL >= ATTAR_AVX512
    __mmask64 mask[6] = {};
    __m512i low = _mm512_setzero_si512();
#pragma GCC unroll 6
    for (int b = 0; b < 6; ++b) {
        if (b >= bits) break;
        std::uint64_t plane;
        std::memcpy(&plane, planes + 16 * b, sizeof plane);
        mask[b] = plane;
        if (b < 4) low = _mm512_mask_add_epi8(low, plane, low, _mm512_set1_epi8(static_cast<char>(1 << b)));
    }
    const auto part = [table](int i) {
        return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table + 16 * i)));
    };
    __m512i out = _mm512_shuffle_epi8(part(0), low);
    if (bits > 4) out = _mm512_mask_shuffle_epi8(out, mask[4], part(1), low);
    if (bits > 5) {
        out = _mm512_mask_shuffle_epi8(out, mask[5] & ~mask[4], part(2), low);
        out = _mm512_mask_shuffle_epi8(out, mask[5] & mask[4], part(3), low);
    }
    _mm512_storeu_si512(to, out);
#elif ATTAR_LEVEL >= ATTAR_AVX2
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3,
                                            3, 3, 3, 3, 3, 3);
    const __m256i each = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
    for (int half = 0; half < 2; ++half) {
        __m256i codes = _mm256_setzero_si256();
        for (int b = 0; b < bits; ++b) {
            std::int32_t plane;
            std::memcpy(&plane, planes + 16 * b + 4 * half, sizeof plane);
            const __m256i bit = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(plane), spread), each);
            codes = _mm256_or_si256(codes, _mm256_and_si256(_mm256_cmpeq_epi8(bit, each),
                                                            _mm256_set1_epi8(static_cast<char>(1 << b))));
        }
        const __m256i low = _mm256_and_si256(codes, _mm256_set1_epi8(15));
        const __m256i high = _mm256_and_si256(codes, _mm256_set1_epi8(0x30));
        __m256i out = _mm256_setzero_si256();
        for (int i = 0; i < (bits > 4 ? 1 << (bits - 4) : 1); ++i) {
            const __m128i part = _mm_load_si128(reinterpret_cast<const __m128i*>(table + 16 * i));
            const __m256i found = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(part), low);
            const __m256i here = _mm256_cmpeq_epi8(high, _mm256_set1_epi8(static_cast<char>(16 * i)));
            out = _mm256_or_si256(out, _mm256_and_si256(found, here));
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32 * half), out);
    }
#else
    for (int i = 0; i < 64; ++i) {
        int code = 0;
        for (int b = 0; b < bits; ++b) code |= (planes[16 * b + i / 8] >> i % 8 & 1) << b;
        to[i] = table[code];
    }
#endif
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

// The runs of a split, of a tile's head, as int8: `seen` names them from then on. Of unfinished blocks, whose numbers
// have 16 bits, each slot becomes int8 by a scale of its own, which is far below what finished ones have lost.
static void expand(const Pages& pages, const Sizes& sizes, const Tile& tile, Seen<std::int8_t>& seen) {
    const std::int64_t size = sizes.head_dim, buckets = size / 8;
    const std::uint8_t* key_bits = pages.bases->keys.bits + tile.head * buckets;
    const std::uint8_t* value_bits = pages.bases->values.bits + tile.head * buckets;
    for (int i = 0; i < seen.runs; ++i) {
        std::int8_t* keys = tile.expanded + i * sizes.key_run;
        std::int8_t* values = tile.expanded + SPLIT / 16 * sizes.key_run + i * sizes.value_run;
        float *key_scales = tile.expanded_scales + 16 * i, *value_scales = key_scales + SPLIT;
        if (seen.recent[i]) {
            alignas(64) float x[MOST_COLUMNS];
            alignas(64) std::int8_t codes[MOST_COLUMNS];
            for (int lane = 0; lane < 16; ++lane) {
                const std::int64_t at = (seen.at[i] + lane) * size;
                for (std::int64_t d = 0; d < size; d += 16) store(x + d, load_as_floats(pages.recent_keys + at + d));
                quantize(x, size, codes, key_scales + lane);
                put_key(codes, size, lane, keys);
                for (std::int64_t d = 0; d < size; d += 16) store(x + d, load_as_floats(pages.recent_values + at + d));
                quantize(x, size, codes, value_scales + lane);
                put_value(codes, size, sizes.padded, lane, values);
            }
        } else {
            const auto* key = static_cast<const std::uint8_t*>(pages.keys) + seen.at[i] * sizes.raw_run;
            const auto* value = static_cast<const std::uint8_t*>(pages.values) + seen.at[i] * sizes.raw_run;
            for (std::int64_t bucket = 0; bucket < buckets; ++bucket) {
                for (int half = 0; half < 2; ++half) {
                    levels_of(key + 8 * half, key_bits[bucket], keys + 64 * (2 * bucket + half));
                    alignas(64) std::int8_t two[64];  // four slots of 8 columns, and the four behind them
                    levels_of(value + 8 * half, value_bits[bucket], two);
                    std::int8_t* to = values + 2 * half * 4 * sizes.padded + 32 * bucket;
                    std::memcpy(to, two, 32);
                    std::memcpy(to + 4 * sizes.padded, two + 32, 32);
                }
                key += 16 * key_bits[bucket];
                value += 16 * value_bits[bucket];
            }
            store(key_scales, load_as_floats(static_cast<const Bfloat16*>(pages.key_scales) + 16 * seen.at[i]));
            store(value_scales, load_as_floats(static_cast<const Bfloat16*>(pages.value_scales) + 16 * seen.at[i]));
        }
        seen.keys[i] = keys;
        seen.values[i] = values;
        seen.key_scales[i] = key_scales;
        seen.value_scales[i] = value_scales;
    }
}

// ---- writing

// Coordinates y [size] of one head to codes, by the best of STEPS scales, which is returned; NaN where y is not finite.
static Bfloat16 quantize_coordinates(const float* y, std::int64_t size, const Coordinates& of, std::int64_t head,
                                     std::uint8_t* codes) {
    const float *shares = of.shares + head * size, *weights = of.weights + head * size;
    const std::uint8_t* bits = of.bits + head * (size / 8);
    Floats squares = all(0.0f), broken = all(0.0f);
    for (std::int64_t d = 0; d < size; d += 16) {
        const Floats x = load(y + d) * load(shares + d);
        squares = fma(x, x, squares);
        broken = fma(load(y + d), all(0.0f), broken);
    }
    const float length = std::sqrt(sum(squares)), lost = sum(broken);
    const Floats rounder = all(ROUNDER), last = all(127.0f);
    alignas(64) std::int32_t at[MOST_COLUMNS];
    alignas(64) float levels[MOST_COLUMNS];
    float least = std::numeric_limits<float>::infinity();
    Bfloat16 best{};
    std::memset(codes, 0, static_cast<std::size_t>(size));
    for (const float step : STEPS) {
        Bfloat16 rounded;
        const float wanted = length * step;
        put(&wanted, 1, 1, &rounded);
        const float scale = to_float(rounded), by = scale == 0.0f ? 1.0f : scale;
        for (std::int64_t d = 0; d < size; d += 16) {
            const Floats x = max(load(y + d) / all(by), all(0.0f) - last);
            const Floats bounded = all(0.0f) - max(all(0.0f) - x, all(0.0f) - last);
            store_bytes(at + d, bits_of(bounded + rounder) - bits_of(rounder));
        }
        for (std::int64_t d = 0; d < size; ++d) {
            const int b = bits[d / 8];
            levels[d] = TABLES.level[b][TABLES.code[b][at[d] + 127]];
        }
        Floats error = all(0.0f);
        for (std::int64_t d = 0; d < size; d += 16) {
            const Floats off = load(y + d) - all(by) * load(levels + d);
            error = fma(off * off, load(weights + d), error);
        }
        const float found = sum(error);
        if (!(found < least)) continue;
        least = found;
        best = rounded;
        for (std::int64_t d = 0; d < size; ++d) codes[d] = TABLES.code[bits[d / 8]][at[d] + 127];
    }
    if (lost != lost) best.bits = 0x7fc0u;
    return best;
}

// Codes [size] of one slot to its bits of the planes of a run.
static void put_planes(const std::uint8_t* codes, std::int64_t size, const std::uint8_t* bits, std::int64_t lane,
                       bool value, std::uint8_t* run) {
    for (std::int64_t d = 0; d < size; ++d) {
        const std::int64_t c = d % 8, bit = value ? 32 * (lane / 4) + 4 * c + lane % 4 : 64 * (c / 4) + 4 * lane + c % 4;
        const auto one = static_cast<std::uint8_t>(1u << bit % 8);
        for (int b = 0; b < bits[d / 8]; ++b) {
            std::uint8_t& byte = run[16 * b + bit / 8];
            byte = static_cast<std::uint8_t>(codes[d] >> b & 1 ? byte | one : byte & ~one);
        }
        if (c == 7) run += 16 * bits[d / 8];
    }
}

// Coordinates of key-value head g to their slot of finished blocks.
static void finish_slot(const Pages& pages, const Sizes& sizes, std::int64_t g, std::int64_t slot, const float* y,
                        bool value) {
    alignas(64) std::uint8_t codes[MOST_COLUMNS];
    const Coordinates& of = value ? pages.bases->values : pages.bases->keys;
    const std::int64_t block = slot / sizes.block, place = slot % sizes.block, head = block * sizes.kv_heads + g;
    auto* scales = static_cast<Bfloat16*>(value ? pages.value_scales : pages.key_scales) + head * sizes.block + place;
    *scales = quantize_coordinates(y, sizes.head_dim, of, g, codes);
    auto* run = static_cast<std::uint8_t*>(value ? pages.values : pages.keys) +
                (head * (sizes.block / 16) + place / 16) * sizes.raw_run;
    put_planes(codes, sizes.head_dim, of.bits + g * (sizes.head_dim / 8), place % 16, value, run);
}

// All rows of key-value head g, with the query heads that read it. Slots of a run share bytes: one thread writes them.
static void write_head(const Write& what, const Pages& pages, const Sizes& sizes, std::int64_t g, float* x, float* y) {
    const std::int64_t size = sizes.head_dim, half = what.turned / 2, each = what.heads / sizes.kv_heads;
    const Coordinates &keys = pages.bases->keys, &values = pages.bases->values;
    for (std::int64_t row = 0, b = 0; row < what.rows; ++row) {
        const std::int64_t angle = what.cos == nullptr ? 0 : what.angle[row] * half;
        const float* cos = what.cos == nullptr ? nullptr : what.cos + angle;
        const float* sin = what.cos == nullptr ? nullptr : what.sin + angle;
        for (std::int64_t h = g * each; h < (g + 1) * each; ++h) {
            std::memcpy(x, what.q + row * what.q_stride + h * size, sizeof(float) * size);
            prepare(x, size, size, what.q_norm, what.eps, what.offset, cos, sin, half);
            turn(x, nullptr, keys.back + g * size * size, size, what.q_out + (row * what.heads + h) * size);
        }
        const std::int64_t slot = what.slots[row], place = slot % sizes.block;
        std::int64_t tail = 0;
        if (pages.recent_keys != nullptr) {
            while (row >= what.row_starts[b + 1]) ++b;
            tail = (what.tails[b] * sizes.kv_heads + g) * sizes.block;
        }
        for (const bool value : {false, true}) {
            const Coordinates& of = value ? values : keys;
            if (value) {
                std::memcpy(x, what.v + row * what.v_stride + g * size, sizeof(float) * size);
            } else {
                std::memcpy(x, what.k + row * what.k_stride + g * size, sizeof(float) * size);
                prepare(x, size, size, what.k_norm, what.eps, what.offset, cos, sin, half);
            }
            turn(x, of.mean + g * size, of.into + g * size * size, size, y);
            if (pages.recent_keys == nullptr) {
                finish_slot(pages, sizes, g, slot, y, value);
                continue;
            }
            Bfloat16* recent = (value ? pages.recent_values : pages.recent_keys) + tail * size;
            put(y, size, 1, recent + place * size);
            if (place != sizes.block - 1) continue;
            for (std::int64_t i = 0; i < sizes.block; ++i) {
                for (std::int64_t d = 0; d < size; d += 16) store(y + d, load_as_floats(recent + i * size + d));
                finish_slot(pages, sizes, g, slot - place + i, y, value);
            }
        }
    }
}
