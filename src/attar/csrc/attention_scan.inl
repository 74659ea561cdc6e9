// Part of attention.inl: the scan of one-bit keys, by which a row chooses the runs of slots that it reads. What lies
// where is drawn in attention.h, and the arithmetic is that of kernels/ref_sparse.py.
//
// Slots are lanes. Products of signs and codes are sums of integers. Means turn with the position: pairs that turn fast
// are turned to each slot, the others to the middle of a run, with their slope there.

constexpr std::int32_t LANE_BYTES[16] = {0x00000000, 0x01010101, 0x02020202, 0x03030303, 0x04040404, 0x05050505,
                                         0x06060606, 0x07070707, 0x08080808, 0x09090909, 0x0a0a0a0a, 0x0b0b0b0b,
                                         0x0c0c0c0c, 0x0d0d0d0d, 0x0e0e0e0e, 0x0f0f0f0f};
constexpr float FROM_MIDDLE[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr int AHEAD = 4;  // runs by which one-bit keys are asked for before they are used
constexpr float FRACTION = 2048.0f;  // steps between two powers of two
#if ATTAR_LEVEL >= ATTAR_AVX512
constexpr int SCANNED = 8;  // queries at once
#else
constexpr int SCANNED = 4;
#endif

// Bytes of 1 where those of `a` are not zero.
ATTAR_INLINE Ints ones(Ints a) {
    ATTAR_EACH {
#if ATTAR_LEVEL >= ATTAR_AVX512
        a.piece[p] = (IntPiece)_mm512_min_epu8((__m512i)a.piece[p], _mm512_set1_epi32(0x01010101));
#elif ATTAR_LEVEL >= ATTAR_AVX2
        a.piece[p] = (IntPiece)_mm256_min_epu8((__m256i)a.piece[p], _mm256_set1_epi32(0x01010101));
#else
        typedef std::uint8_t BytePiece __attribute__((vector_size(4 * WIDTH)));
        a.piece[p] = (IntPiece)((BytePiece)((BytePiece)a.piece[p] != 0) & 1);
#endif
    }
    return a;
}

// 2^y for y <= 0, with straight lines between powers of two, down to 2^-100.
ATTAR_INLINE Floats power_of_two(Floats y) {
    const Floats rounder = all(ROUNDER);
    const Ints steps = bits_of(fma(max(y, all(-100.0f)), all(FRACTION), rounder)) - bits_of(rounder);
    return from_bits(shift_left(steps + all(127 * 2048), 12));
}

// The sums of four vectors to to[0 .. 4], in one order at every level.
ATTAR_INLINE void sum_four(const Floats* from, float* to) {
#if ATTAR_LEVEL >= ATTAR_AVX2
    __m256 eight[4];
    for (int i = 0; i < 4; ++i) {
        __m256 low, high;
        eight_and_eight(from[i], &low, &high);
        eight[i] = low + high;
    }
    const __m256d a = (__m256d)(_mm256_unpacklo_ps(eight[0], eight[1]) + _mm256_unpackhi_ps(eight[0], eight[1]));
    const __m256d b = (__m256d)(_mm256_unpacklo_ps(eight[2], eight[3]) + _mm256_unpackhi_ps(eight[2], eight[3]));
    const __m256 both = (__m256)_mm256_unpacklo_pd(a, b) + (__m256)_mm256_unpackhi_pd(a, b);
    _mm_storeu_ps(to, _mm256_castps256_ps128(both) + _mm256_extractf128_ps(both, 1));
#else
    for (int i = 0; i < 4; ++i) {
        float lane[16];
        store(lane, from[i]);
        for (int l = 0; l < 8; ++l) lane[l] += lane[l + 8];
        to[i] = ((lane[0] + lane[2]) + (lane[1] + lane[3])) + ((lane[4] + lane[6]) + (lane[5] + lane[7]));
    }
#endif
}

ATTAR_INLINE float two_to(float whole) {  // of a whole number that is not positive
    return whole < -126.0f ? 0.0f : from_bits(all((127 + static_cast<std::int32_t>(whole)) << 23)).piece[0][0];
}

ATTAR_INLINE Ints dot_codes(Ints acc, Ints bits, const std::int8_t* codes) {
#if ATTAR_LEVEL >= ATTAR_AVX512
    return dot4(acc, bits, broadcast_from(codes));
#else
    return dot4(acc, bits, four_bytes(codes));
#endif
}

// The queries of one row and head, ready for the scan. `x` has room for a head.
static void take_scanned(const Attention& what, const Pages& pages, const Sizes& sizes, Scan& scan, float* x) {
    const Signs& signs = *pages.signs;
    const std::int64_t size = sizes.head_dim, pairs = signs.fast + signs.slow, heads_each = scan.queries;
    const float* mean = signs.means + scan.head * size;
    const float* spread = signs.spreads + scan.head * size;
    const float unit = what.soft_cap == 0.0f ? LOG2E : 1.0f;
    for (int r = 0; r < scan.queries; ++r) {
        const float* q = what.q + (scan.row * what.heads + scan.head * heads_each + r) * size;
        float top = 0.0f, broken = 0.0f;
        for (std::int64_t d = 0; d < size; ++d) {
            x[d] = q[d] * spread[d];
            const float magnitude = std::fabs(x[d]);
            top = magnitude > top ? magnitude : top;
            broken += x[d] * 0.0f;
        }
        const float by = 127.0f / (top > TINY ? top : TINY);
        std::int8_t* codes = scan.codes + r * scan.stride;
        std::int32_t total = 0;
        for (std::int64_t d = 0; d < scan.stride; ++d) {
            const float code = d < size && broken == 0.0f ? x[d] * by + ROUNDER - ROUNDER : 0.0f;
            codes[d] = static_cast<std::int8_t>(code);
            total += codes[d];
        }
        scan.total[r] = total;
        scan.factor[r] = (top / 127.0f + broken) * what.scale * unit;
        float* slow = scan.slow + r * 4 * signs.slow;
        float* fast = scan.fast + r * 2 * signs.fast_padded;
        float constant = 0.0f;
        for (std::int64_t i = 0; i < pairs; ++i) {
            const std::int64_t j = i + pairs, s = i - signs.fast;
            const float a = (q[i] * mean[i] + q[j] * mean[j]) * what.scale * unit;
            const float b = (q[j] * mean[i] - q[i] * mean[j]) * what.scale * unit;
            if (s < 0) {
                fast[i] = a;
                fast[signs.fast_padded + i] = b;
            } else {
                slow[4 * s] = a;
                slow[4 * s + 1] = b;
                slow[4 * s + 2] = b * signs.speeds[s];
                slow[4 * s + 3] = -a * signs.speeds[s];
            }
        }
        for (std::int64_t i = signs.fast; i < signs.fast_padded; ++i) fast[i] = fast[signs.fast_padded + i] = 0.0f;
        for (std::int64_t d = 2 * pairs; d < size; ++d) constant += q[d] * mean[d];
        scan.constant[r] = constant * what.scale * unit;
    }
}

// Means' products with R queries at the middle of each run of a split, and their slope there.
template <int R>
static void scan_means(const Signs& signs, const Scan& scan, int first, std::int64_t split, float (*base)[RUNS],
                       float (*slope)[RUNS]) {
    for (int half = 0; half < RUNS; half += 16) {
        Floats at[R], rise[R];
        for (int r = 0; r < R; ++r) {
            at[r] = all(scan.constant[first + r]);
            rise[r] = all(0.0f);
        }
        for (std::int64_t i = 0; i < signs.slow; ++i) {
            const Floats cos = load(signs.slow_cos + i * signs.runs + RUNS * split + half);
            const Floats sin = load(signs.slow_sin + i * signs.runs + RUNS * split + half);
            const float* of = scan.slow + first * 4 * signs.slow + 4 * i;
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r, of += 4 * signs.slow) {
                at[r] = fma(all(of[1]), sin, fma(all(of[0]), cos, at[r]));
                rise[r] = fma(all(of[3]), sin, fma(all(of[2]), cos, rise[r]));
            }
        }
        for (int r = 0; r < R; ++r) {
            store(base[r] + half, at[r]);
            store(slope[r] + half, rise[r]);
        }
    }
}

// Runs of a split against queries first .. first + R: weights [R, scan.width] and, of each query, the power of two that
// they are multiples of, and their sum.
template <int R>
static void scan_queries(const Attention& what, const Pages& pages, const Sizes& sizes, const Scan& scan, int first,
                         std::int64_t split, float* scores) {
    const Signs& signs = *pages.signs;
    const std::int64_t from = split * RUNS, bytes = scan.stride / 8, padded = signs.fast_padded;
    const int runs = static_cast<int>(scan.runs - from < RUNS ? scan.runs - from : RUNS);
    const std::int32_t* table = what.tables + scan.sequence * what.width;
    const std::int64_t each = sizes.block / 16;  // runs of a block
    std::int64_t at[RUNS + AHEAD];
    for (std::int64_t run = 0, place = from / each, within = from % each; run < runs + AHEAD; ++run) {
        at[run] = run < runs ? (table[place] * sizes.kv_heads + scan.head) * each + within : at[runs - 1];
        if (++within == each) within = 0, ++place;
    }
    float base[R][RUNS], slope[R][RUNS];
    scan_means<R>(signs, scan, first, split, base, slope);
    const Ints which = load_bytes(LANE_BYTES);
    const Floats steps = load(FROM_MIDDLE);
    Floats most[R], wrong[R];
    for (int r = 0; r < R; ++r) {
        most[r] = all(HIDDEN);
        wrong[r] = all(0.0f);
    }
    for (int run = 0; run < runs; ++run) {
        const std::int64_t slot = 16 * (from + run);
        const std::uint8_t* bits = signs.bits + at[run] * 16 * bytes;
        for (std::int64_t line = 0; line < 16 * bytes; line += 64)
            __builtin_prefetch(signs.bits + at[run + AHEAD] * 16 * bytes + line);
        __builtin_prefetch(signs.scales + at[run + AHEAD] * 16);
        Ints low[R], high[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            low[r] = all(-scan.total[first + r]);
            high[r] = all(0);
        }
        const std::int8_t* codes = scan.codes + first * scan.stride;
        for (std::int64_t c = 0; c < bytes; ++c, bits += 16, codes += 8) {
            const Ints spread = lookup(which, bits);
            const Ints four = ones(spread & all(0x08040201)), others = ones(spread & all(static_cast<std::int32_t>(0x80402010u)));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                low[r] = dot_codes(low[r], four, codes + r * scan.stride);
                high[r] = dot_codes(high[r], others, codes + r * scan.stride + 4);
            }
        }
        const Floats scale = load_as_floats(signs.scales + at[run] * 16);
        const float *cos = signs.fast_cos + (from + run) * padded, *sin = signs.fast_sin + (from + run) * padded;
        Floats found[R], others[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            // Twice the sum over set bits, less the sum over all: the total stands in `low` already, once.
            const Ints sum = shift_left(low[r] + high[r], 1) + all(scan.total[first + r]);
            found[r] = to_floats(sum) * all(scan.factor[first + r]) * scale;
            others[r] = fma(steps, all(slope[r][run]), all(base[r][run]));
        }
        for (std::int64_t g = 0; g < padded; g += 16) {
            float turned[R][2][16];
            const Floats c = load(cos + g), s = load(sin + g);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const float* fast = scan.fast + (first + r) * 2 * padded + g;
                const Floats a = load(fast), b = load(fast + padded);
                store(turned[r][0], fma(a, c, b * s));
                store(turned[r][1], fma(b, c, all(0.0f) - a * s));
            }
            const std::int64_t pairs = signs.fast - g < 16 ? signs.fast - g : 16;
#pragma GCC unroll 1
            for (std::int64_t i = 0; i < pairs; ++i) {
                const Floats lane_cos = load(signs.lane_cos + 16 * (g + i)), lane_sin = load(signs.lane_sin + 16 * (g + i));
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    found[r] = fma(all(turned[r][0][i]), lane_cos, found[r]);
                    others[r] = fma(all(turned[r][1][i]), lane_sin, others[r]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            Floats x = found[r] + others[r];
            if (what.soft_cap != 0.0f) x = all(what.soft_cap) * tanh(x / all(what.soft_cap)) * all(LOG2E);
            if (slot + 16 > scan.length) {
                const Ints seen = at_most(load_bytes(LANES), all(static_cast<std::int32_t>(scan.length - slot - 1)));
                x = select(seen, x, all(HIDDEN));
            }
            store(scores + r * SPLIT + 16 * run, x);
            most[r] = max(x, most[r]);
            wrong[r] = fma(x, all(0.0f), wrong[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
        const float broken = sum(wrong[r]), top = broken == 0.0f ? std::ceil(largest(most[r])) : broken;
        float* weights = scan.weights + (first + r) * scan.width + from;
        for (int run = 0; run < RUNS; run += 4) {
            Floats four[4];
            for (int i = 0; i < 4; ++i)
                four[i] = run + i < runs ? power_of_two(load(scores + r * SPLIT + 16 * (run + i)) - all(top)) : all(0.0f);
            sum_four(four, weights + run);
        }
        if (broken != 0.0f)  // NaN
            for (int run = 0; run < RUNS; ++run) weights[run] = broken;
        scan.tops[(first + r) * scan.splits + split] = top;
        scan.sums[(first + r) * scan.splits + split] = sum(load(weights) + load(weights + 16));
    }
}

// Splits from .. to of one row and head. `scores` has room for SCANNED rows of a split.
static void scan_splits(const Attention& what, const Pages& pages, const Sizes& sizes, const Scan& scan,
                        std::int64_t from, std::int64_t to, float* scores) {
    for (std::int64_t split = from; split < to; ++split)
        for (int first = 0, groups = (scan.queries + SCANNED - 1) / SCANNED; groups > 0; --groups) {
            const int count = (scan.queries - first + groups - 1) / groups;
#define ATTAR_CALL(R) \
    if (count == R) scan_queries<R>(what, pages, sizes, scan, first, split, scores)
            ATTAR_CALL(1);
            ATTAR_CALL(2);
            ATTAR_CALL(3);
            ATTAR_CALL(4);
#if ATTAR_LEVEL >= ATTAR_AVX512
            ATTAR_CALL(5);
            ATTAR_CALL(6);
            ATTAR_CALL(7);
            ATTAR_CALL(8);
#endif
#undef ATTAR_CALL
            first += count;
        }
}

// Ranks of all runs from what the splits left, over the weights of the first query: sums over queries of their shares.
static void rank_runs(const Scan& scan) {
    for (int r = 0; r < scan.queries; ++r) {
        const float *tops = scan.tops + r * scan.splits, *sums = scan.sums + r * scan.splits;
        float top = -INFINITY, total = 0.0f;
        for (std::int64_t split = 0; split < scan.splits; ++split) top = tops[split] > top ? tops[split] : top;
        for (std::int64_t split = 0; split < scan.splits; ++split)
            total += sums[split] * (tops[split] <= top ? two_to(tops[split] - top) : NAN);
        for (std::int64_t split = 0; split < scan.splits; ++split) {
            const Floats share = all((tops[split] <= top ? two_to(tops[split] - top) : NAN) / total);
            for (int run = 0; run < RUNS; run += 16) {
                const std::int64_t at = RUNS * split + run;
                const Floats found = load(scan.weights + r * scan.width + at) * share;
                store(scan.weights + at, r == 0 ? found : load(scan.weights + at) + found);
            }
        }
    }
}

// One-bit key of the rotated key x [D] at lane `lane` of a run.
static void put_signs(const Signs& signs, const Sizes& sizes, std::int64_t head, std::int64_t g, std::int64_t place,
                      const float* x, const float* cos, const float* sin, std::int64_t half) {
    const std::int64_t size = sizes.head_dim, bytes = (size + 7) / 8, lane = place % 16;
    const float *mean = signs.means + g * size, *spread = signs.spreads + g * size;
    std::uint8_t* to = signs.bits + (head * (sizes.block / 16) + place / 16) * 16 * bytes + lane;
    for (std::int64_t c = 0; c < bytes; ++c) to[16 * c] = 0;
    double total = 0.0;
    for (std::int64_t d = 0; d < size; ++d) {
        float m = mean[d];
        if (d < half) m = mean[d] * cos[d] - mean[d + half] * sin[d];
        else if (d < 2 * half) m = mean[d] * cos[d - half] + mean[d - half] * sin[d - half];
        const float centred = x[d] - m;
        to[16 * (d / 8)] |= static_cast<std::uint8_t>((centred > 0.0f ? 1 : 0) << (d % 8));
        total += static_cast<double>(std::fabs(centred)) * spread[d];
    }
    const float scale = static_cast<float>(total / signs.squares[g]);
    put(&scale, 1, 1, signs.scales + head * sizes.block + place);
}
