// Part of attention.cpp: whether the numbers of a call lead into its arrays.

Sizes checked_sizes(const Pages& pages) {
    const bool planes = pages.layout == KvLayout::bit_planes, integers = planes || pages.layout == KvLayout::int8;
    const bool kivi = pages.layout == KvLayout::kivi, nuq = pages.layout == KvLayout::kvquant;
    const bool quantized = integers || kivi || pages.layout == KvLayout::fp8;
    if (pages.head_dim < 1 || pages.head_dim > MOST_COLUMNS) refuse("heads of 1 to 512 columns are supported");
    if (pages.kv_heads < 1 || pages.kv_heads > 1 << 16) refuse("impossible number of key-value heads");
    if (pages.block < 16 || pages.block % 16 != 0 || pages.block > 1 << 16)
        refuse("a block holds a multiple of 16 slots");
    const std::int64_t padded = (pages.head_dim + 15) / 16 * 16;
    const std::int64_t most = std::numeric_limits<std::int64_t>::max() / 4 / padded / pages.kv_heads / pages.block;
    if (pages.blocks < 0 || pages.blocks > std::min<std::int64_t>(most, EMPTY)) refuse("impossible number of blocks");
    if (quantized != (pages.key_scales != nullptr) || (quantized || nuq) != (pages.value_scales != nullptr))
        refuse("pages of codes, and no others, have scales; those of KVQuant of values alone");
    if (kivi != (pages.key_zeros != nullptr) || kivi != (pages.value_zeros != nullptr))
        refuse("pages of KIVI, and no others, have zeros");
    if (planes != (pages.bases != nullptr)) refuse("planes, and no others, have bases");
    if (nuq != (pages.channels != nullptr)) refuse("pages of KVQuant, and no others, have channels");
    if (!planes && !kivi && pages.recent_keys != nullptr) refuse("planes and KIVI alone have recent blocks");
    if (kivi) {
        if (pages.recent_keys == nullptr || pages.recent_values == nullptr) refuse("KIVI wants recent blocks");
        if (pages.units < 16 || pages.units % 16 != 0 || pages.head_dim % pages.units != 0 ||
            pages.block % pages.units != 0)
            refuse("groups of KIVI are a multiple of 16, and divide blocks and heads");
        if (pages.bits != 2 && pages.bits != 4) refuse("codes of KIVI have 2 or 4 bits");
    }
    if (planes) {
        if (pages.head_dim % 16 != 0) refuse("planes are of heads of a multiple of 16 columns");
        for (const Coordinates* each : {&pages.bases->keys, &pages.bases->values})
            for (std::int64_t g = 0; g < pages.kv_heads; ++g) {
                std::int64_t units = 0;
                for (std::int64_t i = 0; i < pages.head_dim / 8; ++i) {
                    const std::int64_t bits = each->bits[g * (pages.head_dim / 8) + i];
                    if (bits > MOST_BITS) refuse("a coordinate has 6 bits at most");
                    units += bits;
                }
                if (units != pages.units) refuse("the bits of a head do not add up to its planes");
            }
    }
    if (pages.signs != nullptr) {
        if (planes || kivi || nuq) refuse("one-bit keys lie beside pages of floats, int8 and fp8");
        const Signs& signs = *pages.signs;
        if (signs.fast < 0 || signs.slow < 0 || 2 * (signs.fast + signs.slow) > pages.head_dim ||
            signs.fast_padded < signs.fast || signs.fast_padded % 16 != 0 || signs.runs < 0 || signs.runs % RUNS != 0)
            refuse("impossible tables of angles");
        if ((signs.share == 0) == (signs.topk == 0) || signs.share < 0 || signs.share == 1 || signs.topk < 0 ||
            (signs.share == 0 && signs.topk < 2) || signs.whole < 0)
            refuse("rows read two runs or more, or half of all or less");
    }
    if (nuq) {
        if (pages.bits != 3 && pages.bits != 4) refuse("codes of KVQuant have 3 or 4 bits");
        if (pages.head_dim % 8 != 0 || pages.head_dim > 256)
            refuse("KVQuant is of heads of a multiple of 8 columns, 256 at most");
        if (pages.outliers < 1 || pages.outliers >= pages.head_dim) refuse("impossible number of outliers");
    }
    const std::int64_t key_run = integers ? (pages.head_dim + 3) / 4 * 64 : pages.head_dim * 16;
    std::int64_t raw_key = 0, raw_value = 0;
    if (planes) raw_key = raw_value = 16 * pages.units;
    if (kivi) raw_key = raw_value = 2 * pages.bits * pages.head_dim;
    if (nuq) raw_key = raw_value = 2 * pages.bits * pages.head_dim;
    if (pages.layout == KvLayout::fp8) raw_key = key_run, raw_value = padded * 16;
    return {pages.kv_heads, pages.head_dim, padded, pages.block, key_run, padded * 16, raw_key, raw_value};
}

void check(const Attention& a, const Pages& pages) {
    if (a.rows < 0 || a.sequences < 0 || a.width < 0 || a.rows > EMPTY || a.sequences > EMPTY || a.width > EMPTY)
        refuse("impossible shape of rows or block tables");
    if (a.heads < 1 || a.heads > 1 << 16 || a.heads % pages.kv_heads != 0)
        refuse("query heads are not a multiple of the key-value heads");
    if (a.window < 0) refuse("a window is at least 1");
    if (a.width * pages.block > EMPTY) refuse("a block table reaches past 2^31 slots");
    if (a.tree != nullptr && a.key_positions != nullptr) refuse("a tree mask wants positions implied by the slots");
    if (a.row_starts[0] != 0 || a.row_starts[a.sequences] != a.rows) refuse("row_starts do not cover the rows");
    if ((pages.recent_keys != nullptr) != (a.tails != nullptr)) refuse("recent blocks want to be named, each sequence's");
    std::int64_t branches = 0;
    for (std::int64_t b = 0; b < a.sequences; ++b) {
        const std::int64_t own = std::int64_t{a.row_starts[b + 1]} - a.row_starts[b], length = a.lengths[b];
        if (own < 0) refuse("row_starts decrease");
        branches += own * own;
        if (a.tails != nullptr && (a.tails[b] < 0 || a.tails[b] >= pages.tails)) refuse("a recent block does not exist");
        if (length < own) refuse("a sequence has more rows than filled slots");
        if (length > a.width * pages.block) refuse("a length lies beyond its block table");
        for (std::int64_t i = 0; i * pages.block < length; ++i) {
            const std::int64_t block = a.tables[b * a.width + i];
            if (block < 0 || block >= pages.blocks) refuse("a block table names a block that does not exist");
        }
    }
    if (a.dense_until != nullptr) {
        if (pages.signs == nullptr) refuse("rows choose by one-bit keys, and there are none");
        if (a.mass != nullptr || a.tree != nullptr || a.key_positions != nullptr || a.window != 0)
            refuse("rows that choose keys have no mass, tree, positions of keys or window");
        for (std::int64_t b = 0; b < a.sequences; ++b)
            for (std::int64_t n = a.row_starts[b]; n < a.row_starts[b + 1]; ++n)
                if (a.positions[n] != a.lengths[b] - (a.row_starts[b + 1] - n) || a.positions[n] / 16 >= pages.signs->runs)
                    refuse("rows that choose keys are the last slots of their sequences, within the tables of angles");
    }
    if (a.prompts.until != nullptr) {
        const Prompts& p = a.prompts;
        if (a.mass != nullptr || a.tree != nullptr || a.key_positions != nullptr || a.window != 0)
            refuse("rows of prompts that read little have no mass, tree, positions of keys or window");
        if (p.sinks < 0 || p.sinks > EMPTY || p.band < 0 || p.band > EMPTY || (p.band == 0) != (p.lost > 0.0f) ||
            !(p.lost < 1.0f) || p.whole < 0)
            refuse("rows of prompts see a band of slots, or skip less than all of their weights");
        for (std::int64_t n = 0, b = 0; n < a.rows; ++n) {
            while (n == a.row_starts[b + 1]) ++b;
            if (a.positions[n] != a.lengths[b] - (a.row_starts[b + 1] - n))
                refuse("rows of prompts that read little are the last slots of their sequences");
        }
    }
    if (a.tree != nullptr && a.tree_size != branches)
        refuse("tree masks are not [T, T] for every sequence's T rows");
    for (std::int64_t n = 0; n < a.rows; ++n)
        if (a.positions[n] < 0 || a.positions[n] == EMPTY) refuse("a position lies outside 0 .. 2^31 - 2");
}
