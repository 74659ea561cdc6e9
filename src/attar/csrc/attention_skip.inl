// Part of attention.inl: rows of prompts that skip stretches of 64 slots whose weights are small for sure.
//
// The 64 weights of a stretch add up to 64 exp(its greatest score) at most. A row skips it where that is no more than a
// quarter of what the row may still lose: `lost` times the weights that it keeps so far, less what it lost so far. What
// it keeps only grows, so all that it skips is at most `lost` of what it keeps. That depends on the row's own scores,
// split after split, and on no other row: where a row skips a stretch that others in its tile read, its weights there
// are exact zeros. A stretch that no row of the tile reads is not multiplied with values at all.

constexpr float SURE = 1.001f;     // far above the rounding of weights: the bound holds whatever is rounded
constexpr float PART = 4.0f;       // of what may be lost: one stretch takes a quarter, so that later ones may be skipped

// What the rows of a tile lost: sums of weights, relative to exp(at).
struct Lost {
    float sum[TILE] = {}, at[TILE] = {};
};

ATTAR_INLINE float exp_of(float x) {
    float lanes[16];
    store(lanes, exp(all(x)));
    return lanes[0];
}

// Which stretches of a split one row reads, a bit each; `m` is its greatest score there.
template <class T>
static unsigned stretches_read(const Tile& tile, const Seen<T>& seen, int row, float share, float m, Lost& lost) {
    const float* scores = tile.scores + row * STRIDE;
    const float before = tile.top[row];
    const bool first = before == -INFINITY;
    const float top = first || m > before ? m : before;
    float kept = first ? 0.0f : tile.total[row] * exp_of(before - top);
    if (m >= before) kept += 1.0f;  // the stretch of the greatest score is read
    float room = share * kept - (first ? 0.0f : lost.sum[row] * exp_of(lost.at[row] - top));
    float most[STRETCHES], weights[16] = {};
    int stretches = 0;
    for (int from = 0; from < seen.runs; from += STRETCH, ++stretches) {
        Floats greatest = load(scores + 16 * from);
        for (int i = from + 1; i < from + STRETCH && i < seen.runs; ++i) greatest = max(load(scores + 16 * i), greatest);
        most[stretches] = largest(greatest);
        weights[stretches] = most[stretches] - top;
    }
    store(weights, exp(load(weights)) * all(16.0f * STRETCH * SURE));
    unsigned read = 0;
    for (int i = 0; i < stretches; ++i) {
        if ((most[i] == m && m >= before) || !(weights[i] * PART <= room))
            read |= 1u << i;
        else
            room -= weights[i];
    }
    lost.sum[row] = share * kept - room;
    lost.at[row] = top;
    return read;
}

// As `exponentials`, and exact zeros where a stretch is not read.
template <class T>
static float exponentials_of(const Seen<T>& seen, unsigned read, float* scores, float top) {
    Floats total = all(0.0f);
    for (int i = 0; i < seen.runs; ++i) {
        const bool reads = (read >> i / STRETCH & 1u) != 0;
        const Floats x = reads ? exp(load(scores + 16 * i) - all(top)) : all(0.0f);
        store(scores + 16 * i, x);
        total = total + x;
    }
    return sum(total);
}

// Moves what the tile reads of a split to its front.
template <class T>
static void close_up(const Tile& tile, Seen<T>& seen, unsigned read) {
    const int runs = seen.runs;
    int filled = 0;
    for (int i = 0; i < runs; ++i) {
        if ((read >> i / STRETCH & 1u) == 0) {
            if (i + 1 == runs) seen.last = 16;
            continue;
        }
        if (filled < i) {
            seen.values[filled] = seen.values[i];
            if constexpr (Rows<T>::PARTS == 2) seen.value_scales[filled] = seen.value_scales[i];
            for (int row = 0; row < tile.rows; ++row) {
                float* scores = tile.scores + row * STRIDE;
                store(scores + 16 * filled, load(scores + 16 * i));
            }
        }
        ++filled;
    }
    seen.runs = filled;
}

// The rows' part of `attend`: from scores to weights, without the stretches that no row of the tile reads.
template <class T>
static void skip(const Attention& what, const Tile& tile, Seen<T>& seen, Lost& lost, float* m, float* l) {
    const int stretches = (seen.runs + STRETCH - 1) / STRETCH;
    const unsigned every = (1u << stretches) - 1u;
    unsigned any_reads = 0;
    std::int64_t skipped = 0;
    for (int row = 0; row < tile.rows; ++row) {
        float* scores = tile.scores + row * STRIDE;
        const std::int32_t at = what.positions[tile.first_row + (tile.first_pair + row) / tile.heads_each];
        float broken;
        const bool sees = hide(what, tile, seen, {}, row, scores, m + row, &broken);
        unsigned read = sees ? every : 0;
        if (sees && at >= what.prompts.whole && broken == 0.0f) {
            read = stretches_read(tile, seen, row, what.prompts.lost, m[row], lost);
            for (int i = 0; i < stretches; ++i) {
                const std::int64_t slots = std::int64_t{at} + 1 - seen.index[STRETCH * i];
                if ((read >> i & 1u) == 0 && slots > 0) skipped += slots < 16 * STRETCH ? slots : 16 * STRETCH;
            }
        }
        l[row] = exponentials_of(seen, read, scores, m[row]) + broken;
        if (read == 0) m[row] = -INFINITY;
        any_reads |= read;
    }
    if (any_reads != every) close_up(tile, seen, any_reads);
    if constexpr (Rows<T>::PARTS == 2)
        for (int row = 0; row < tile.rows; ++row) weights_to_bytes(tile, seen, {}, row, tile.scores + row * STRIDE);
    if (what.prompts.skipped != nullptr && skipped != 0)
        __atomic_fetch_add(what.prompts.skipped + tile.sequence, skipped, __ATOMIC_RELAXED);
}
