// Part of attention.cpp: how the rows that are written are shared among threads.

template <class T>
void write(const Write& w, const Pages& pages, const Sizes& sizes, Level level) {
    const auto write_row = ATTAR_PICK(level, write_row<T>);
    const std::int64_t elements = w.rows * (w.heads + 2 * sizes.kv_heads) * sizes.head_dim;
    for_rows(w.rows, w.rows > 1 && elements >= SERIAL_WRITES, [&](std::int64_t row) {
        alignas(64) float x[MOST_COLUMNS];
        alignas(64) std::int8_t codes[MOST_COLUMNS];
        write_row(w, pages, sizes, row, x, codes);
    });
}

// Rows of one sequence that one thread writes at a time: those of a run, for its slots share bytes, or, where blocks are
// unfinished, all that there are, for the last of them may finish it.
struct RowsOf {
    std::int64_t from, to, owner;  // the owner is a run of slots, or an unfinished block
};

std::vector<RowsOf> pieces_of(const Write& w, bool recent) {
    std::vector<RowsOf> pieces;
    if (recent) {
        for (std::int64_t b = 0; b < w.sequences; ++b)
            if (w.row_starts[b] < w.row_starts[b + 1])
                pieces.push_back({w.row_starts[b], w.row_starts[b + 1], w.tails[b]});
        return pieces;
    }
    for (std::int64_t row = 0; row < w.rows; ++row) {
        const std::int64_t run = w.slots[row] / 16;
        if (pieces.empty() || pieces.back().owner != run || row - pieces.back().from == 16)
            pieces.push_back({row, row, run});
        pieces.back().to = row + 1;
    }
    return pieces;
}

void write_pieces(const Write& w, const Pages& pages, const Sizes& sizes, Level level) {
    const auto write_rows = ATTAR_PICK(level, write_rows);
    const auto finish_block = ATTAR_PICK(level, finish_block);
    const bool recent = pages.recent_keys != nullptr;
    const std::vector<RowsOf> pieces = pieces_of(w, recent);
    std::vector<std::int64_t> owners;
    for (const RowsOf& each : pieces) owners.push_back(each.owner);
    std::sort(owners.begin(), owners.end());
    // An owner that comes twice, as in a call whose rows are out of order, has one thread a head write everything.
    const bool apart = std::adjacent_find(owners.begin(), owners.end()) == owners.end();
    const std::int64_t many = static_cast<std::int64_t>(pieces.size()), lots = apart ? many : 1;
    const std::int64_t elements = w.rows * (w.heads + 2 * sizes.kv_heads) * sizes.head_dim;
    for_each(lots * sizes.kv_heads, elements >= SERIAL_WRITES / 16, [&](std::int64_t i) {
        alignas(64) float x[16 * MOST_COLUMNS];
        alignas(64) float y[16 * MOST_COLUMNS];
        const std::int64_t g = i % sizes.kv_heads, lot = i / sizes.kv_heads;
        for (std::int64_t p = apart ? lot : 0; p < (apart ? lot + 1 : many); ++p) {
            const RowsOf& piece = pieces[p];
            bool full = false;
            for (std::int64_t from = piece.from; from < piece.to; from += 16) {
                const std::int64_t to = std::min(piece.to, from + 16);
                write_rows(w, pages, sizes, from, to, piece.owner, g, x, y);
                for (std::int64_t row = from; recent && row < to; ++row)
                    full = full || w.slots[row] % sizes.block == sizes.block - 1;
            }
            if (full) finish_block(pages, sizes, w.slots[piece.from] / sizes.block, piece.owner, g, y);
        }
    });
}
