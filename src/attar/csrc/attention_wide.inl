// Part of attention.inl: pages whose runs become floats in the thread's buffers before they are used, those of fp8, of KIVI
// and of KVQuant; and the writing of all that comes in pieces, unfinished blocks among it.

// ---- reading

ATTAR_INLINE Ints shift_right_each(Ints a, Ints bits) {
    ATTAR_EACH a.piece[p] = (IntPiece)((WordPiece)a.piece[p] >> (WordPiece)bits.piece[p]);
    return a;
}
// The sixteen codes of a word, as floats.
ATTAR_INLINE Floats codes_of_word(const std::uint8_t* from) {
    std::int32_t word;
    std::memcpy(&word, from, sizeof word);
    const Ints lanes = load_bytes(LANES);
    return to_floats(shift_right_each(all(word), lanes + lanes) & all(3));
}

static void expand_fp8(const Sizes& sizes, bool value, const std::uint8_t* raw, const float* scales, float* to) {
    const auto* codes = reinterpret_cast<const E4m3*>(raw);
    if (!value) {
        const Floats each = load(scales) * all(E4M3_UNIT);
        for (std::int64_t d = 0; d < sizes.head_dim; ++d) store(to + 16 * d, load_as_floats(codes + 16 * d) * each);
        return;
    }
    for (std::int64_t slot = 0; slot < 16; ++slot)
        for (std::int64_t c = 0; c < sizes.padded; c += 16) {
            const std::int64_t at = slot * sizes.padded + c;
            store(to + at, load_as_floats(codes + at) * all(scales[slot] * E4M3_UNIT));
        }
}

// Codes of BITS of 16 neighbours: a word of their low two bits, and `apart` bytes on, where they have four, of the others.
template <int BITS>
ATTAR_INLINE Floats codes_of_kivi(const std::uint8_t* from, std::int64_t apart) {
    const Floats low = codes_of_word(from);
    return BITS == 4 ? fma(codes_of_word(from + apart), all(4.0f), low) : low;
}
// Run `run` of head `head` among all blocks' heads, of codes of BITS.
template <int BITS>
static void expand_kivi(const Pages& pages, const Sizes& sizes, bool value, const std::uint8_t* raw, std::int64_t head,
                        std::int64_t run, float* to) {
    const std::int64_t size = sizes.head_dim, group = pages.units;
    if (!value) {
        const std::int64_t at = (head * (sizes.block / group) + 16 * run / group) * size;
        alignas(64) float scales[MOST_COLUMNS], zeros[MOST_COLUMNS];
        for (std::int64_t d = 0; d < size; d += 16) {
            store(scales + d, load_as_floats(static_cast<const Float16*>(pages.key_scales) + at + d));
            store(zeros + d, load_as_floats(static_cast<const Float16*>(pages.key_zeros) + at + d));
        }
        for (std::int64_t d = 0; d < size; ++d)
            store(to + 16 * d, fma(codes_of_kivi<BITS>(raw + 4 * d, 4 * size), all(scales[d]), all(zeros[d])));
        return;
    }
    const std::int64_t groups = size / group;
    for (std::int64_t slot = 0; slot < 16; ++slot) {
        const std::int64_t at = (head * sizes.block + 16 * run + slot) * groups;
        for (std::int64_t i = 0; i < groups; ++i) {
            const Floats scale = all(to_float(static_cast<const Float16*>(pages.value_scales)[at + i]));
            const Floats zero = all(to_float(static_cast<const Float16*>(pages.value_zeros)[at + i]));
            for (std::int64_t c = i * group; c < (i + 1) * group; c += 16)
                store(to + slot * size + c,
                      fma(codes_of_kivi<BITS>(raw + slot * size * BITS / 8 + c / 4, size / 4), scale, zero));
        }
    }
}

// Bits of 16 columns from `column` on, as many as a head has, of one rank.
ATTAR_INLINE std::int32_t bits_at(const std::uint8_t* rank, std::int64_t column, std::int64_t size) {
    return rank[column / 8] | (column + 16 <= size ? rank[column / 8 + 1] << 8 : 0);
}

// What stands apart of a slot, to its columns, `stride` from one to the next. A column that no head has, as in blocks that
// somebody else wrote, belongs nowhere.
static void put_apart(const Pages& pages, const Channels& of, std::int64_t size, std::int64_t slot, float* to,
                      std::int64_t stride) {
    for (std::int64_t i = slot * pages.outliers; i < (slot + 1) * pages.outliers; ++i)
        if (of.columns[i] < size) to[of.columns[i] * stride] = to_float(of.outliers[i]);
    if (slot % pages.block == 0)
        for (std::int64_t d = 0; d < size; ++d) to[d * stride] = to_float(of.firsts[slot / pages.block * size + d]);
}

// Run `run` among all runs of all heads, of codes of BITS.
template <int BITS>
static void expand_nuq(const Pages& pages, const Sizes& sizes, bool value, const std::uint8_t* raw, std::int64_t run,
                       float* to) {
    const Channels& of = value ? pages.channels->values : pages.channels->keys;
    const std::int64_t size = sizes.head_dim, rank = size / 8;
    float levels[16] = {};
    std::memcpy(levels, of.levels, sizeof(float) << BITS);
    const FloatTable table = float_table(levels);
    const Ints one = all(1), lanes = load_bytes(LANES);
    for (std::int64_t c = 0; c < size && !value; c += 16) {  // a lane is a slot
        Ints ranks[BITS];
        for (int b = 0; b < BITS; ++b) {
            std::int32_t words[16];
            for (int slot = 0; slot < 16; ++slot) words[slot] = bits_at(raw + (slot * BITS + b) * rank, c, size);
            ranks[b] = load_bytes(words);
        }
        for (int i = 0; i < 16 && c + i < size; ++i) {
            Ints codes = all(0);
#pragma GCC unroll 4
            for (int b = 0; b < BITS; ++b) codes = codes | shift_left(shift_right(ranks[b], i) & one, b);
            store(to + 16 * (c + i), lookup(codes, table));
        }
    }
    for (int slot = 0; slot < 16; ++slot) {
        const std::int64_t at = 16 * run + slot;
        float* row = value ? to + slot * sizes.padded : to + slot;
        if (value) {  // a lane is a column
            const Floats scale = all(to_float(static_cast<const Bfloat16*>(pages.value_scales)[at]));
            for (std::int64_t c = 0; c < size; c += 16) {
                Ints codes = all(0);
#pragma GCC unroll 4
                for (int b = 0; b < BITS; ++b) {
                    const Ints word = all(bits_at(raw + (slot * BITS + b) * rank, c, size));
                    codes = codes | shift_left(shift_right_each(word, lanes) & one, b);
                }
                store(row + c, lookup(codes, table) * scale);
            }
        }
        put_apart(pages, of, size, at, row, value ? 1 : 16);
    }
}

// As `expand` of planes, to floats.
static void expand(const Pages& pages, const Sizes& sizes, const Tile& tile, bool value, Seen<float>& seen,
                   const Seen<float>& next) {
    const std::int64_t size = sizes.head_dim, run_size = value ? sizes.value_run : sizes.key_run;
    const std::int64_t raw_size = value ? sizes.raw_value : sizes.raw_key, runs = sizes.block / 16;
    const std::uint8_t *const *raw = value ? seen.raw_values : seen.raw_keys,
                             *const *ahead = value ? next.raw_values : next.raw_keys;
    const auto* scales = static_cast<const float*>(value ? pages.value_scales : pages.key_scales);
    float* to = static_cast<float*>(tile.expanded) + (value ? SPLIT / 16 * sizes.key_run : 0);
    for (int i = 0; i < seen.runs; ++i, to += run_size) {
        if (i < next.runs)
            for (std::int64_t at = 0; at < raw_size; at += 64) ask_for(ahead[i], at);
        (value ? seen.values : seen.keys)[i] = to;
        if (seen.recent[i]) {
            const Bfloat16* from = (value ? pages.recent_values : pages.recent_keys) + seen.at[i] * size;
            for (std::int64_t lane = 0; lane < 16; ++lane)
                for (std::int64_t d = 0; d < size; ++d)
                    to[value ? lane * sizes.padded + d : 16 * d + lane] = to_float(from[lane * size + d]);
        } else if (pages.layout == KvLayout::fp8) {
            expand_fp8(sizes, value, raw[i], scales + 16 * seen.at[i], to);
        } else if (pages.layout == KvLayout::kvquant) {
            const auto found = pages.bits == 4 ? expand_nuq<4> : expand_nuq<3>;
            found(pages, sizes, value, raw[i], seen.at[i], to);
        } else {
            const auto found = pages.bits == 4 ? expand_kivi<4> : expand_kivi<2>;
            found(pages, sizes, value, raw[i], seen.at[i] / runs, seen.at[i] % runs, to);
        }
    }
}
static void expand(const Pages&, const Sizes&, const Tile&, bool, Seen<Bfloat16>&, const Seen<Bfloat16>&) {}

// ---- writing

// As `quantize`, to e4m3, whose greatest number is 448.
static void quantize_fp8(const float* x, std::int64_t padded, std::int8_t* codes, float* scale) {
    Floats most = all(0.0f), broken = all(0.0f);
    for (std::int64_t d = 0; d < padded; d += 16) {
        const Floats value = load(x + d);
        most = max(value, max(all(0.0f) - value, most));
        broken = fma(value, all(0.0f), broken);
    }
    const float step = largest(most) / 448.0f, by = step == 0.0f ? 1.0f : step, lost = sum(broken);
    *scale = step + lost;
    for (std::int64_t d = 0; d < padded; ++d) {
        const float value = lost != lost ? 0.0f : x[d] / by;
        std::uint32_t bits, code;
        std::memcpy(&bits, &value, sizeof bits);
        const std::uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
        if (magnitude < 0x3c800000u) {  // 2^-6: it counts units of 2^-9
            float small;
            std::memcpy(&small, &magnitude, sizeof small);
            small = small * 0x1p9f + ROUNDER;
            std::memcpy(&code, &small, sizeof code);
            code &= 0x7fu;
        } else {
            code = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - (120u << 23)) >> 20;
        }
        codes[d] = static_cast<std::int8_t>(sign | code);
    }
}

// One head x [padded, zeros behind] of a slot: its codes to `to`, and what stands apart. A head that is not finite, or too
// large for its scale, has NaN for outliers.
static void put_nuq(const Pages& pages, const Sizes& sizes, std::int64_t head, std::int64_t place, bool value,
                    const float* x, Nuq* to) {
    const Channels& of = value ? pages.channels->values : pages.channels->keys;
    const std::int64_t size = sizes.head_dim, padded = sizes.padded, g = head % sizes.kv_heads;
    const std::int64_t slot = head * sizes.block + place, bits = pages.bits, last = (1 << bits) - 1;
    alignas(64) float y[MOST_COLUMNS], inside[MOST_COLUMNS];  // `inside`: 1 where the coordinate does not stand apart
    bool finite = true;
    for (std::int64_t d = 0; d < padded; ++d) {
        y[d] = d < size ? (x[d] - of.mean[g * size + d]) / of.spread[g * size + d] : 0.0f;
        inside[d] = d < size ? 1.0f : 0.0f;
        finite = finite && std::isfinite(y[d]);
    }
    if (place == 0) put(y, size, 1, of.firsts + head * size);
    if (!finite) std::memset(y, 0, sizeof(float) * static_cast<std::size_t>(padded));
    for (std::int64_t i = 0; i < pages.outliers; ++i) {
        std::int64_t greatest = -1;
        for (std::int64_t d = 0; d < size; ++d)
            if (inside[d] != 0.0f && (greatest < 0 || std::fabs(y[d]) > std::fabs(y[greatest]))) greatest = d;
        inside[greatest] = 0.0f;
    }
    Floats by = all(1.0f);
    if (value) {
        Floats squares = all(0.0f);
        for (std::int64_t d = 0; d < padded; d += 16) squares = fma(load(y + d) * load(y + d), load(inside + d), squares);
        const float scale = std::sqrt(sum(squares) / static_cast<float>(size - pages.outliers));
        Bfloat16& stored = static_cast<Bfloat16*>(pages.value_scales)[slot];
        put(&scale, 1, 1, &stored);
        finite = finite && std::isfinite(to_float(stored));
        if (to_float(stored) != 0.0f) by = all(to_float(stored));
    }
    std::int64_t found = slot * pages.outliers;
    for (std::int64_t d = 0; d < size; ++d)
        if (inside[d] == 0.0f) {
            const float kept = finite ? y[d] : NAN;
            put(&kept, 1, 1, of.outliers + found);
            of.columns[found++] = static_cast<std::uint8_t>(d);
        }
    for (std::int64_t c = 0; c < size; c += 16) {
        const Floats at = load(y + c) / by;
        Ints code = all(0);
        for (std::int64_t i = 0; i < last; ++i)
            code = code - greater(at, all((of.levels[i] + of.levels[i + 1]) / 2.0f));
        std::int32_t codes[16];
        store_bytes(codes, code);
        for (std::int64_t part = c; part < c + 16 && part < size; part += 8)
            for (std::int64_t b = 0; b < bits; ++b) {
                std::int32_t byte = 0;
                for (int i = 0; i < 8; ++i) byte |= (codes[part - c + i] >> b & 1) << i;
                to[b * (size / 8) + part / 8].bits = static_cast<std::uint8_t>(byte);
            }
    }
}

// Codes 0 to `last` of numbers: the nearest to (x - zero) / by. NaN becomes 0.
ATTAR_INLINE Ints codes_between(Floats x, Floats zero, Floats by, float last) {
    const Floats from = max((x - zero) / by, all(0.0f)), rounder = all(ROUNDER);
    const Floats bounded = all(0.0f) - max(all(0.0f) - from, all(-last));
    return bits_of(bounded + rounder) - bits_of(rounder);
}
// A group's least and greatest to its zero and scale, in float16 and as they are read.
ATTAR_INLINE void fit_group(float low, float high, float broken, float last, Float16* scale, Float16* zero, float* by,
                            float* from) {
    *zero = to_half(low);
    *from = to_float(*zero);
    *scale = to_half((high - low) / last + broken + *from * 0.0f);
    *by = to_float(*scale);
    if (*by == 0.0f) *by = 1.0f;
}

// A full unfinished block of key-value head g to the codes of block `block`.
static void finish_kivi(const Pages& pages, const Sizes& sizes, std::int64_t block, std::int64_t tail, std::int64_t g) {
    const std::int64_t size = sizes.head_dim, group = pages.units, head = block * sizes.kv_heads + g;
    const float last = static_cast<float>((1 << pages.bits) - 1);
    const std::int64_t first = (tail * sizes.kv_heads + g) * sizes.block * size, groups = size / group;
    alignas(64) float low[16], high[16], broken[16], by[16], from[16];
    for (std::int64_t slot = 0; slot < sizes.block; slot += group)
        for (std::int64_t d = 0; d < size; d += 16) {
            const Bfloat16* x = pages.recent_keys + first + slot * size + d;
            Floats least = load_as_floats(x), most = least, wrong = all(0.0f);
            for (std::int64_t i = 0; i < group; ++i) {
                const Floats one = load_as_floats(x + i * size);
                most = max(one, most);
                least = all(0.0f) - max(all(0.0f) - one, all(0.0f) - least);
                wrong = fma(one, all(0.0f), wrong);
            }
            store(low, least);
            store(high, most);
            store(broken, wrong);
            const std::int64_t at = (head * (sizes.block / group) + slot / group) * size + d;
            for (int lane = 0; lane < 16; ++lane)
                fit_group(low[lane], high[lane], broken[lane], last, static_cast<Float16*>(pages.key_scales) + at + lane,
                          static_cast<Float16*>(pages.key_zeros) + at + lane, by + lane, from + lane);
            const Floats zero = load(from), step = load(by);
            for (std::int64_t i = 0; i < group; i += 16) {
                Ints words = all(0), above = all(0);
                for (int lane = 0; lane < 16; ++lane) {
                    const Ints code = codes_between(load_as_floats(x + (i + lane) * size), zero, step, last);
                    words = words | shift_left(code & all(3), 2 * lane);
                    above = above | shift_left(shift_right(code, 2), 2 * lane);
                }
                const std::int64_t run = head * (sizes.block / 16) + (slot + i) / 16;
                auto* to = static_cast<std::uint8_t*>(pages.keys) + run * sizes.raw_key + 4 * d;
                store_bytes(to, words);
                if (pages.bits == 4) store_bytes(to + 4 * size, above);
            }
        }
    for (std::int64_t slot = 0; slot < sizes.block; ++slot)
        for (std::int64_t i = 0; i < groups; ++i) {
            const Bfloat16* x = pages.recent_values + first + slot * size + i * group;
            Floats least = load_as_floats(x), most = least, wrong = all(0.0f);
            for (std::int64_t c = 0; c < group; c += 16) {
                const Floats one = load_as_floats(x + c);
                most = max(one, most);
                least = all(0.0f) - max(all(0.0f) - one, all(0.0f) - least);
                wrong = fma(one, all(0.0f), wrong);
            }
            const std::int64_t at = (head * sizes.block + slot) * groups + i;
            fit_group(-largest(all(0.0f) - least), largest(most), sum(wrong), last,
                      static_cast<Float16*>(pages.value_scales) + at, static_cast<Float16*>(pages.value_zeros) + at, by,
                      from);
            auto* to = static_cast<std::uint8_t*>(pages.values) + (head * sizes.block + slot) * (pages.bits * size / 8) + i * group / 4;
            for (std::int64_t c = 0; c < group; c += 16) {
                std::int32_t codes[16];
                store_bytes(codes, codes_between(load_as_floats(x + c), all(from[0]), all(by[0]), last));
                std::uint32_t word = 0, above = 0;
                for (int lane = 0; lane < 16; ++lane) {
                    word |= static_cast<std::uint32_t>(codes[lane] & 3) << 2 * lane;
                    above |= static_cast<std::uint32_t>(codes[lane] >> 2) << 2 * lane;
                }
                std::memcpy(to + c / 4, &word, sizeof word);
                if (pages.bits == 4) std::memcpy(to + (size + c) / 4, &above, sizeof above);
            }
        }
}

// Rows from .. to of the call, 16 at most and all of one sequence, of key-value head g, with the query heads that read
// it; `tail` is their unfinished block, where there are such. `x` and `y` have room for 16 heads.
static void write_rows(const Write& what, const Pages& pages, const Sizes& sizes, std::int64_t from, std::int64_t to,
                       std::int64_t tail, std::int64_t g, float* x, float* y) {
    const std::int64_t size = sizes.head_dim, half = what.turned / 2, each = what.heads / sizes.kv_heads;
    const auto take = [&](std::int64_t row, const float* head, const float* norm, bool turned, float* into) {
        const std::int64_t angle = what.cos == nullptr || !turned ? 0 : what.angle[row] * half;
        const bool turns = turned && what.cos != nullptr;
        std::memcpy(into, head, sizeof(float) * size);
        prepare(into, size, size, norm, what.eps, what.offset, turns ? what.cos + angle : nullptr,
                turns ? what.sin + angle : nullptr, half);
    };
    const Bases* bases = pages.bases;
    for (std::int64_t row = from; row < to; ++row)
        for (std::int64_t first = 0; first < each; first += 16) {
            const std::int64_t many = each - first < 16 ? each - first : 16, h = g * each + first;
            for (std::int64_t i = 0; i < many; ++i)
                take(row, what.q + row * what.q_stride + (h + i) * size, what.q_norm, true, x + i * size);
            float* out = what.q_out + (row * what.heads + h) * size;
            if (bases != nullptr)
                turn(x, many, bases->keys.back + g * size * size, size, out);
            else
                std::memcpy(out, x, sizeof(float) * static_cast<std::size_t>(many * size));
        }
    for (const bool value : {false, true}) {
        const Coordinates* of = bases == nullptr ? nullptr : value ? &bases->values : &bases->keys;
        const float* source = value ? what.v : what.k;
        const std::int64_t stride = value ? what.v_stride : what.k_stride;
        for (std::int64_t row = from; row < to; ++row) {
            float* one = x + (row - from) * size;
            take(row, source + row * stride + g * size, value ? nullptr : what.k_norm, !value, one);
            for (std::int64_t d = 0; of != nullptr && d < size; d += 16)
                store(one + d, load(one + d) - load(of->mean + g * size + d));
        }
        if (of != nullptr) turn(x, to - from, of->into + g * size * size, size, y);
        Bfloat16* recent = value ? pages.recent_values : pages.recent_keys;
        for (std::int64_t row = from; row < to; ++row) {
            const float* one = (of == nullptr ? x : y) + (row - from) * size;
            if (recent == nullptr) {
                finish_slot(pages, sizes, g, what.slots[row], one, value);
            } else {
                const std::int64_t at = (tail * sizes.kv_heads + g) * sizes.block + what.slots[row] % sizes.block;
                put(one, size, 1, recent + at * size);
            }
        }
    }
}

// An unfinished block that is full, to its place.
static void finish_block(const Pages& pages, const Sizes& sizes, std::int64_t block, std::int64_t tail, std::int64_t g,
                         float* y) {
    if (pages.layout == KvLayout::kivi) return finish_kivi(pages, sizes, block, tail, g);
    const std::int64_t size = sizes.head_dim, first = (tail * sizes.kv_heads + g) * sizes.block;
    for (const bool value : {false, true})
        for (std::int64_t i = 0; i < sizes.block; ++i) {
            const Bfloat16* from = (value ? pages.recent_values : pages.recent_keys) + (first + i) * size;
            for (std::int64_t d = 0; d < size; d += 16) store(y + d, load_as_floats(from + d));
            finish_slot(pages, sizes, g, block * sizes.block + i, y, value);
        }
}
