// Part of attention.cpp: the runs that rows choose, by the scan of one-bit keys (attention_scan.inl).
//
// A choice depends on the row's own queries and on the one-bit keys of the slots that it sees: so neither on other rows,
// nor on threads, for what splits leave is put together in their order.

inline std::int64_t budget_of(const Signs& signs, std::int64_t runs) {
    return signs.share == 0 ? signs.topk : std::max(LEAST_RUNS, (runs + signs.share - 1) / signs.share);
}

// Rows of sequence b that read every slot they see: the first ones.
std::int64_t dense_rows(const Attention& a, const Pages& pages, std::int64_t b) {
    const std::int64_t own = std::int64_t{a.row_starts[b + 1]} - a.row_starts[b];
    if (a.dense_until == nullptr) return own;
    const std::int64_t before = std::int64_t{a.lengths[b]} - own;
    const std::int64_t until = std::max<std::int64_t>(pages.signs->whole, a.dense_until[b]);
    std::int64_t dense = std::clamp<std::int64_t>(until - before, 0, own);
    while (dense < own) {  // a budget of all runs
        const std::int64_t runs = (before + dense + 16) / 16;
        if (budget_of(*pages.signs, runs) < runs) break;
        ++dense;
    }
    return dense;
}

struct Chosen {
    std::vector<Scan> scans;          // of rows that choose, head by head
    std::vector<std::int32_t> lists;  // their runs, ascending
};

// Bytes of a scan's queries, and of what it leaves for the choice, each a multiple of 64.
struct ScanSizes {
    std::int64_t queries, left;

    ScanSizes(const Signs& signs, const Scan& scan) {
        const auto up = [](std::int64_t bytes) { return (bytes + 63) / 64 * 64; };
        const std::int64_t floats = 4 * signs.slow + 2 * signs.fast_padded + 3;
        queries = up(scan.queries * scan.stride) + up(4 * scan.queries * floats) + 4 * 64;
        left = up(4 * scan.queries * (scan.width + 2 * scan.splits));
    }
};

void lay(const Signs& signs, Scan& scan, unsigned char* queries, unsigned char* left) {
    const std::int64_t many = scan.queries;
    const auto take = [&queries](std::int64_t bytes) {
        unsigned char* found = queries;
        queries += (bytes + 63) / 64 * 64;
        return found;
    };
    scan.codes = reinterpret_cast<std::int8_t*>(take(many * scan.stride));
    scan.slow = reinterpret_cast<float*>(take(4 * many * 4 * signs.slow));
    scan.fast = reinterpret_cast<float*>(take(4 * many * 2 * signs.fast_padded));
    scan.factor = reinterpret_cast<float*>(take(4 * many));
    scan.constant = reinterpret_cast<float*>(take(4 * many));
    scan.total = reinterpret_cast<std::int32_t*>(take(4 * many));
    scan.weights = reinterpret_cast<float*>(left);
    scan.tops = scan.weights + many * scan.width;
    scan.sums = scan.tops + many * scan.splits;
}

// The runs of the greatest ranks, of equal ones the lower; the first and the last always; a rank that is no number is the
// greatest.
void pick(const Scan& scan, std::int32_t* list) {
    static thread_local std::vector<std::uint32_t> ranks, sorted;  // bits of floats that are not negative: in their order
    const std::int64_t count = scan.runs - 2, inner = scan.budget - 2;
    ranks.resize(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, scan.weights + 1 + i, sizeof bits);
        ranks[i] = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7f800000u : bits;
    }
    *list++ = 0;
    if (inner > 0) {
        sorted = ranks;
        std::nth_element(sorted.begin(), sorted.begin() + (inner - 1), sorted.end(), std::greater<std::uint32_t>());
        const std::uint32_t least = sorted[inner - 1];
        std::int64_t equal = inner;
        for (std::int64_t i = 0; i < inner; ++i) equal -= sorted[i] > least;
        for (std::int64_t i = 0; i < count; ++i)
            if (ranks[i] > least || (ranks[i] == least && equal-- > 0)) *list++ = static_cast<std::int32_t>(i + 1);
    }
    *list = static_cast<std::int32_t>(scan.runs - 1);
}

Chosen choose(const Attention& a, const Pages& pages, const Sizes& sizes, Level level) {
    Chosen found;
    if (a.dense_until == nullptr) return found;
    const auto take_scanned = ATTAR_PICK(level, take_scanned);
    const auto scan_splits = ATTAR_PICK(level, scan_splits);
    const auto rank_runs = ATTAR_PICK(level, rank_runs);
    std::int64_t listed = 0, splits = 0;
    for (std::int64_t b = 0; b < a.sequences; ++b)
        for (std::int64_t row = a.row_starts[b] + dense_rows(a, pages, b); row < a.row_starts[b + 1]; ++row) {
            Scan scan{};
            scan.sequence = b;
            scan.row = row;
            scan.length = std::int64_t{a.positions[row]} + 1;
            scan.queries = static_cast<int>(a.heads / pages.kv_heads);
            scan.runs = (scan.length + 15) / 16;
            scan.splits = (scan.runs + RUNS - 1) / RUNS;
            scan.width = scan.splits * RUNS;
            scan.budget = budget_of(*pages.signs, scan.runs);
            scan.stride = (pages.head_dim + 7) / 8 * 8;
            for (scan.head = 0; scan.head < pages.kv_heads; ++scan.head) {
                scan.at = listed;
                listed += scan.budget;
                splits += scan.splits;
                found.scans.push_back(scan);
            }
        }
    if (found.scans.empty()) return found;
    found.lists.resize(static_cast<std::size_t>(listed));

    static thread_local Buffer query_memory, own_memory, shared_memory;
    const std::int64_t count = static_cast<std::int64_t>(found.scans.size()), heads_each = a.heads / pages.kv_heads;
    const bool parallel = splits * SPLIT * heads_each * sizes.padded / 8 >= SERIAL_BELOW;
    const int threads = parallel ? static_cast<int>(attar::threads()) : 1;
    const auto scanned = [&](Scan& scan, std::int64_t from, std::int64_t to, unsigned char* left) {
        const ScanSizes bytes(*pages.signs, scan);
        lay(*pages.signs, scan, query_memory.at_least(static_cast<std::size_t>(bytes.queries)), left);
        alignas(64) float room[8 * SPLIT];
        take_scanned(a, pages, sizes, scan, room);
        scan_splits(a, pages, sizes, scan, from, to, room);
    };
    if (threads == 1 || count >= 4 * threads) {
        for_each(count, threads > 1, [&](std::int64_t i) {
            Scan scan = found.scans[i];
            const ScanSizes bytes(*pages.signs, scan);
            scanned(scan, 0, scan.splits, own_memory.at_least(static_cast<std::size_t>(bytes.left)));
            rank_runs(scan);
            pick(scan, found.lists.data() + scan.at);
        });
        return found;
    }
    struct Piece {
        std::int64_t scan, from, to;
    };
    std::vector<Piece> pieces;
    std::vector<std::int64_t> places;
    std::int64_t bytes = 0;
    const std::int64_t step = std::max<std::int64_t>(1, splits / (8 * threads));
    for (std::int64_t i = 0; i < count; ++i) {
        places.push_back(bytes);
        bytes += ScanSizes(*pages.signs, found.scans[i]).left;
        for (std::int64_t from = 0; from < found.scans[i].splits; from += step)
            pieces.push_back({i, from, std::min(found.scans[i].splits, from + step)});
    }
    unsigned char* const shared = shared_memory.at_least(static_cast<std::size_t>(bytes));
    for_each(static_cast<std::int64_t>(pieces.size()), true, [&](std::int64_t item) {
        Scan scan = found.scans[pieces[item].scan];
        scanned(scan, pieces[item].from, pieces[item].to, shared + places[pieces[item].scan]);
    });
    for_each(count, true, [&](std::int64_t i) {
        Scan scan = found.scans[i];
        const ScanSizes own(*pages.signs, scan);
        lay(*pages.signs, scan, query_memory.at_least(static_cast<std::size_t>(own.queries)), shared + places[i]);
        rank_runs(scan);
        pick(scan, found.lists.data() + scan.at);
    });
    return found;
}
